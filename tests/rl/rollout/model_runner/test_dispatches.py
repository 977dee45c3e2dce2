"""The programs of an engine on CPUs have the same kernels for many layers as for few, so they compile quickly."""

import re
from typing import Any

import jax
import pytest

from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import largest_dispatches
from rl.rollout.model_runner.runner import ModelRunner
from tests.rl.rollout.small import make_engine, request
from tests.rl.tiny import tiny_params, tiny_policy

_COMPUTATION = re.compile(r"^%(?:fused_computation|[\w.]*_computation)[\w.]* \(.*?^}", re.DOTALL | re.MULTILINE)


def compiled(kind: str, layers: int) -> str:
    """Return the compiled program of the first dispatch of a kind, with windows of several cells."""
    sizes: dict[str, Any] = {"max_prompt_tokens": 40, "max_new_tokens": 88, "max_num_seqs": 8, "prefill_tokens": 64}
    runner = ModelRunner(RolloutEngine.Config(model=tiny_policy(num_layers=layers), stop_tokens=(1,), **sizes))
    runner.params = runner.described_params
    with jax.set_mesh(runner.mesh):
        (dispatch, *_) = (one for one in largest_dispatches(runner) if one.kind == kind)
        return dispatch.trace().lower().compile().as_text()


def kernels(program: str) -> set[str]:
    """Return the fused computations that differ."""
    return {_renamed(body) for body in _COMPUTATION.findall(program)}


def _renamed(computation: str) -> str:
    """Return it with instructions numbered, without metadata."""
    names: dict[str, str] = {}
    bare = re.sub(r", metadata=\{[^}]*\}", "", computation)
    return re.sub(r"%?([\w.-]+)(?=: )|%([\w.-]+)", lambda m: names.setdefault(m[1] or m[2], f"x{len(names)}"), bare)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 2), ("float32", 1)])
def test_a_single_sequence_decodes_beside_an_idle_row_where_weights_would_be_copied_to_float32(dtype, rows):
    policy = tiny_policy(num_layers=1).set(dtype=dtype)
    drawn = []
    for most in (1, 2):
        engine = make_engine(tiny_params(policy), model=policy, max_num_seqs=most)
        assert engine.runner.buckets.rows(1) == (rows if most == 1 else 2)
        drawn.append([rollout.tokens.tolist() for rollout in engine.generate([request(number) for number in range(3)])])
    assert drawn[0] == drawn[1] or dtype == "float32"  # which sums a single row in another order


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefill", pytest.param("decode", marks=pytest.mark.full)])
def test_kernels_do_not_grow_with_layers(kind):
    few, many = compiled(kind, 4), compiled(kind, 6)
    assert len(kernels(few)) > 30
    assert len(kernels(few)) == len(kernels(many))
    small_loops = "xla_cpu_small_call"  # each is compiled by itself
    assert few.count(small_loops) == many.count(small_loops)
