"""The engine draws with the log-probability that scoring gives, to the bit, whatever the layers of the policy.

A pattern of windows with caps; sinks and experts behind a dense block; latent attention. Prompts are longer than the
windows, rows share dispatches, and pages are few, so sequences are preempted and prefilled again.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import replace
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.layers.attention.grouped_query import BiasedAttention
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.attention.rope import InterleavedRope, Rope
from axlearn_like.layers.attention.rope_scaling import LongRopeScaling, YarnScaling
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.embedding import CappedHead
from axlearn_like.layers.feed_forward import BiasedGLU, SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter
from axlearn_like.layers.wrappers.base import plain_params
from axlearn_like.layers.wrappers.quantised import QuantisedWeights, StoredWeights
from mesh import UserError
from models.deepseek import latent_mixture
from models.gemma import gemma2
from models.gpt2 import layer_norm_decoder
from models.gpt_oss import sink_mixture
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.speculation.speculator import Speculation
from rl.training.logprobs import score_rows
from tests.axlearn_like.layers.small import initialise, small_decoder
from tests.elsewhere import elsewhere
from tests.rl.rollout.small import assert_no_page_is_held
from tests.rl.tiny import make_prompt

VOCAB, MAX_PROMPT, MAX_NEW, LENGTH = 272, 40, 16, 56
YARN = YarnScaling.Config(factor=4.0, original_length=16)


def windowed() -> Decoder.Config:
    return gemma2(
        vocab_size=VOCAB,
        dim=32,
        hidden=48,
        num_layers=3,
        heads=(4, 2, 16),
        scalar=24,
        window=7,
        score_cap=3.0,
        logit_cap=5.0,
    )


def sinks() -> Decoder.Config:
    cfg = sink_mixture(
        vocab_size=VOCAB,
        dim=32,
        hidden=24,
        num_layers=3,
        heads=(4, 2, 16),
        num_experts=4,
        top_k=2,
        rope=Rope.Config(scaling=YARN),
        window=7,
    )
    assert isinstance(cfg.block, BlockPattern.Config) and isinstance(cfg.block.blocks[0], Block.Config)
    dense = cfg.block.blocks[0].clone(feed_forward=SwiGLU.Config(hidden=48))
    return cfg.set(block=cfg.block.clone(leading=dense, num_leading=1))


def latent() -> Decoder.Config:
    attention = LatentAttention.Config(
        num_heads=3,
        q_rank=24,
        kv_rank=16,
        nope_dim=16,
        rope_dim=8,
        value_dim=12,
        rope=InterleavedRope.Config(scaling=YARN.clone(mscale=0.7, mscale_all_dim=1.0)),
    )
    router = SigmoidRouter.Config(top_k=2, groups=2, groups_kept=1, scale=2.5)
    experts = MoE.Config(
        num_experts=4, router=router, experts=Experts.Config(hidden=24), shared=SwiGLU.Config(hidden=24)
    )
    shape = {"vocab_size": VOCAB, "dim": 32, "hidden": 48, "num_layers": 2, "num_dense": 1}
    return latent_mixture(attention=attention, feed_forward=experts, **shape)


def positioned() -> Decoder.Config:
    return layer_norm_decoder(vocab_size=VOCAB, max_length=LENGTH, dim=32, num_layers=2, num_heads=4)


def variant(max_length: int | None = LENGTH) -> Decoder.Config:
    """LongRoPE with prompts on both sides of its original length; biases everywhere; a capped head of its own."""
    scaling = LongRopeScaling.Config(short_factor=(1.0,) * 4, long_factor=(1.0, 2.0, 4.0, 8.0), original_length=24)
    attention = BiasedAttention.Config(
        num_heads=4, num_kv_heads=2, rope=Rope.Config(scaling=scaling, max_length=max_length)
    )
    block = Block.Config(attention=attention, feed_forward=BiasedGLU.Config(hidden=48))
    return small_decoder(vocab_size=VOCAB, num_layers=2, block=block, head=CappedHead.Config(logit_soft_cap=5.0))


def drawn(cfg: Decoder.Config, params: Any, *, samples: int = 1, rows: int = 3, **fields: Any) -> list[tuple[Any, Any]]:
    """Return prompts and what is drawn for them; of three rows, in too few pages to run without preemption."""
    engine = RolloutEngine.Config(
        model=cfg,
        stop_tokens=(3, 50),
        max_prompt_tokens=MAX_PROMPT,
        max_new_tokens=MAX_NEW,
        max_num_seqs=rows,
        page_size=8,
        pages=4 * rows,
        steps_per_dispatch=4,
        prefill_tokens=64,
        sampler=Sampler.Config(temperature=0.8),
        **fields,
    ).build()
    engine.set_weights(params, 1)
    prompts = [make_prompt(number, 3 + 37 * number // 5) for number in range(6)]
    stop = StopConditions(tokens=(3, 50), max_new_tokens=MAX_NEW)
    rollouts = engine.generate([Request(prompt, samples=samples, seed=5, stop=stop) for prompt in prompts])
    assert rows > 3 or engine.stats()["preemptions"] > 0
    assert_no_page_is_held(engine)
    return list(zip([prompt for prompt in prompts for _ in range(samples)], rollouts, strict=True))


def scored(cfg: Decoder.Config, params: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """Log-probabilities of rows of whole sequences."""
    graphdef = initialise(cfg)[0]
    rows = np.zeros((max(8, len(pairs)), LENGTH + 1), np.int32)
    for row, (prompt, rollout) in enumerate(pairs):
        whole = np.concatenate([prompt.tokens, rollout.tokens])
        rows[row, : len(whole)] = whole
    score = jax.jit(lambda p, tokens, targets, t: score_rows(bind(graphdef, p), tokens, targets, t))
    return score(params, rows[:, :-1], rows[:, 1:], np.array([0.8], np.float32)).logprobs()


@pytest.mark.parametrize("policy", [windowed, sinks, latent, positioned])
def test_a_policy_built_twice_is_the_same_to_what_is_compiled_for_it(policy):
    """Engines and trainers of one process share programs by it (see `shared_program`)."""
    one, other = (build_abstract(policy()) for _ in range(2))
    assert hash(split(one)[0]) == hash(split(other)[0]) and split(one)[0] == split(other)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        *((policy, {}) for policy in (windowed, variant)),
        *(pytest.param(policy, {}, marks=pytest.mark.full) for policy in (sinks, latent, positioned)),
        # tanh and GELU of many rows, whose remainders behind whole vectors have other widths than in scoring.
        *(
            pytest.param(policy, {"samples": 3, "rows": 17}, marks=pytest.mark.full)
            for policy in (windowed, positioned)
        ),
    ],
)
def test_the_engine_draws_with_the_log_probabilities_of_scoring(policy, sizes):
    cfg = policy()
    _, params = initialise(cfg)
    pairs = drawn(cfg, params, **sizes)
    whole = scored(cfg, params, pairs)
    for row, (prompt, rollout) in enumerate(pairs):
        first = len(prompt.tokens) - 1
        expected = whole[row, first : first + len(rollout.tokens)]
        assert rollout.logprobs.tobytes() == expected.astype(np.float32).tobytes(), (row, rollout.logprobs - expected)
    assert sum(len(rollout.tokens) for _, rollout in pairs) > 40
    assert len({int(token) for _, rollout in pairs for token in rollout.tokens}) > 20


@pytest.mark.full
def test_latents_of_an_engine_with_int8_weights_are_those_of_the_rounded_policy():
    cfg = latent()
    _, params = initialise(cfg)
    rounded = jax.jit(partial(rounded_params, cfg))(params)
    pairs = drawn(cfg, params, weights=StoredWeights.Config(layers=("attention",)))
    whole = scored(cfg, rounded, pairs)
    for row, (prompt, rollout) in enumerate(pairs):
        first = len(prompt.tokens) - 1
        np.testing.assert_array_equal(rollout.logprobs, whole[row, first : first + len(rollout.tokens)])


def rounded_params(cfg: Decoder.Config, params: Any) -> Any:
    """Parameters with the matrices of attention rounded to int8."""
    model = cfg.clone()
    replace(model, Block.Config, lambda block: block.set(attention=QuantisedWeights.Config(inner=block.attention)))
    graphdef, like = split(build_abstract(model))
    wrapped = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(params))
    return plain_params(graphdef, wrapped)


@pytest.mark.numerics
@pytest.mark.full
def test_absorbed_decoding_draws_with_nearly_those():
    exact = latent()
    _, params = initialise(exact)
    absorbed = latent()
    replace(absorbed, LatentAttention.Config, lambda attention: attention.set(decode="absorbed"))
    pairs = drawn(absorbed, params)
    whole = scored(exact, params, pairs)
    for row, (prompt, rollout) in enumerate(pairs):
        first = len(prompt.tokens) - 1
        expected = whole[row, first : first + len(rollout.tokens)]
        np.testing.assert_allclose(rollout.logprobs, expected, atol=2e-5)


@pytest.mark.slow
def test_beyond_its_original_length_longrope_has_long_factors_or_is_refused():
    short, long = variant(24), variant()
    _, params = initialise(short)
    limit = r"\.block\.attention\.rope\.max_length"
    with pytest.raises(
        UserError,
        match=rf"max_prompt_tokens \+ max_new_tokens is 56, but \S+{limit} is 24; .*{limit}=56, .*long factors",
    ):
        drawn(short, params)
    prompt, rollout = make_prompt(0, 9), SimpleNamespace(tokens=np.arange(9))
    found = [scored(cfg, params, [(prompt, rollout)])[0, :17] for cfg in (long, variant(None), short)]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 1e-3  # within the original length too


def farthest(**fields: Any) -> float:
    """The largest difference of log-probabilities of an engine with these fields from those of scoring."""
    cfg = variant()
    _, params = initialise(cfg)
    pairs = drawn(cfg, params, **fields)
    found, most = scored(cfg, params, pairs), 0.0
    for row, (prompt, rollout) in enumerate(pairs):
        first = len(prompt.tokens) - 1
        expected = found[row, first : first + len(rollout.logprobs)]
        most = max(most, float(np.abs(rollout.logprobs - expected).max()))
    return most


def on_two_devices() -> float:
    return farthest(mesh={"tensor": 2})


@pytest.mark.numerics
@pytest.mark.full
def test_biases_and_caps_count_on_two_devices_by_the_kernel_and_in_other_numbers():
    two_devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert elsewhere(on_two_devices, environ=two_devices) < 2e-5
    assert farthest(kernel=PagedKernel.Config(interpret=True)) < 2e-5
    assert farthest(weights=StoredWeights.Config(vocabulary="int8")) < 0.2  # rounding; a bias left out: 0.3 or more


def test_a_capped_head_of_its_own_is_seen_where_caps_change_bits():
    with pytest.raises(UserError, match="speculation: on a CPU drafts may change the last bit .* capped"):
        RolloutEngine.Config(
            model=variant(), stop_tokens=(), max_prompt_tokens=40, max_new_tokens=16, speculation=Speculation.Config()
        ).build()


def test_learned_positions_are_not_exceeded():
    cfg = positioned()
    wanted = r"max_prompt_tokens \+ max_new_tokens is 57, but \S*embedding.max_length is 56; .* more learned positions"
    with pytest.raises(UserError, match=wanted):
        RolloutEngine.Config(model=cfg, stop_tokens=(), max_prompt_tokens=41, max_new_tokens=16).build()
