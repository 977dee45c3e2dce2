"""Statistics of a head in tiles on meshes that share tokens and words: those of whole logits in float64."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.kernels.policy_head.sums import HeadRules
from axlearn_like.training.heads.tiled_head import OtherHead, head_statistics
from tests.axlearn_like.kernels.whole_head import NAMES, by_name, in_float64, whole_statistics, with_gradients
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
ROWS, LENGTH, WIDTH, WORDS, KEPT = 4, 3, 24, 1200, 5  # 300 words of a shard, or 600: tiles are not full
RULES, OTHER = HeadRules(temperature=0.7, soft_cap=4.0, tile=128), HeadRules(temperature=0.7, soft_cap=9.0, tile=128)
MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "tensor": {"tensor": 4},
    "fsdp_tensor": {"fsdp": 2, "tensor": 2},
    "fsdp_tensor4": {"fsdp": 2, "tensor": 4},
    "sequence_tensor": {"data": 2, "sequence": 1, "fsdp": 2, "tensor": 2},
}


def inputs() -> Any:
    """Hidden states, heads, targets, and supports: of one word, of words in one shard, of several, and of none."""
    rng = np.random.default_rng(0)
    x, other = (rng.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32) for _ in range(2))
    weight, head = (0.5 * rng.standard_normal((WIDTH, WORDS)).astype(np.float32) for _ in range(2))
    candidates = rng.permuted(np.arange(WORDS, dtype=np.int32)[None].repeat(ROWS * LENGTH, 0), axis=1)[:, :KEPT]
    candidates[0, 1:], candidates[1, :2], candidates[2, 3:] = -1, [WORDS - 1, WORDS - 2], -1
    targets = candidates[:, 0].copy()
    targets[3] = candidates[3, 2]
    shape = (ROWS, LENGTH)
    mixed = {name: rng.standard_normal(shape).astype(np.float32) for name in NAMES}
    return x, weight, targets.reshape(shape), (other, head), candidates.reshape(*shape, KEPT), mixed


@pytest.mark.full  # in every run tests/rl/training/test_policy_mesh.py has log-probabilities, entropies and gradients
@pytest.mark.parametrize(("candidates", "meshes"), [(False, [*MESHES]), (True, [*MESHES])])
def test_on_a_mesh_as_in_float64(candidates: bool, meshes: list[str]):
    x, weight, targets, (other, head), kept, mixed = inputs()
    right = partial(whole_statistics, targets=targets, rules=RULES, reference=(other, head, OTHER))
    right = partial(right, candidates=kept if candidates else None)
    values, gradients = in_float64(lambda x, w: right(x, w), mixed, x, weight)
    found = elsewhere(on_meshes, candidates, meshes, environ=EIGHT)
    assert list(found) == meshes
    for name, (own, slopes) in found.items():
        for key, value in values.items():
            np.testing.assert_allclose(own[key], value, rtol=2e-5, atol=2e-5, err_msg=f"{name} {key}")
        for part, expected in zip(slopes, gradients, strict=True):
            np.testing.assert_allclose(part, expected, rtol=2e-5, atol=2e-5, err_msg=name)


def on_meshes(candidates: bool, meshes: list[str]) -> dict[str, Any]:
    """Return statistics and gradients of a mixture of them, by mesh."""
    import math

    from mesh import make_mesh
    from mesh.rules import partition

    x, weight, targets, (other, head), kept, mixed = inputs()
    found: dict[str, Any] = {}
    for name in meshes:
        shape = MESHES[name]
        mesh = make_mesh(shape, jax.devices()[: math.prod(shape.values())])
        with jax.set_mesh(mesh):
            by_tokens, by_words = partition("batch", "length"), partition("embed", "vocab")
            assert by_tokens is not None and by_words is not None
            put = partial(jax.device_put, device=jax.NamedSharding(mesh, by_tokens))
            columns = jax.NamedSharding(mesh, by_words)

            def compute(x: Any, weight: Any, put: Any = put, columns: Any = columns) -> Any:
                reference = OtherHead(put(other), layer(jax.device_put(head, columns), OTHER.soft_cap))
                how: Any = {"reference": reference}
                how |= {"candidates": put(kept)} if candidates else {}
                return by_name(head_statistics(layer(weight, RULES.soft_cap), x, put(targets), RULES, **how))

            mixture = jax.tree.map(put, mixed)
            run = jax.jit(lambda x, w, mixture=mixture, compute=compute: with_gradients(compute, mixture, x, w))
            own, slopes = run(put(x), jax.device_put(weight, columns))
        found[name] = jax.tree.map(lambda one: np.asarray(one).tolist(), (own, slopes))
    return found


class layer:  # noqa: N801
    """An output layer of this matrix."""

    def __init__(self, weight: Any, cap: float | None):
        self.columns_dv, self.logit_soft_cap = weight, cap

    def factors(self, x: Any) -> Any:
        return x
