"""Tokamax's batched kernel behind our interface: what is refused, and that the TPU compiler takes it in place."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import pytest

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.pages import make_pool
from mesh import UserError
from tests.axlearn_like.kernels.paged_attention.cases import compiled_bytes
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
    tokens, keys, page = int(chunk), 8192, SHAPE["page_size"]
    count = 64 if tokens == 1 else 512 // tokens
    kernel = PagedKernel.Config(name="batched").build(device=jax.devices()[0], **SHAPE)
    shape: dict[str, Any] = {"queries": (count, tokens, 8, 4), "table": keys // page, "pages": count * keys // page}
    attend = partial(kernel.attend, rules=ScoreRules(), sinks=False)
    return compiled_bytes(attend, lambda pages: make_pool(1, pages, page, 8, 128), topology, **shape, layers=1, chips=1)
