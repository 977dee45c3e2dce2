"""Digest of a lowered program: by what it computes, not by how its private functions are called.

jax names those with a counter, and writes one twice or once depending on what the process has traced before. So two
processes may lower the same function to different texts.
"""

import hashlib
import re

_FUNCTION = re.compile(r"^  func\.func (?:public |private )?(@(?:\"[^\"]*\"|[\w.$-]+))", re.MULTILINE)
_SYMBOL = re.compile(r"@(?:\"[^\"]*\"|[\w.$-]+)")
_MAIN = "@main"


def program_digest(text: str) -> str:
    """Return the digest of a program in StableHLO, as `Lowered.as_text` writes it."""
    around, functions = _functions(text)
    known: dict[str, str] = {}

    def digest(name: str) -> str:
        if name not in known:
            known[name] = name  # name inside its own body
            body = functions[name].replace(name, "@", 1)
            body = _SYMBOL.sub(lambda found: digest(found[0]) if found[0] in functions else found[0], body)
            known[name] = hashlib.sha256(body.encode()).hexdigest()
        return known[name]

    return hashlib.sha256(f"{around}\0{digest(_MAIN)}".encode()).hexdigest()


def _functions(text: str) -> tuple[str, dict[str, str]]:
    """Return what is around the functions of a module, and the text of each by its name."""
    starts = [*_FUNCTION.finditer(text)]
    functions: dict[str, str] = {}
    around, last = "", 0
    for found in starts:
        end = text.index("\n  }\n", found.start()) + len("\n  }\n")
        functions[found[1]] = text[found.start() : end]
        around, last = around + text[last : found.start()], end
    return around + text[last:], functions
