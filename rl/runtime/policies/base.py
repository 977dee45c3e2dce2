"""The base of the policies, read or drawn once for all their trainers, and the memory that all need."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from axlearn_like.config import to_text
from axlearn_like.layers.base import first_params
from axlearn_like.layers.parameter_names import only
from axlearn_like.layers.wrappers.shared_base import Base, base_of, check_adapter
from axlearn_like.learner.schedules import GivenRate
from axlearn_like.operations.memory import check_states_fit
from mesh.rules import use_mesh
from rl.runtime.policies.joint_updates import width_of
from rl.training.config import PolicyTrainingConfig
from rl.training.spec import FirstVersion


def check_memory(cfgs: Iterable[PolicyTrainingConfig[Any]], *, shared: bool) -> None:
    """Refuse policies' trainers whose states exceed a device (UserError); `shared`: adapters of one base."""
    known: dict[str, tuple[Any, frozenset[str]]] = {}
    alike = Counter[str]()  # policies of one model and optimizer: an update may be of several of them
    found: list[tuple[Any, frozenset[str]]] = []
    for cfg in cfgs:
        key = f"{to_text(cfg.model)}\n{to_text(cfg.learner.clone(schedule=GivenRate.Config()))}"
        mesh = cfg.check_sizes()
        if key not in known:
            with use_mesh(mesh, cfg.axis_rules):
                learner = cfg.build_learner()
                state = cfg.program(mesh, learner).state
                known[key] = state, learner.frozen(state["params"])
        found.append(known[key])
        alike[key] += 1
    states = [state for state, _ in found]
    if shared:
        check_states_fit(states, mesh, [frozen for _, frozen in found], stacked=width_of(max(alike.values())))
    else:
        check_states_fit(states, mesh)


def make_base(
    cfg: PolicyTrainingConfig[Any], first: FirstVersion | None = None, devices: Sequence[Any] | None = None
) -> Base:
    """Return the frozen parameters of a policy by LoRA, read or drawn once.

    Args:
        cfg: config of the trainer of a policy that wraps all layers that one of the others wraps.
        first: source of the whole version 0, of which the factors are left out; None: drawn by seed 0.
        devices: devices of the trainers' mesh; None: all.

    Raises:
        UserError: the learner trains other parameters than the factors of LoRA layers.
    """
    first = first or FirstVersion()
    mesh = cfg.check_sizes(devices)
    with use_mesh(mesh, cfg.axis_rules):
        learner = cfg.build_learner()
        program = cfg.program(mesh, learner)
        wanted = program.state["params"]
        frozen = learner.frozen(wanted)
        check_adapter(wanted, frozen)
        if first.initial is not None:
            params = only(first.initial(wanted), frozen)
        else:
            base = only(wanted, frozen)
            params = first_params(program.init, first.seed, base, lambda params: only(params, frozen))
    return base_of(params)
