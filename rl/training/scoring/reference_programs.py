"""The policy and the programs of a reference on devices of its own, described: they are compiled before these exist."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.layers.base import Params
from mesh.rules import use_mesh
from rl.objective import Objective
from rl.training.config import PolicyTrainingConfig
from rl.training.logprobs import padded
from rl.training.program import make_score_rows
from rl.training.scoring.logprob_diff import make_logprobs
from rl.training.scoring.reference_states import describe_policy


class DescribedReference(NamedTuple):
    """A reference policy on a mesh."""

    mesh: Mesh  # mesh of its devices, which need not exist
    params: Params
    rows: Callable[..., Any]  # jitted `(params, arrays) -> log-probabilities`, by the forward pass of the update
    # Jitted `(params, tokens=, targets=, temperature=) -> Chosen`, in the engine's order of sums
    rollouts: Callable[..., Any]


def describe_reference(cfg: PolicyTrainingConfig[Any], mesh: Mesh) -> DescribedReference:
    """Return a reference as it is on this mesh (UserError: it does not fit)."""
    assert cfg.reference is not None, "a fleet's reference role is refused without one"
    with use_mesh(mesh, cfg.axis_rules):
        known, params, another = describe_policy(cfg.model, cfg.reference, mesh)
    numerics = "default" if another else numerics_of(cfg.model)
    rows = make_logprobs(known, cfg.spec(), routed=not another)
    rollouts = make_score_rows(known, cfg.chunks, numerics, cfg.head_tile)
    return DescribedReference(mesh, params, rows, rollouts)


def parts_of_rows(count: int, most: int | None, multiple: int) -> list[tuple[int, int]]:
    """Return how rows are scored: how many of them at a time, and in how many rows, which divide over the devices.

    Args:
        count: rows of a request.
        most: the rows of a device at a time; None: all.
        multiple: the number of devices that share the rows.
    """
    each = count if most is None else most * multiple
    counts = [min(each, count - first) for first in range(0, count, each)]
    return [(one, padded(one, multiple)) for one in counts]


def reference_programs(objective: Objective) -> tuple[str, ...]:
    """Return the names of the programs that score by the reference, as an experiment's `programs` has them."""
    needed = {"reference": objective.needs_reference, "reference_rollouts": objective.needs_divergence}
    return tuple(name for name, wanted in needed.items() if wanted)
