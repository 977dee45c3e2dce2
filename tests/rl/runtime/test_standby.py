"""States of a trainer in the memory of another process, and who may publish."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.run.events import EventLog
from mesh import make_mesh
from rl.parameter_server.client import connect_local
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.push.publisher import Pusher
from rl.parameter_server.server import ParameterServer
from rl.runtime.standby import TrainerStates, states_config
from tests.rl.tiny import tiny_experiment


def state(step: int) -> dict[str, Any]:
    """Return a state like a trainer's: nested, of several types, with scalars."""
    rng = np.random.default_rng(step)
    sharding = jax.sharding.NamedSharding(make_mesh(), jax.sharding.PartitionSpec())
    put = lambda x: jax.device_put(jnp.asarray(x), sharding)  # noqa: E731
    params = {"head": {"weight": put(rng.standard_normal((3, 5)).astype(np.float32))}, "base": put(np.arange(4.0))}
    mu = jax.tree.map(lambda x: put(rng.standard_normal(x.shape).astype(jnp.bfloat16)), params)
    return {"params": params, "opt_state": ({"mu": mu, "count": put(np.int32(step))}, ()), "step": put(np.uint32(step))}


def send(trainer: TrainerStates, held: ParameterServer, step: int, extras: dict[str, Any]) -> None:
    """Send a state until it has come: one that is due while another is on its way is left out."""
    give_up = time.monotonic() + 20
    while held.directory is None or held.directory.latest() != step:
        assert time.monotonic() < give_up
        trainer.hold(step, state(step), extras)
        time.sleep(0.02)


def test_a_standby_restores_the_newest_state_with_its_bits(tmp_path: Path) -> None:
    held = states_config(tiny_experiment()).build()
    events = EventLog(tmp_path / "events.jsonl")
    trainer, standby = TrainerStates(None, connect_local(held), events), TrainerStates(held, None, events)
    trainer.frozen = {"params/base"}
    assert trainer.latest_step() is None
    for step in (7, 8):
        send(trainer, held, step, {"versions": [step - 1], "pool": {"seen": list(range(1000 * step))}})
    assert standby.latest_step() == 8
    found, extras = standby.restore(state(8), 8)
    assert jax.tree.structure(found) == jax.tree.structure(state(8))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(state(8)), strict=True):
        assert ours.dtype == theirs.dtype and np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert extras == {"versions": [7], "pool": {"seen": list(range(8000))}}
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(found)
    again, _ = standby.restore(state(8), 8)
    assert again["step"] == 8, "what is restored may be overwritten"
    trainer.hold(9, state(9), {})
    time.sleep(0.5)
    assert standby.latest_step() == 8, "a trainer that was given up sends nothing to its successor"


def test_a_new_trainer_begins_behind_what_the_standby_holds(tmp_path: Path) -> None:
    held = states_config(tiny_experiment()).build()
    events, states = EventLog(tmp_path / "events.jsonl"), None
    for step in (9, 5):  # the second one was restored from a checkpoint
        states = TrainerStates(held, connect_local(held), events)
        send(states, held, step, {})
    assert states is not None and states.latest_step() == 5


def test_a_trainer_that_was_replaced_publishes_no_more() -> None:
    server = ParameterServer.Config().build()
    client, weights = connect_local(server), {"w": jnp.arange(4.0)}
    old, new = (client.publisher(pusher=Pusher(name)) for name in ("old", "new"))
    client.directory.rewind(0, "old")
    assert old.publish_async(weights, 1).wait()
    client.directory.rewind(1, "new")
    with pytest.raises(WeightsError, match="version 2: another trainer has taken over"):
        old.publish_async(weights, 2).wait()
    assert new.publish_async(weights, 2).wait() and client.directory.versions() == [1, 2]
