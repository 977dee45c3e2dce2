"""Rows of prompts and completions over devices that share their tokens: attention and gradients of one device."""

from typing import Any

import numpy as np
import pytest

from tests.bounds import within
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@pytest.mark.parametrize("kernel", ["xla", pytest.param("splash", marks=pytest.mark.full)])
def test_devices_that_share_rows_give_what_one_gives(kernel: str):
    """XLA's products with a window, a cap and sinks; splash in simulation with a cap and sinks."""
    found: dict[str, float] = elsewhere(differences, kernel, environ={"XLA_FLAGS": QUICK}, timeout=400)
    assert set(found) == {"padded", "packed"}
    assert within(max(found.values()), 2e-6), found


def differences(kernel: str) -> dict[str, float]:
    """Return, by layout, the largest difference of values and gradients to one device, relative to the largest."""
    import jax
    import jax.numpy as jnp

    from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
    from axlearn_like.kernels.attention.dispatch import AttentionParams, FirstSupported
    from axlearn_like.kernels.attention.interface import ScoreRules
    from axlearn_like.kernels.attention.splash import Splash
    from axlearn_like.layers.contexts.sharded_rows import row_order, shard_rows
    from mesh import make_mesh
    from mesh.rules import constrain

    jax.config.update("jax_num_cpu_devices", 8)
    simulated = Splash.Config(block_q=128, block_kv=128, block_kv_compute=128, interpret=True)
    splash, scale, width = kernel == "splash", 32 if kernel == "splash" else 1, 32 if kernel == "splash" else 4
    rules = ScoreRules(window=None if splash else 6, soft_cap=2.0)
    rng = np.random.default_rng(0)
    found: dict[str, float] = {}
    for name, context in {"padded": padded(scale), "packed": packed(scale)}.items():
        live = context.seen() if name == "padded" else context.live
        length = live.shape[1]
        shape = (2, length, 2, 2, width)
        arrays = {"q": shape, "k": (2, length, 2, width), "v": (2, length, 2, width), "sinks": (2, 2)}
        given: Any = {one: rng.normal(size=size).astype(np.float32) for one, size in arrays.items()}
        weights = rng.normal(size=shape).astype(np.float32) * np.asarray(live)[..., None, None, None]

        def loss(given: Any, which: Any, context: Any = context, weights: Any = weights) -> Any:
            q, k, v = (given[one] for one in "qkv")
            params = AttentionParams(rules, which.build(), AllGather.Config().build(), given["sinks"])
            context = jax.tree.map(lambda x: constrain(x, "batch", *[None] * (x.ndim - 1)), context)
            if (order := row_order(q.shape[1])) is not None:
                context = shard_rows(context, order)
                q, k, v = (order.split(x) for x in (q, k, v))
                q, k, v = (constrain(x, "batch", "length", "heads", *[None] * (x.ndim - 3)) for x in (q, k, v))
            out, _ = context.attend(q, k, v, None, params)
            out = out if order is None else order.join(out)
            return jnp.sum(out * weights), out * (weights != 0)

        def result(which: Any, loss: Any = loss, given: Any = given) -> list[Any]:
            compute = jax.jit(lambda given: jax.value_and_grad(loss, has_aux=True)(given, which))
            (_, out), slopes = compute(given)
            return [np.asarray(x) for x in (out, *jax.tree.leaves(slopes))]

        expected = result(FirstSupported.Config())
        axes = {"sequence": 2} if splash else {"sequence": 2, "fsdp": 2, "tensor": 2}
        with jax.set_mesh(make_mesh(axes, jax.devices()[: 2 if splash else 8])):
            got = result(simulated if splash else FirstSupported.Config())
        pairs = zip(got, expected, strict=True)
        found[name] = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    return found


def padded(scale: int) -> Any:
    """Return two rows with a prompt and two completions each; the tokens of prompts are 3 and 4 times `scale`."""
    from axlearn_like.layers.contexts.packed import GroupContext

    lengths: Any = np.array([3, 4], np.int32) * scale
    return GroupContext(lengths, 4 * scale, 2, 6 * scale)


def packed(scale: int) -> Any:
    """Return two rows with two prompts, three completions of these, and padding behind both."""
    from axlearn_like.layers.contexts.packed import PackedGroupContext

    def row(*parts: tuple[int, int, int]) -> list[np.ndarray]:
        """Segments, positions and starts of parts (segment, tokens, first position)."""
        starts = np.cumsum([0, *(size for _, size, _ in parts)])
        columns = [
            (np.full(size * scale, segment), first * scale + np.arange(size * scale), np.full(size * scale, at * scale))
            for (segment, size, first), at in zip(parts, starts, strict=False)
        ]
        return [np.concatenate(column).astype(np.int32) for column in zip(*columns, strict=True)]

    prompts = [row((1, 2, 0), (2, 1, 0), (0, 1, 0)), row((1, 1, 0), (2, 3, 0))]
    completions = [row((1, 4, 2), (1, 3, 2), (2, 3, 1), (0, 2, 0)), row((1, 5, 1), (2, 3, 3), (2, 4, 3))]
    stacked: Any = ([np.stack(column) for column in zip(*rows, strict=True)] for rows in (prompts, completions))
    (front, at, _), (segments, positions, starts) = stacked
    return PackedGroupContext(front, segments, at, positions, starts)
