"""Compilations of a mixture of experts for TPUs; they need the TPU compiler, no TPU."""

from typing import Any

import pytest

from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from tests.elsewhere import elsewhere
from tests.studies.aot_moe import compile_layer
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

pytestmark = [pytest.mark.full, needs_tpu_compiler]


def compile_small() -> dict[str, Any]:
    router = SoftmaxRouter.Config(top_k=2)
    cfg = MoE.Config(dim=256, num_experts=8, router=router, experts=Experts.Config(hidden=128))
    return compile_layer(cfg, "v5p:2x2x1", {"expert": 2, "fsdp": 2}, length=256).collectives


def test_rows_travel_by_ragged_all_to_all_and_gradients_are_scattered():
    found = elsewhere(compile_small, environ=TPU_COMPILER, timeout=600)
    assert found["ragged-all-to-all"] >= 4  # there and back, forwards and backwards; again in the loop of more rounds
    assert found["all-gather"] and found["reduce-scatter"]  # of the matrices, which the compiler may put together
