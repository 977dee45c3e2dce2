"""The same decoder and the same update in plain JAX, without any library but optax.

A script for this model alone: one array for each weight of all layers, a scan, one jitted step on one device, and a
loss to watch. No configs, mesh, packing, checkpoints, or metrics.

There are two variants. `PLAIN` multiplies in the obvious way, by `@` and by einsum. `FLAT` uses the layouts that XLA's
CPU compiler prefers (matrices of two axes, heads before the length) and is otherwise the same: the cost of our layers
beside it is the price of the machinery, while against `PLAIN` the machinery and the layout are measured together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.peers.train_job import DTYPES, QUICK, TrainJob
from tools.bench.harness.protocol import StepServer

Params = dict[str, Any]


class Products(NamedTuple):
    """Matrix products: x [b, t, i] by weight [i, o]; and q, k, v [b, t, h, d] with a mask [t, t]."""

    linear: Callable[[jax.Array, jax.Array], jax.Array]
    attend: Callable[[jax.Array, jax.Array, jax.Array, np.ndarray], jax.Array]


def _softmax(scores: jax.Array, mask: np.ndarray, width: int) -> jax.Array:
    return jax.nn.softmax(jnp.where(mask, scores * width**-0.5, -1e30), axis=-1)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: np.ndarray) -> jax.Array:
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    return jnp.einsum("bhts,bshd->bthd", _softmax(scores, mask, q.shape[-1]).astype(v.dtype), v)


def _linear_flat(x: jax.Array, weight: jax.Array) -> jax.Array:
    return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], -1)


def _attend_flat(q: jax.Array, k: jax.Array, v: jax.Array, mask: np.ndarray) -> jax.Array:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32)
    weights = _softmax(scores, mask, q.shape[-1]).astype(v.dtype)
    mixed = jnp.einsum("bhts,bhsd->bhtd", weights, v, preferred_element_type=jnp.float32)
    return mixed.astype(v.dtype).transpose(0, 2, 1, 3)


PLAIN = Products(jnp.matmul, _attend)
FLAT = Products(_linear_flat, _attend_flat)


def init(job: TrainJob, key: jax.Array) -> Params:
    """Return normal weights, with variance 1 / fan-in."""
    keys = iter(jax.random.split(key, 9))

    def weight(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    n, d, f = job.layers, job.dim, job.ffn
    return {
        "table": weight(job.vocab, d, fan_in=d),
        "layers": {
            "norm1": jnp.ones((n, d)),
            "query": weight(n, d, d, fan_in=d),
            "key": weight(n, d, d, fan_in=d),
            "value": weight(n, d, d, fan_in=d),
            "out": weight(n, d, d, fan_in=d),
            "norm2": jnp.ones((n, d)),
            "gate": weight(n, d, f, fan_in=d),
            "up": weight(n, d, f, fan_in=d),
            "down": weight(n, f, d, fan_in=f),
        },
        "norm": jnp.ones(d),
        "head": weight(d, job.vocab, fan_in=d),
    }


def make_loss(
    job: TrainJob, dtype: str, products: Products = PLAIN
) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """Return the function `loss(params, tokens, targets)`: mean cross entropy."""
    angles = np.arange(job.length)[:, None] * job.rope_theta ** (-np.arange(0, job.head_dim, 2) / job.head_dim)
    cos, sin = (f(angles).astype(np.float32)[None, :, None, :] for f in (np.cos, np.sin))
    causal = np.tril(np.ones((job.length, job.length), bool))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(mean + job.norm_eps) * scale).astype(x.dtype)

    def rotated(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
        return products.linear(x, weight.astype(x.dtype))

    def heads(x: jax.Array, weight: jax.Array) -> jax.Array:
        return linear(x, weight).reshape(*x.shape[:2], job.heads, job.head_dim)

    @jax.checkpoint
    def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        y = norm(x, p["norm1"])
        q, k, v = rotated(heads(y, p["query"])), rotated(heads(y, p["key"])), heads(y, p["value"])
        x = x + linear(products.attend(q, k, v, causal).reshape(x.shape), p["out"])
        y = norm(x, p["norm2"])
        return x + linear(jax.nn.silu(linear(y, p["gate"])) * linear(y, p["up"]), p["down"]), None

    def loss(params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(block, params["table"].astype(dtype)[tokens], params["layers"])
        logits = linear(norm(x, params["norm"]), params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return loss


def make_step(job: TrainJob, dtype: str, products: Products = PLAIN) -> tuple[Any, Params, Any]:
    """Return the jitted `step(params, opt_state, tokens, targets) -> (params, opt_state, loss)`, and initial state."""
    loss = make_loss(job, dtype, products)

    def decays(params: Params) -> Any:  # matrices, and no scales
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in path[-1].key, params)

    optimizer = optax.chain(
        optax.clip_by_global_norm(job.clip),
        optax.adamw(job.learning_rate, job.b1, job.b2, job.eps, weight_decay=job.weight_decay, mask=decays),
    )

    def step(params: Params, opt_state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens, targets)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = jax.jit(lambda key: init(job, key))(jax.random.key(job.seed))
    return jax.jit(step, donate_argnums=(0, 1)), params, jax.jit(optimizer.init)(params)


def main() -> None:
    """Run steps on request until the runner ends the worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    job = QUICK if arguments.quick else TrainJob()
    step, params, opt_state = make_step(job, arguments.dtype, FLAT if arguments.flat else PLAIN)
    server = StepServer(f"jax {jax.__version__}", sum(leaf.size for leaf in jax.tree.leaves(params)))
    rows = np.random.default_rng(job.seed)

    def run(index: int) -> None:
        nonlocal params, opt_state
        tokens = rows.integers(0, job.vocab, (job.batch, job.length + 1), dtype=np.int32)
        params, opt_state, loss = step(params, opt_state, tokens[:, :-1], tokens[:, 1:])
        jax.block_until_ready(params)
        server.note(loss=float(loss))

    server.serve(run)


if __name__ == "__main__":
    main()
