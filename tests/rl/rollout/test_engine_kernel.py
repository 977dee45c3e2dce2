"""Engines whose attention is the kernel for TPUs, simulated on a CPU: its self-test, its choice, and what it draws."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import axlearn_like.kernels.paged_attention.ragged as ragged
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.rows import PagedRows
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.rollout.engine import RolloutEngine
from rl.rollout.worker import RolloutWorker
from rl.rollout.worker_policy import WorkerPolicy, WorkerServices
from tests.bounds import within
from tests.rl.rollout.small import POLICY, STOP, make_engine, request
from tests.rl.tiny import tiny_params

SMALL: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_prompt_tokens": 40,
    "max_new_tokens": 24,
    "prefill_tokens": 64,
    "page_size": 16,
}
SIMULATED = PagedKernel.Config(interpret=True, row_keys=16, chunk_keys=32)


@pytest.mark.slow
def test_an_engine_does_not_start_on_a_kernel_that_writes_a_wrong_page(monkeypatch: pytest.MonkeyPatch):
    right = ragged.write_pages

    def write_late(pool: Any, rows: PagedRows, interpret: bool) -> Any:
        return right(pool, rows._replace(starts_r=rows.starts_r + 1), interpret)

    monkeypatch.setattr(ragged, "write_pages", write_late)
    with pytest.raises(UserError, match=r"self-test of .*decoding of 7 rows.* differs from XLA by \d.*0\.01"):
        RolloutEngine.Config(model=POLICY, stop_tokens=STOP, kernel=SIMULATED, **SMALL).build()


def test_on_a_cpu_nothing_is_tested_and_there_is_no_choice():
    assert RolloutEngine.Config(model=POLICY, stop_tokens=STOP, **SMALL).build().runner.kernel_choice == {}


def mixture() -> Any:
    """The policy of these tests with experts, which the kernel's engine reads in the stack of its layers."""
    policy = POLICY.clone()
    policy.block = policy.block.clone(
        feed_forward=MoE.Config(num_experts=4, router=SoftmaxRouter.Config(top_k=2), experts=Experts.Config(hidden=16))
    )
    return policy


@pytest.mark.numerics
@pytest.mark.full
def test_an_engine_of_the_kernel_draws_from_a_mixture_what_one_of_xla_does():
    policy = mixture()
    engines = [
        make_engine(tiny_params(policy), model=policy, kernel=one, **SMALL) for one in (SIMULATED, PagedKernel.Config())
    ]
    requests = [request(number, samples=2) for number in range(3)]
    for found, right in zip(*(one.generate(requests) for one in engines), strict=True):
        np.testing.assert_array_equal(found.tokens, right.tokens)
        np.testing.assert_allclose(found.logprobs, right.logprobs, atol=1e-4)


@pytest.mark.numerics
@pytest.mark.full
@pytest.mark.parametrize("change", [{}, {"cascade": 2}, {"kv_cache_dtype": "int8", "page_size": 64}])
def test_the_kernel_passes_and_draws_what_xla_does(change: dict[str, Any]):
    kernel, plain = (make_engine(kernel=one, **{**SMALL, **change}) for one in (SIMULATED, PagedKernel.Config()))
    assert within(kernel.runner.kernel_choice["worst"], 1e-5)
    assert kernel.runner.kernel_choice["sizes"]["row_keys"] == 16
    requests = [request(number, samples=2) for number in range(3)]
    for found, right in zip(kernel.generate(requests), plain.generate(requests), strict=True):
        np.testing.assert_array_equal(found.tokens, right.tokens)
        np.testing.assert_allclose(found.logprobs, right.logprobs, atol=1e-4)


def test_a_worker_logs_the_choice(tmp_path: Path):
    kernel = SIMULATED.clone(self_test=False)
    engine = RolloutEngine.Config(model=POLICY, stop_tokens=STOP, kernel=kernel, **SMALL).build()
    nobody: Any = None
    services = WorkerServices(nobody, nobody, nobody, EventLog(tmp_path / "events.jsonl"))
    RolloutWorker("worker-3", engine, {"": WorkerPolicy(nobody, 0, services)})
    (event,) = read_rows(tmp_path / "events.jsonl")
    assert (event["role"], event["event"]) == ("worker-3", "kernel")
    assert event["sizes"]["chunk_keys"] == 32 and "worst" not in event


def test_programs_are_shared_by_kernels_that_compute_the_same_alone():
    default, same, other = (
        PagedKernel.Config(row_keys=keys, self_test=test).build()
        for keys, test in ((512, True), (512, False), (256, True))
    )
    assert default == same and hash(default) == hash(same) and default != other
