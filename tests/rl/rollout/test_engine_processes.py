"""An engine of two processes: it draws what one process on a mesh of the same shape draws, to the bit.

The draws are compared with --full alone; how calls reach the processes, and who is refused, in every run of the tests.
A whole run with such a worker, with --full too: tests/rl/runtime/ray/test_worker_group.py.
"""

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from mesh import UserError, enable_compilation_cache
from mesh.distributed import ProcessGroup, join
from rl.parameter_server.client import connect_local
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.manifest import Manifest
from rl.parameter_server.pull.receiver import Receiver
from rl.parameter_server.server import ParameterServer
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.executor import Executor
from rl.rollout.model_runner.processes.calls import RunnerCall
from rl.rollout.model_runner.processes.pulls import GroupReceiver
from rl.rollout.model_runner.processes.remote_runner import RemoteRunner
from rl.rollout.model_runner.processes.remote_runners import RemoteRunnerLost, RemoteRunners
from rl.rollout.model_runner.runner import ModelRunner
from rl.rollout.request import Request
from rl.rollout.sampling import Sampler
from tests.elsewhere import elsewhere, in_two_processes
from tests.rl.parameter_server.deployment import Deployment
from tests.rl.parameter_server.test_any_mesh_to_any_mesh import endpoints, reach
from tests.rl.tiny import make_prompt, tiny_params, tiny_policy

TOKEN = "of the run"
MESHES = {"dense": {"tensor": 2}, "moe": {"tensor": 2}, "experts": {"expert": 2}}  # by the kind of policy
RULES = Sampler.Config(temperature=0.7, top_p=0.9, repetition_penalty=1.3, logit_bias=((3, 2.0),))


def policy(kind: str) -> Decoder.Config:
    cfg = tiny_policy(num_layers=2)
    if kind != "dense":
        router = SoftmaxRouter.Config(top_k=2)
        cfg.block.feed_forward = MoE.Config(num_experts=4, router=router, experts=Experts.Config(hidden=8))  # pyright: ignore
    return cfg


def config(kind: str, mesh: dict[str, int]) -> RolloutEngine.Config:
    """An engine with so few pages that sequences are preempted."""
    cfg = RolloutEngine.Config(
        model=policy(kind), stop_tokens=tuple(range(0, 272, 4)), max_prompt_tokens=24, max_new_tokens=12
    )
    return cfg.set(mesh=mesh, max_num_seqs=8, page_size=8, pages=16, steps_per_dispatch=4)


def draw(engine: RolloutEngine, take: Any) -> list[Any]:
    """Return rollouts of prompts of all lengths; the weights change in the middle. `take(version)` gives them."""
    engine.set_weights(take(0), 0)
    for i in range(8):
        sampler = RULES if i == 5 else None
        engine.submit(Request(make_prompt(i, 1 + 3 * i), samples=2, seed=5, sampler=sampler))
    finished = [one for _ in range(3) for one in engine.step()]
    engine.set_weights(take(1), 1)
    while engine.busy:
        finished += engine.step()
    assert engine.stats()["preemptions"] > 0
    engine.sleep()
    engine.set_weights(take(0), 0, rewind=True)
    again = engine.generate([Request(make_prompt(9), samples=2, seed=5)])
    rollouts = [r for one in sorted(finished, key=lambda one: one.number) for r in one.rollouts]
    return [
        (r.tokens.tolist(), r.logprobs.tobytes().hex(), r.versions.tolist(), r.finish_reason, r.tags)
        for r in [*rollouts, *again]
    ]


def in_one(kind: str, places: list[dict[str, Any]]) -> list[Any]:
    enable_compilation_cache()
    jax.config.update("jax_num_cpu_devices", 2)
    engine = config(kind, MESHES[kind]).build()
    receiver = reach(places).receiver(engine.runner.weights_like)
    return draw(engine, lambda version: engine.place(receiver.pull(version)))


def as_one_of_two(address: str, index: int, kind: str, places: list[dict[str, Any]]) -> dict[str, Any]:
    enable_compilation_cache()
    jax.config.update("jax_num_cpu_devices", 1)
    join(address, index, 2, role="worker-0")
    processes, cfg, client = ProcessGroup("worker-0"), config(kind, MESHES[kind]), reach(places)
    damaged = [0]
    if index:
        runner = ModelRunner(cfg)
        receiver = counting(client.receiver(runner.weights_like), damaged)
        RemoteRunner(runner, receiver, TOKEN).meet(processes).run()
        return {"damaged": damaged[0], "needed": receiver.stats.needed}
    remote_runners = RemoteRunners.meet(processes, TOKEN)
    engine = cfg.build(remote_runners=remote_runners)
    receiver = GroupReceiver(counting(client.receiver(engine.runner.weights_like), damaged), remote_runners)
    take = lambda version: receiver.place(receiver.pull(version), engine.executor)  # noqa: E731
    with pytest.raises(UserError) as refused:
        engine.set_weights(tiny_params(policy(kind)), 0)
    spoilt = receiver.pull(0)
    spoilt.params["embedding"]["weight_vd"] = doubled(spoilt.params["embedding"]["weight_vd"])
    with pytest.raises(WeightsError, match="is not what the trainer had"):
        receiver.place(spoilt, engine.executor)
    found = draw(engine, take)
    assert not engine.executor.leaving
    engine.executor.close()
    return {"rollouts": found, "damaged": damaged[0], "needed": receiver.stats.needed, "refused": str(refused.value)}


