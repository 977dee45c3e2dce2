"""The update by packed rows against that by padded ones in float64, where nothing but the order of sums may differ."""

from typing import Any

import numpy as np
import pytest

from tests.bounds import within
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@pytest.mark.parametrize("name", [pytest.param("grpo", marks=pytest.mark.full), "gspo"])
def test_packed_rows_give_what_padded_ones_give_to_the_last_places_of_float64(name: str):
    """Gradient and metrics: 1e-12 of the largest entry of each; 1.4e-14 measured."""
    found: dict[str, tuple[float, float]] = elsewhere(differences, name, environ={"XLA_FLAGS": QUICK}, timeout=400)
    assert len(found) > 20
    for path, (difference, scale) in found.items():
        assert scale > 0 or path.startswith("metric "), f"no gradient of {path}"
        assert within(difference, 1e-12 * max(scale, 1e-3)), f"{path}: {difference} of {scale}"


def differences(name: str) -> dict[str, tuple[float, float]]:
    """Return of each gradient and metric of an objective the largest difference and the largest entry.

    All sums that the programs take in float32, whatever their inputs, are taken in float64.
    """
    import jax
    import jax.numpy as jnp

    from axlearn_like.layers.base import build_abstract, split
    from rl.training.program import make_packed_loss, make_policy_loss
    from rl.training.spec import UpdateSpec
    from tests.rl.training import test_packed_update as case
    from tests.rl.training.whole_groups import pack_groups

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: np.asarray(x, np.float64) if np.asarray(x).dtype == np.float32 else x, tree)

    objective = case.OBJECTIVES[name].build()
    packed, _ = case.microbatches(objective, rows=case.ONE_LENGTH)
    padded, _ = pack_groups(case.groups(), objective, max_prompt_tokens=case.MAX_PROMPT, max_new_tokens=case.MAX_NEW)
    assert len(packed) > 1
    params = wide(case.parameters())

    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64  # pyright: ignore  # in this process alone
    model: Any = build_abstract(case.POLICY)
    model.dtype = np.dtype(np.float64)
    graphdef = split(model)[0]

    def summed(loss: Any, batches: list[Any]) -> dict[str, np.ndarray]:
        compute, total = jax.jit(jax.value_and_grad(loss, has_aux=True)), dict[str, Any]()
        for batch in batches:
            (value, metrics), slopes = compute(params, wide(batch))
            flat = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(slopes)}
            flat |= {f"metric {name}": x for name, x in {"total": value, **metrics}.items()}
            for name, leaf in flat.items():
                assert leaf.dtype == np.float64 or np.issubdtype(leaf.dtype, np.integer), f"{name} is {leaf.dtype}"
                join = np.maximum if name.endswith("_max") else np.add
                total[name] = join(total[name], leaf) if name in total else np.asarray(leaf)
        return total

    found = summed(
        make_packed_loss(graphdef, objective, UpdateSpec(case.TEMPERATURE, max_new_tokens=case.MAX_NEW)), packed
    )
    expected = summed(make_policy_loss(graphdef, objective, UpdateSpec(case.TEMPERATURE)), [padded])
    assert found.keys() == expected.keys()
    return {path: (float(np.abs(found[path] - x).max()), float(np.abs(x).max())) for path, x in expected.items()}
