"""A new worker's first rollout over a link of 100 Mbit/s: seconds from its first read of the weights, by codec.

The parameter server and the link are in a process of their own. The worker has its programs compiled, as a spare one
has; its weights are bfloat16. `first_s` is of the first worker that reads a version, for which the server encodes it;
`later_s` of the next one. With `delta` the worker holds the version of the update before, at a learning rate of 1e-6.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.layers.base import Params, split
from axlearn_like.layers.decoder import Decoder
from models.tiny import tiny
from rl.parameter_server.client import ParameterServerClient, connect
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.transport.endpoint import Endpoint
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from tests.benches.keeping import keeping
from tests.chaos.proxy import Proxy
from tools.bench.harness.interleave import Say
from tools.bench.harness.processes import in_process

RATE = 100e6 / 8  # bytes a second
CODECS = ("raw", "int8", "ecsq:0.01", "ecsq:0.03", "ecsq:0.1", "delta")
LEARNING_RATE = 1e-6


def policy(*, quick: bool) -> Decoder.Config:
    """Return a policy of 70 M parameters, or a tiny one."""
    if quick:
        return tiny(vocab_size=272, dim=64, num_layers=2)
    sizes = {"dim": 768, "num_layers": 8, "num_heads": 12, "num_kv_heads": 4, "head_dim": 64, "hidden": 3072}
    return tiny(vocab_size=272, **sizes).set(dtype="bfloat16")


class Source:
    """The parameter server behind a slow link, with two versions of random weights, an update of Adam apart."""

    def __init__(self, quick: bool):
        """Publish both."""
        params = split(policy(quick=quick).build(rngs=nnx.Rngs(0)))[1]
        rng = np.random.default_rng(0)
        self._server = ParameterServer.Config(keep=2, shared_memory=False).build()
        client = connect(self._server.cfg, [self._server.listen])
        publisher = client.publisher(dtypes=lambda path, dtype: np.dtype(jnp.bfloat16))
        for version in range(2):
            publisher.publish_async(params, version).wait()
            params = jax.tree.map(partial(_moved, rng), params)
        self._link = Proxy(self._server.listen().port, rate=RATE).__enter__()

    def endpoint(self, slow: bool) -> Endpoint:
        """Return where the server is found, over the link or beside it."""
        here = self._server.listen()
        return Endpoint("127.0.0.1", self._link.port if slow else here.port, here.token)


def _moved(rng: np.random.Generator, leaf: jax.Array) -> jax.Array:
    return (leaf + LEARNING_RATE * rng.choice((-1.0, 1.0), leaf.shape)).astype(leaf.dtype)


def measure(say: Say, *, quick: bool) -> dict[str, Any]:
    """Return seconds and bytes by codec, and `first_rollout_speedup`: those of raw over those of the best codec."""
    model = policy(quick=quick)
    cfg = RolloutEngine.Config(model=model, stop_tokens=(), max_prompt_tokens=32, max_new_tokens=16, max_num_seqs=1)
    engine = cfg.set(steps_per_dispatch=16).build()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = split(model.build(rngs=nnx.Rngs(0)))[1]
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=here), shapes)
    found: dict[str, dict[str, float]] = {}
    with in_process(Source, quick=quick) as source:
        near, far = source.endpoint(False), source.endpoint(True)
        first_rollout(engine, _client(near, "raw"), like, held=False)  # compiles
        parameters = sum(leaf.size for leaf in jax.tree.leaves(like))
        with keeping(found, lambda: figures(found, parameters)):
            for codec in CODECS:
                row: dict[str, float] = {}
                nbytes = 0
                for name in ("first_s", "later_s"):
                    row[name], nbytes = first_rollout(engine, _client(far, codec), like, held=codec == "delta")
                found[codec] = row | {"nbytes": nbytes}
                say(f"{codec}: {found[codec]}")
    return figures(found, parameters)


def figures(found: dict[str, dict[str, float]], parameters: int) -> dict[str, Any]:
    """Return speedups over `raw`, by the rows of the codecs that were measured, which is among them."""
    best = min((codec for codec in found if codec != "delta"), key=lambda codec: found[codec]["later_s"])
    speedup = {codec: round(found["raw"]["later_s"] / row["later_s"], 2) for codec, row in found.items()}
    return {"first_rollout_speedup": speedup[best], "first_rollout_codec": best, "first_rollout_by_codec": speedup,
            "first_rollout": found, "first_rollout_parameters": parameters}  # fmt: skip


def _client(endpoint: Endpoint, codec: str) -> ParameterServerClient:
    return connect(ParameterServer.Config(shared_memory=False, codec=codec), [lambda: endpoint])


def first_rollout(
    engine: RolloutEngine, client: ParameterServerClient, like: Params, *, held: bool
) -> tuple[float, int]:
    """Return seconds from the first read of version 1 to the end of a rollout, and the bytes that were read."""
    receiver = client.receiver(like)
    if held:
        receiver.pull(0, 600.0)
    began = time.monotonic()
    engine.set_weights(receiver.pull(1, 600.0), 1, rewind=True)
    engine.generate([Request(Prompt(id=0, family="link", tokens=np.arange(3, 35, dtype=np.int32)))])
    seconds = time.monotonic() - began
    nbytes = receiver.stats.network
    client.close()
    return round(seconds, 3), nbytes