def doubled(array: jax.Array) -> jax.Array:
    """Return the array with twice as large elements on this process's devices, by no program of several processes."""
    shards = [2 * shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def counting(receiver: Receiver, damaged: list[int]) -> Receiver:
    """Count the versions that the receiver finds damaged."""
    check = receiver.check

    def counted(manifest: Manifest, params: Params) -> None:
        try:
            check(manifest, params)
        except WeightsError:
            damaged[0] += 1
            raise

    receiver.check = counted
    return receiver


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.full) for kind in MESHES])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """A kind of policy, bytes of its parameters, and a parameter server with two versions of them."""
    deployment = Deployment(ParameterServer.Config(shared_memory=False, keep=3), remote=True)
    publisher, nbytes = deployment.connect().publisher(), 0
    for version in (0, 1):
        params = jax.tree.map(jnp.asarray, tiny_params(policy(request.param), seed=version))
        publisher.publish_async(params, version).wait()
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    yield request.param, nbytes, endpoints(deployment)
    deployment.close()


def test_two_processes_draw_what_one_draws_to_the_bit(served: tuple[str, int, list[dict[str, Any]]]) -> None:
    kind, nbytes, places = served
    expected = elsewhere(in_one, kind, places)
    leader, remote = in_two_processes(as_one_of_two, kind, places)
    assert leader["rollouts"] == expected
    assert any(len(set(versions)) == 2 for _, _, versions, _, _ in expected), "the weights change within a sequence"
    assert leader["damaged"] == remote["damaged"] == 1, "what is not the trainer's is refused by both"
    assert leader["needed"] == 2 * remote["needed"]
    # Norms are in both, and with experts that are shared all but these; the rest is cut in two.
    assert remote["needed"] < (0.6 if kind != "experts" else 0.95) * nbytes
    assert leader["refused"] == "an engine of several processes takes its weights from a parameter server only"


def late(address: str, index: int) -> str:
    """A remote runner that has joined and never comes to its leader."""
    jax.config.update("jax_num_cpu_devices", 1)
    join(address, index, 2, role="worker-3")
    processes = ProcessGroup("worker-3", limit=1.0)
    jax.devices()
    if index:
        time.sleep(5.0)
        return ""
    with pytest.raises(TimeoutError) as caught:
        RemoteRunners.meet(processes, TOKEN)
    return str(caught.value)


def test_a_remote_runner_that_never_comes_is_named() -> None:
    message, _ = in_two_processes(late)
    assert message.startswith("worker-3 has waited ") and "for worker-3-1" in message


# ---- leader and remote runner in one process


@pytest.fixture
def remote() -> Iterator[RemoteRunner]:
    """A remote runner of one device, whose loop does not run."""
    runner = ModelRunner(config("dense", {}))
    weights = connect_local(ParameterServer.Config().build())
    made = RemoteRunner(runner, weights.receiver(runner.weights_like), TOKEN)
    yield made
    made._server.close()


def test_calls_arrive_in_order_and_the_leader_learns_that_a_remote_runner_must_go(remote: RemoteRunner) -> None:
    leaving, loop = [False], threading.Thread(target=lambda: remote.run(lambda: leaving[0]))
    remote_runners = RemoteRunners({"worker-0-1": remote._server.endpoint})
    loop.start()
    runner = remote._runner
    runner.cache.pool = jax.tree.map(jnp.ones_like, runner.cache.pool)
    executor = Executor(ModelRunner(config("dense", {})), remote_runners)
    executor.zero([1, 2])
    assert not executor.leaving
    leaving[0] = True
    give_up = time.monotonic() + 20
    while not executor.leaving and time.monotonic() < give_up:
        time.sleep(0.05)
    assert executor.leaving, "it is asked while there are no calls"
    executor.close()
    loop.join(20)
    assert not loop.is_alive()
    zeroed = [page for page in range(16) if not np.asarray(runner.cache.pool["k"][page]).any()]
    assert zeroed == [0, 1, 2]  # and the null page


def test_strangers_and_calls_out_of_order_are_refused(remote: RemoteRunner) -> None:
    endpoint = remote._server.endpoint
    with pytest.raises(RemoteRunnerLost, match="worker-0-1 is gone: wrong token"):
        RemoteRunners({"worker-0-1": dataclasses.replace(endpoint, token="guessed")})
    first, second = RemoteRunners({"worker-0-1": endpoint}), RemoteRunners({"worker-0-1": endpoint})
    first.send(RunnerCall("ping"))
    first.send(RunnerCall("ping"))
    give_up = time.monotonic() + 20
    while remote._turn < 2 and time.monotonic() < give_up:
        time.sleep(0.01)
    with pytest.raises(RemoteRunnerLost, match="worker-0-1 could not take a call: .* call 0 came where call 2 was due"):
        for _ in range(50):
            second.send(RunnerCall("ping"))
            time.sleep(0.02)
    remote._server.close()
    with pytest.raises(RemoteRunnerLost, match="worker-0-1 is gone"):
        for _ in range(50):
            first.send(RunnerCall("ping"))
            time.sleep(0.02)
