"""Exact numerics: an engine and its scoring by the kernels of fixed order, simulated; what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.exact.scope import COMPILER_OPTIONS, exact_kernels, use_numerics
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.layers.base import bind, build_abstract, inexact_layers, split
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.wrappers.lora import LoRA
from mesh import UserError
from rl.rollout.engine import RolloutEngine
from rl.training.logprobs import fill_rows, score_rows
from tests.rl.rollout.small import POLICY, STOP, TEMPERATURE, make_engine, params, request

EXACT = POLICY.clone(numerics="exact")
SIMULATED = PagedKernel.Config(interpret=True, self_test=False)


def refusal(**changes: Any) -> str:
    sizes: dict[str, Any] = {"model": EXACT, "kernel": SIMULATED, "max_prompt": 40, "max_new": 24, **changes}
    with pytest.raises(UserError) as refused:
        RolloutEngine.Config(stop_tokens=STOP, **sizes).build()
    return str(refused.value)


def with_block(**changes: Any) -> Any:
    block: Any = EXACT.block
    return EXACT.clone(block=block.clone(**changes))


def test_layers_without_a_form_of_fixed_order_are_named():
    block: Any = EXACT.block
    assert inexact_layers(EXACT, "cpu") == inexact_layers(EXACT, "tpu") == []
    mixture = with_block(feed_forward=MoE.Config(num_experts=4))
    assert inexact_layers(mixture, "tpu")[0] == "block.feed_forward: MoE has no form of fixed order"
    assert inexact_layers(mixture, "cpu") == []
    wrapped = with_block(attention=LoRA.Config(inner=block.attention))
    assert inexact_layers(wrapped, "tpu") == ["block.attention: LoRA has no form of fixed order"]
    assert inexact_layers(wrapped, "cpu") == ["block.attention: an engine computes without LoRA"]
    sinks = with_block(attention=block.attention.clone(sinks=True))
    assert inexact_layers(sinks, "tpu") == ["block.attention.sinks: the kernel expects False"]
    assert 'numerics: expected "default" on a TPU (block.attention.sinks: the kernel' in refusal(model=sinks)
    bfloat16 = EXACT.clone(dtype="bfloat16")
    assert "dtype: on a CPU products of float32 alone" in refusal(model=bfloat16, kernel=PagedKernel.Config())
    assert inexact_layers(EXACT, "gpu") == ["there are no kernels of fixed order for GPUs"]


def test_a_class_that_does_not_say_so_itself_has_no_fixed_order():
    class Mine(Decoder):
        """A decoder that may do anything."""

    assert (
        inexact_layers(Mine.Config(vocab_size=8, dim=8, num_layers=1), "tpu")[0]
        == "model: Mine has no form of fixed order"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cascade": 2}, 'cascade: expected None with policy.numerics="exact" on TPUs'),
        ({"kv_cache_dtype": "int8", "page_size": 64}, "kv_cache_dtype: expected None with"),
    ],
)
def test_what_would_change_bits_is_refused(change: dict[str, Any], message: str):
    assert message in refusal(**change)


def test_on_a_cpu_the_layers_fix_the_order_themselves():
    with use_numerics("exact"):
        assert exact_kernels() is None


@pytest.mark.full
def test_on_a_cpu_nothing_changes():
    requests = [request(number) for number in range(2)]
    exact, default = (make_engine(model=model).generate(requests) for model in (EXACT, POLICY))
    for one, other in zip(exact, default, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scoring_has_the_bits_of_the_engine_whatever_the_batch(dtype: Any):
    policy: Any = EXACT.clone(dtype=dtype)
    sizes: dict[str, Any] = {"model": policy, "kernel": SIMULATED, "page_size": 64}
    requests = [request(number) for number in range(3)]
    together = make_engine(max_num_seqs=4, **sizes).generate(requests)
    alone = [rollout for one in requests for rollout in make_engine(max_num_seqs=1, **sizes).generate([one])]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)

    def score(params: Any, **rows: Any) -> Any:
        with use_numerics("exact", interpret=True):
            return score_rows(bind(graphdef, params), **rows)

    graphdef, run = split(build_abstract(policy))[0], jax.jit(score, compiler_options=COMPILER_OPTIONS)
    prompts = {one.prompt.id: one.prompt.tokens for one in requests}
    rollouts = [(np.asarray(prompts[one.prompt_id]), np.asarray(one.tokens)) for one in together]
    for rows in (len(rollouts), len(rollouts) + 5):
        arrays = fill_rows(rollouts, rows, 64)
        found = run(params(), **arrays, temperature=jnp.array([TEMPERATURE], jnp.float32)).logprobs()
        for row, ((prompt, tokens), rollout) in enumerate(zip(rollouts, together, strict=True)):
            first = len(prompt) - 1
            np.testing.assert_array_equal(found[row, first : first + len(tokens)], rollout.logprobs)
