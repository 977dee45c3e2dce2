"""Spread experts in a trainer: what fits, and the program of its step."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from axlearn_like.checkpoint.tiers import CheckpointTiers
from axlearn_like.config import resolve
from axlearn_like.elastic.member import Member
from axlearn_like.elastic.memory import PeerMemory
from axlearn_like.layers.base import Params, build_abstract
from axlearn_like.learner import Learner
from axlearn_like.run.events import EventLog
from axlearn_like.training.program import TrainProgram
from axlearn_like.training.step import State, init_state
from axlearn_like.training.updates.spread.placed import ExpertPlaces
from axlearn_like.training.updates.spread.programs import SpreadPrograms
from axlearn_like.training.updates.spread.step import SpreadStep
from axlearn_like.training.updates.zebra.zebra import check_divided
from mesh import make_mesh
from mesh.rules import use_mesh


def check_spread(trainer: Any) -> None:
    """Refuse what has no update with spread experts (ConfigError)."""
    check_divided(trainer, "elastic.experts")
    trainer.require("evaluators", trainer.evaluators == (), "() with elastic.experts: no member has all parameters")
    trainer.require("compiler_options", trainer.compiler_options == {}, "{} with elastic.experts")
    every = trainer.checkpoint.save_every is not None
    trainer.checkpoint.require("save_every", every, "a number with elastic.experts: all members send theirs then")


def spread_program(
    trainer: Any, program: TrainProgram, learner: Learner, member: Member | None, run: tuple[CheckpointTiers, EventLog]
) -> TrainProgram:
    """Return the program whose step spreads experts; its described state is one in host memory.

    Args:
        trainer: config of the trainer.
        program: its program without `elastic`.
        learner: the learner.
        member: this process; None: it is alone.
        run: checkpoints, for which the members send their experts to one that writes them, and the events.
    """
    tiers, events = run
    model: Any = resolve(trainer.model, build_abstract)
    programs = SpreadPrograms(model, trainer.loss.build(), learner)
    places = ExpertPlaces(trainer.elastic.experts, programs.shape, member, events)
    step = SpreadStep(programs, places, trainer.elastic.parts, member, program.state)

    def due(number: int) -> bool:
        """Return True for an update that all members save after, not one that leaves alone."""
        everyone = member is None or member.ends_after(number)
        return everyone or tiers.should_save(number) or number == trainer.num_steps

    tiers.gathered = lambda number, state: step.gathered(dict(state)) if due(number) else None
    if member is not None:
        mesh = program.state["step"].sharding.mesh
        tiers.memory = PeerMemory(member, step, lambda: step.prepare(trainer.batch(mesh)))
        tiers.writes = member.is_leader
    host = _host_mesh()
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(host, x.sharding.spec)), program.state
    )
    return program._replace(step=step, state=state)


def first_in_host_memory(params: Params, learner: Learner, rules: Any) -> State:
    """Return the state before the first update, of parameters in host memory."""
    begin: Any = jax.jit(lambda params: init_state(params, learner), donate_argnums=0)
    with use_mesh(_host_mesh(), rules):
        return begin(params)


def _host_mesh() -> Mesh:
    return make_mesh({}, jax.devices("cpu")[:1])
