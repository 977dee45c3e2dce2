"""A step of an experiment, described so that it can be traced and compiled without being run."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled step and its sizes; the mesh may be of devices that are not there.

    Attributes:
        name: name of the step: train, eval, score, prefill or decode.
        mesh: mesh that it runs on.
        trace: returns `jitted.trace(*abstract arguments)`; sets the mesh and its axis rules by itself.
        rows: rows of its batch.
        length: tokens of a row.
        flops: FLOPs of the model, on all devices together.
        counted: what those FLOPs are of, for people.
    """

    name: str
    mesh: Mesh
    trace: Callable[[], Any]
    rows: int
    length: int
    flops: float
    counted: str


# Name -> what describes the program: describing the state of a large model takes seconds.
Programs = Mapping[str, Callable[[], Program]]
