"""Attention compiled for TPUs: no scores in memory, and keys in transit while others are used."""

import pytest

from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

pytestmark = [pytest.mark.full, needs_tpu_compiler]


@pytest.fixture(scope="module")
def programs():
    return elsewhere(compile_programs, environ=TPU_COMPILER, timeout=600)


def compile_programs() -> dict[str, dict[str, int]]:
    """Gradient of attention of 4096 tokens, 8 x 4 heads of 128, bfloat16, on a v5e, by kernel."""
    from jax.experimental import topologies

    from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
    from axlearn_like.kernels.attention.context_parallel.ring import Ring
    from axlearn_like.kernels.attention.dispatch import FirstSupported
    from axlearn_like.kernels.attention.xla import Xla
    from tests.axlearn_like.kernels.attention.described import gradient_program

    devices = list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)
    first = FirstSupported.Config()
    return {
        "chosen": gradient_program(devices[:1], {}, first, AllGather.Config()),
        "xla": gradient_program(devices[:1], {}, Xla.Config(), AllGather.Config()),
        "gather": gradient_program(devices, {"sequence": 4}, first, AllGather.Config()),
        "ring": gradient_program(devices, {"sequence": 4}, first, Ring.Config()),
    }


def test_splash_holds_no_scores(programs):
    scores = 4096 * 4096 * 32 * 4
    assert programs["xla"]["temporary"] > scores and programs["xla"]["kernels"] == 0
    assert programs["chosen"]["temporary"] < scores / 10 and programs["chosen"]["kernels"] == 2


def test_a_ring_sends_keys_and_a_gather_gathers_them(programs):
    assert programs["ring"]["permutes"] > 0 and programs["ring"]["gathers"] == 0
    assert programs["gather"]["gathers"] > 0 and programs["gather"]["kernels"] > 0
    assert programs["ring"]["kernels"] > 0
