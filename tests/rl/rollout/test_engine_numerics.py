"""Exact numerics: an engine and its scoring by the kernels of fixed order, simulated; what is refused."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.exact.scope import COMPILER_OPTIONS, exact_kernels, use_numerics
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.base import bind, build_abstract, inexact_layers, split
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import BiasedExperts, Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.lora import LoRA
from mesh import UserError, make_mesh
from rl.rollout.engine import RolloutEngine
from rl.rollout.validation import check_policy
from rl.training.logprobs import fill_rows, score_rows
from tests.axlearn_like.kernels.exact.test_scope import mesh_of
from tests.elsewhere import elsewhere
from tests.rl.rollout.small import POLICY, STOP, TEMPERATURE, make_engine, params, request
from tests.rl.tiny import tiny_params

EXACT = POLICY.clone(numerics="exact")
SIMULATED = PagedKernel.Config(interpret=True, self_test=False)


def refusal(**changes: Any) -> str:
    sizes: dict[str, Any] = {
        "model": EXACT,
        "kernel": SIMULATED,
        "max_prompt_tokens": 40,
        "max_new_tokens": 24,
        **changes,
    }
    with pytest.raises(UserError) as refused:
        RolloutEngine.Config(stop_tokens=STOP, **sizes).build()
    return str(refused.value)


def with_block(**changes: Any) -> Any:
    block: Any = EXACT.block
    return EXACT.clone(block=block.clone(**changes))


def test_layers_without_a_form_of_fixed_order_are_named():
    block: Any = EXACT.block
    assert inexact_layers(EXACT, "cpu") == inexact_layers(EXACT, "tpu") == []
    mixture = MoE.Config(num_experts=4)
    assert inexact_layers(with_block(feed_forward=mixture), "tpu") == []
    biased = with_block(feed_forward=mixture.clone(experts=BiasedExperts.Config()))
    assert inexact_layers(biased, "tpu") == ["block.feed_forward.experts: BiasedExperts has no form of fixed order"]
    assert inexact_layers(biased, "cpu") == []
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


@pytest.mark.parametrize(
    ("platform", "sizes", "message"),
    [
        ("tpu", {"tensor": 3}, 'mesh: expected tensor of 1, 2, 4 or 8 with policy.numerics="exact"'),
        ("tpu", {"tensor": 2, "expert": 2}, "mesh: expected devices on the axis tensor alone with"),
        ("cpu", {"tensor": 2}, "mesh: expected one device"),
    ],
)
def test_meshes_whose_sums_have_no_fixed_order_are_refused(platform: str, sizes: dict[str, int], message: str):
    cfg = RolloutEngine.Config(model=EXACT, stop_tokens=STOP, max_prompt_tokens=40, max_new_tokens=24)
    model = build_abstract(EXACT)
    with mesh_of(platform, platform, tensor=4 if platform == "tpu" else 1):
        check_policy(cfg, model, platform, adapters=False)
    with mesh_of(platform, platform, **sizes), pytest.raises(UserError, match=message):
        check_policy(cfg, model, platform, adapters=False)


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


# With layers that eight devices can share, and 128 hidden units: whole vectors on each, as XLA rounds exponentials of
# the rest otherwise, which is the simulation's.
POLICIES = {
    "dense": lambda: with_block(attention=Attention.Config(num_heads=8), feed_forward=SwiGLU.Config(hidden=128)),
    "experts": lambda: with_block(
        attention=Attention.Config(num_heads=8),
        feed_forward=MoE.Config(
            num_experts=4,
            router=SoftmaxRouter.Config(top_k=3),
            experts=Experts.Config(hidden=128),
            shared=SwiGLU.Config(hidden=128),
        ),
    ),
    "latents": lambda: with_block(
        attention=LatentAttention.Config(num_heads=8, q_rank=8, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=8),
        feed_forward=SwiGLU.Config(hidden=128),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_devices_change_no_bit_of_the_engine_or_of_scoring(policy: str, dtype: str):
    """Engines of one device, two and eight, scored on as many, and on two groups of four that share rows."""
    alone = drawn_and_scored(1, policy, dtype, [{}])
    assert alone["scored"] == [alone["drawn"]]
    for count, meshes in ((2, [{"tensor": 2}]), (8, [{"tensor": 8}, {"data": 2, "tensor": 4}])):
        environ = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
        found = elsewhere(drawn_and_scored, count, policy, dtype, meshes, environ=environ, timeout=400)
        assert found["drawn"] == alone["drawn"]
        assert [scored == alone["drawn"] for scored in found["scored"]] == [True] * len(meshes)


def drawn_and_scored(devices: int, policy: str, dtype: Any, meshes: list[dict[str, int]]) -> dict[str, Any]:
    """Return tokens and log-probabilities of an engine on so many devices, and the same as scored on meshes."""
    model = POLICIES[policy]().clone(dtype=dtype)
    weights, requests = tiny_params(model), [request(number) for number in range(3)]
    mesh = {"tensor": devices} if devices > 1 else {}
    rollouts = make_engine(weights, model=model, kernel=SIMULATED, page_size=64, mesh=mesh).generate(requests)
    prompts = {one.prompt.id: one.prompt.tokens for one in requests}
    rows = [(np.asarray(prompts[one.prompt_id]), np.asarray(one.tokens)) for one in rollouts]
    drawn = [[one.tokens.tolist(), one.logprobs.tolist()] for one in rollouts]
    return {"drawn": drawn, "scored": [scored_on(sizes, model, weights, rows) for sizes in meshes]}


def scored_on(sizes: dict[str, int], policy: Any, weights: Any, rows: list[Any]) -> list[Any]:
    """Return the tokens of rows and their log-probabilities, scored on a mesh."""
    with jax.set_mesh(make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])):
        graphdef, like = split(build_abstract(policy))
        weights = jax.tree.map(lambda x, described: jax.device_put(x, described.sharding.spec), weights, like)

        def score(params: Any, **arrays: Any) -> Any:
            with use_numerics("exact", interpret=True):
                return score_rows(bind(graphdef, params), **arrays)

        run = jax.jit(score, compiler_options=COMPILER_OPTIONS)
        temperature = jnp.array([TEMPERATURE], jnp.float32)
        found = run(weights, **fill_rows(rows, 8, 64), temperature=temperature).logprobs()
    places = [slice(len(prompt) - 1, len(prompt) - 1 + len(tokens)) for prompt, tokens in rows]
    return [
        [tokens.tolist(), found[row, place].tolist()]
        for row, ((_, tokens), place) in enumerate(zip(rows, places, strict=True))
    ]
