"""Tokamax's batched kernel behind our interface: what is refused, and that the TPU compiler takes it in place."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_kernel import PagedKernel
from axlearn_like.kernels.ragged_paged_attention import make_pool
from mesh import UserError, make_mesh
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

needs_tokamax = pytest.mark.skipif(find_spec("tokamax") is None, reason="tokamax is not installed")
SHAPE: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "page_size": 64}


@pytest.mark.parametrize("field", ["self_test", "interpret"])
def test_it_is_never_used_unchecked(field: str):
    cfg = PagedKernel.Config(name="batched").set(**{field: field == "interpret"})
    with pytest.raises(UserError, match=rf"{field}.*with \"batched\""):
        cfg.build(device=jax.devices()[0], **SHAPE)


@pytest.mark.skipif(find_spec("tokamax") is not None, reason="tokamax is installed")
def test_without_tokamax_the_extra_to_install_is_named():
    with pytest.raises(UserError, match="needs the package tokamax: install the extra `tpu`"):
        PagedKernel.Config(name="batched").build(device=jax.devices()[0], **SHAPE)


@pytest.mark.full
@needs_tokamax
@needs_tpu_compiler
@pytest.mark.parametrize(("topology", "chunk"), [("v5e:2x2", 1), ("v5p:2x2x1", 128), ("v6e:2x2", 1), ("v6e:2x2", 128)])
def test_tpu_compiler_updates_the_pool_in_place(topology: str, chunk: int):
    found = elsewhere(compile_for_tpu, topology, str(chunk), environ=TPU_COMPILER)
    assert found["aliased"] == found["pool"]
    assert found["temporary"] < 0.05 * found["pool"]


def compile_for_tpu(topology: str, chunk: str) -> dict[str, int]:
    """Bytes of one device: 512 tokens in rows of 8,192 keys, pages as those of the other kernel."""
    from jax.experimental import topologies

    tokens, keys = int(chunk), 8192
    rows = 64 if tokens == 1 else 512 // tokens
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    kernel = PagedKernel.Config(name="batched").build(device=devices[0], **SHAPE)
    with jax.set_mesh(make_mesh({}, devices[:1])):
        whole = jax.NamedSharding(jax.sharding.get_mesh(), jax.P())

        def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

        def run(q: Any, k: Any, v: Any, pool: Any, table: Any, starts: Any, counts: Any) -> Any:
            numbers = {"page_table_rw": table, "starts_r": starts, "counts_r": counts}
            return kernel.attend(q, k, v, pool, **numbers, rules=ScoreRules(), sinks=False)

        pool = array(*jax.eval_shape(lambda: make_pool(1, rows * keys // 64, 64, 8, 128)).shape)
        numbers = [array(*shape, dtype=jnp.int32) for shape in ((rows, keys // 64), (rows,), (rows,))]
        kv, q = array(rows, tokens, 8, 128), array(rows, tokens, 8, 4, 128)
        memory = jax.jit(run, donate_argnums=3).lower(q, kv, kv, pool, *numbers).compile().memory_analysis()
    assert memory is not None
    size = pool.size * pool.dtype.itemsize
    return {"pool": size, "aliased": memory.alias_size_in_bytes, "temporary": memory.temp_size_in_bytes}
