"""A sequence's attributes are written in one file: its own."""

import ast
import dataclasses
from pathlib import Path

import numpy as np

from rl.protocol.messages import Prompt
from rl.rollout import sequence
from rl.rollout.agent_loops.commands import single_turn
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler

ROOM = Path(sequence.__file__).parent


def attributes() -> set[str]:
    """Names of the attributes of a sequence and its group."""
    request = Request(Prompt(0, "any", np.zeros(1, np.int32)))
    group = sequence.SequenceGroup(0, request, Sampler.Config(), StopConditions(max_new_tokens=1), None, None)
    made = sequence.Sequence(group, 0, [0], single_turn)
    return set(vars(made)) | {field.name for field in dataclasses.fields(group)}


def writes(source: str, names: set[str]) -> list[str]:
    """Return `line: name` of each assignment to such an attribute of anything but `self`."""
    stores = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    others = [n for n in stores if not (isinstance(n.value, ast.Name) and n.value.id == "self")]
    return [f"{n.lineno}: {n.attr}" for n in sorted(others, key=lambda n: n.lineno) if n.attr in names]


def test_no_other_file_writes_a_sequences_attributes():
    names = attributes() - {"error"}  # of a group, set where its request fails
    assert {"state", "pages", "cached", "cache_key", "tokens", "reason", "started"} <= names
    paths = [path for path in ROOM.rglob("*.py") if path.name != "sequence.py"]
    assert len(paths) > 10
    assert [f"{path.name}:{line}" for path in paths for line in writes(path.read_text(), names)] == []


def test_a_write_is_found():
    assert writes("a.b.state = 1\na.cached += 1\nself.pages = []\nx, a.pages = 1, 2", {"state", "cached", "pages"}) == [
        "1: state",
        "2: cached",
        "4: pages",
    ]
