"""Seconds from the end of an update to the first token drawn with the new weights, for a policy of 0.6B parameters.

The worker waits for the version, as in a synchronous run: it pulls it as soon as it can be read, places and installs
it, and draws one token of a prompt of eight. The trainer has float32, the engine bfloat16. Updates are of the size of
a learning rate of 1e-6, which changes four bfloat16 values in a hundred here: random weights are not trained ones, and
their bytes compress otherwise. CPU seconds are those of each process; they depend less than the others on what else the
machine does. By turns for each way that versions can travel; the first version of each warms up.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.layers.decoder import Decoder
from models.qwen import qwen
from models.tiny import tiny
from rl.parameter_server.pull.prefetcher import Prefetcher
from rl.parameter_server.transport.endpoint import Endpoint
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.weights import types_read
from rl.rollout.request import Request, StopConditions
from tools.bench.harness.processes import in_process
from tools.bench.weights.sections.roles import Clocks, Server, reach

MODEL = "Qwen3-0.6B"
UPDATES = 5
STEP = 1e-6
WAYS: dict[str, dict[str, Any]] = {
    "dense": {"shared_memory": False},
    "delta": {"shared_memory": False, "codec": "delta"},
    "shared_memory": {"shared_memory": True},
}
_PROMPT = np.arange(3, 11, dtype=np.int32)


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure `update_to_first_token_s`, by way, and the parts of it in `first_token`."""
    updates, ways = 1 if quick else UPDATES, {}
    for way in ("delta",) if quick else WAYS:
        settings = WAYS[way]
        with in_process(Server, keep=2, codec=settings.get("codec", "raw")) as server:
            endpoint = server.endpoint()
            with in_process(UpdatingTrainer, endpoint=endpoint, quick=quick, settings=settings) as trainer:
                ways[way] = _follow(trainer, server, endpoint, updates, settings, quick=quick)
    totals = {way: figures["total_s"] for way, figures in ways.items()}
    return {"update_to_first_token_s": totals, "first_token": {"model": MODEL, "updates": updates, **ways}}


def policy(*, quick: bool) -> Decoder.Config:
    """Return the policy; a tiny one for a smoke test."""
    return (tiny(vocab_size=64, dim=32, num_layers=1, hidden=64) if quick else qwen(MODEL)).set(dtype="bfloat16")


def engine(*, quick: bool) -> RolloutEngine.Config:
    """Return the engine: one sequence, one token a dispatch."""
    sizes: dict[str, Any] = {"max_prompt_tokens": 16, "max_new_tokens": 16, "max_num_seqs": 1, "steps_per_dispatch": 1}
    return RolloutEngine.Config(model=policy(quick=quick), stop_tokens=(), **sizes)


def random_parameters(cfg: Decoder.Config) -> Params:
    """Return float32 parameters of trained size: norms of one, and numbers that repeat every 16 MB."""
    numbers = 0.02 * np.random.default_rng(0).standard_normal(1 << 22, np.float32)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        scale = jax.tree_util.keystr(path).endswith("['scale']")
        return jnp.ones(leaf.shape) if scale else jnp.asarray(np.resize(numbers, leaf.shape))

    return jax.tree_util.tree_map_with_path(draw, split(build_abstract(cfg))[1])


class UpdatingTrainer:
    """A trainer that changes every parameter a little, and publishes."""

    def __init__(self, endpoint: Endpoint, quick: bool, settings: dict[str, Any]):
        self._params = random_parameters(policy(quick=quick))
        self._publisher = reach(endpoint, **settings).publisher(dtypes=types_read(engine(quick=quick)))

    def update(self, version: int) -> tuple[float, float, float]:
        """Make a version; return when its update was done, when it could be read, and the CPU seconds in between."""
        step = STEP if version % 2 else -STEP
        params = jax.tree.map(lambda leaf: leaf + step * jnp.sign(jnp.roll(leaf, version, -1)), self._params)
        self._params = jax.block_until_ready(params)
        with Clocks() as clocks:
            self._publisher.publish_async(self._params, version).wait()
        return clocks.began, clocks.began + clocks.wall_s, clocks.cpu_s


def _follow(
    trainer: Any, server: Any, endpoint: Endpoint, updates: int, settings: dict[str, Any], *, quick: bool
) -> dict[str, float]:
    """Draw one token with each version, as soon as it can be done; medians of the parts."""
    drawing = engine(quick=quick).build()
    receiver = reach(endpoint, **settings).receiver(drawing.runner.weights_like)
    prefetcher = Prefetcher(receiver, drawing.place, newest=True, background=False)
    rows: list[dict[str, float]] = []
    with ThreadPoolExecutor(1) as beside:
        for version in range(updates + 2):  # the first compiles, and has no base; the second has memory to fill
            began, server_cpu = time.process_time(), server.cpu_s()
            update = beside.submit(trainer.update, version)
            placed, moved = prefetcher.take(version, 120.0)
            arrived, pulled = time.monotonic(), time.process_time()
            drawing.set_weights(placed, version)
            installed = time.monotonic()
            drawing.generate([Request(Prompt(version, "", _PROMPT), 1, seed=0, stop=StopConditions(max_new_tokens=1))])
            drawn, done = time.monotonic(), time.process_time()
            ended, readable, push_cpu = update.result()
            rows.append(
                {
                    "total_s": drawn - ended,
                    "push_s": readable - ended,
                    "pull_s": arrived - readable,
                    "swap_s": installed - arrived,
                    "draw_s": drawn - installed,
                    "push_cpu_s": push_cpu,
                    "server_cpu_s": server.cpu_s() - server_cpu,
                    "pull_cpu_s": pulled - began,
                    "draw_cpu_s": done - pulled,
                    "network_bytes": float(moved.network),
                    "nbytes": float(moved.needed),
                }
            )
    return {name: statistics.median(row[name] for row in rows[2:]) for name in rows[0]}
