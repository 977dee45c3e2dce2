"""Updates that are compiled before their batches are there, such as while the first rollouts are drawn."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from axlearn_like.training.step import AccumulatedStep, State, calls_of
from mesh import to_named_sharding
from rl.training.program import Described


def compile_updates(step: Any, state: State, batches: Sequence[Described], mesh: Mesh) -> None:
    """Compile the update by such described arrays; calls find the programs, and wait for those under way.

    Args:
        step: train step of a session, whose programs are compiled by the first call of each.
        state: the state, arrays or described.
        batches: arrays of an update by padded rows, or those of packed rows of each length.
        mesh: the mesh, which is set.
    """
    if not isinstance(step, AccumulatedStep):
        for batch in batches:
            _compile(next(calls_of(step, state, batch)))
        return
    sums: Any = None
    for batch in batches:
        sums = to_named_sharding(jax.eval_shape(step.empty, step.trained(state), batch), mesh)
        accumulate: Any = step.accumulate
        accumulate.step.lower(sums, {**step.parted(state), "rows": batch}).compile()
    if batches:
        _compile(next(calls_of(step.update, state, sums)))


def _compile(call: Any) -> None:
    call.program.step.lower(call.changed, call.given).compile()
