"""`axl bench policies`: sections that can be measured one by one; an interruption leaves what is done."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mesh.errors import UserError, did_you_mean
from mesh.programs.compilation import enable_compilation_cache
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.policies.rl import commands, rl
from tools.bench.policies.service import fairness, first_token, slots

# A section returns its figures; the argument asks for tiny jobs, which show that all runs.
SECTIONS: Mapping[str, Callable[[bool], dict[str, Any]]] = {
    "rl": rl,
    "commands": commands,
    "slots": slots,
    "first_token": first_token,
    "fairness": fairness,
}


def run(names: Sequence[str], say: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of sections, and `interrupted`: where Ctrl-C has ended it, or None.

    Raises:
        UserError: there is no such section.
    """
    for name in names:
        if name not in SECTIONS:
            near = did_you_mean(name, SECTIONS)
            raise UserError(f"--sections: there is no {name!r}{near}; expected some of {', '.join(SECTIONS)}")
    enable_compilation_cache()
    result: dict[str, Any] = {"bench": "policies", "interrupted": None, "machine": machine(), **circumstances()}
    for name in names or SECTIONS:
        try:
            found = SECTIONS[name](quick)
        except KeyboardInterrupt:
            result["interrupted"] = name
            break
        for figure, value in found.items():
            say(f"{name}: {figure} = {value}")
        result |= found
    return result
