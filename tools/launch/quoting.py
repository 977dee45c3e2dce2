"""Quoting of a text for its readers: a shell, the kubelet, a reader of YAML 1.1. Nothing reaches them otherwise."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

_REFERENCE = re.compile(r"\$(?=[$(])")  # the kubelet reads $(NAME) and $$ in commands, arguments and variables
_EXPANDED = re.compile(r"\$\$|\$\(([^)]*)\)")
_BOOLEAN = ("y", "Y", "n", "N")  # booleans of YAML 1.1, unknown to PyYAML


def shell(*words: object) -> str:
    """Return words as a shell takes them: each comes out equal, whatever is in it."""
    return shlex.join(map(str, words))


def literal(text: str) -> str:
    """Return a text that the kubelet gives to the container as it is, where it would read `$(NAME)` and `$$`."""
    return _REFERENCE.sub("$$", text)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a text as the kubelet gives it to the container: unknown variables stay."""
    return _EXPANDED.sub(lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text)


_Base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # written in C, if libyaml is installed


class _Dumper(_Base):
    """Equal parts are written twice, not as anchors; scripts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: Any, text: str) -> Any:
    # "12e3" is a string here, and a number to the cluster's reader of YAML.
    quoted = "'" if text[:1] in "+-.0123456789" or text in _BOOLEAN else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else quoted)


_Dumper.add_representer(str, _text)


def as_yaml(*documents: Any) -> str:
    """Return documents as YAML 1.1, in which every text is read as a text."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)
