"""The trainer's scoring forward pass and the engine agree on the same tokens and weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.layers.wrappers.quantised import QuantisedProducts, QuantisedWeights
from experiments.modifiers import float32_head
from mesh import make_mesh
from rl.protocol.messages import Group, Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.weights import WeightLayout, types_read
from rl.rollout.request import Request
from rl.rollout.sampling import Sampler
from rl.training.logprobs import score_rows
from tests.axlearn_like.layers.small import initialise
from tests.bounds import within
from tests.rl.tiny import tiny_experiment, tiny_params, tiny_policy
from tests.rl.training.whole_groups import pack_rows

VOCAB, MAX_PROMPT, MAX_NEW = 262, 20, 12


def differences(policy: Any, params: Any, temperature: float, row_multiple: int) -> np.ndarray:
    """Scored less sampled log-probabilities of every token of 6 requests x 3 samples."""
    cfg = RolloutEngine.Config(model=policy, stop_tokens=(1, 2), max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    engine = cfg.set(max_num_seqs=16, sampler=Sampler.Config(temperature=temperature)).build()
    engine.set_weights(params, 0)
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, "any", rng.integers(0, VOCAB, 1 + 3 * i).astype(np.int32)) for i in range(6)]
    rollouts = engine.generate([Request(prompt, samples=3) for prompt in prompts])
    groups = [Group(prompt, tuple(rollouts[3 * i : 3 * i + 3]), ()) for i, prompt in enumerate(prompts)]
    rows = pack_rows(groups, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, row_multiple=row_multiple)
    graphdef, _ = split(build_abstract(policy))
    with jax.set_mesh(make_mesh()):
        score = jax.jit(lambda params, *rest: score_rows(bind(graphdef, params), *rest))
        scored = score(params, rows["tokens"], rows["targets"], jnp.full(1, temperature)).logprobs()
    assert len(rows["tokens"]) % row_multiple == 0
    parts = zip(rows["first"], rollouts, strict=True)
    return np.concatenate([scored[i, first : first + len(r.tokens)] - r.logprobs for i, (first, r) in enumerate(parts)])


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "row_multiple"), [(1.0, 1), (0.7, 64)])
def test_in_float32_on_a_cpu_they_are_equal_to_the_bit(temperature: float, row_multiple: int):
    policy = tiny_policy(VOCAB, num_layers=2)
    found = differences(policy, tiny_params(policy), temperature, row_multiple)
    assert len(found) > 100 and not found.any()


@pytest.mark.slow
def test_with_experts_they_are_equal_to_the_bit_too():
    policy = tiny_policy(VOCAB, num_layers=2)
    assert isinstance(policy.block, Block.Config)
    router = SigmoidRouter.Config(top_k=2)
    policy.block.feed_forward = MoE.Config(num_experts=6, router=router, experts=Experts.Config(hidden=16))
    found = differences(policy, tiny_params(policy), 1.0, 1)
    assert len(found) > 100 and not found.any()


@pytest.mark.slow
@pytest.mark.numerics
def test_in_bfloat16_they_are_close():
    """The published bound: 5e-3 on average, 0.1 on any token (0 where both programs round alike, as here)."""
    policy = tiny_policy(VOCAB, num_layers=2).set(dtype="bfloat16")
    found = np.abs(differences(policy, tiny_params(policy, scale=1.0), 1.0, 1))
    assert len(found) > 100 and within(found.mean(), 5e-3) and within(found, 0.1)


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_float32_factors_is_unrounded_in_the_engine_too(tied: bool):
    """Compare the types that an engine stores and reads, and its log-probabilities with the trainer's."""
    policy = tiny_policy(VOCAB, num_layers=2).set(dtype="bfloat16", head=None if tied else Head.Config())
    params, plain = tiny_params(policy, scale=1.0), policy.clone()
    float32_head(holder := tiny_experiment(policy=policy))
    kept = WeightLayout(holder.policy, make_mesh(), stacked=False).described
    name = ("embedding", "weight_vd") if tied else ("head", "weight_dv")
    types = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(kept)}
    assert [path for path, dtype in types.items() if dtype == jnp.float32 and "scale" not in path] == [
        f"['{name[0]}']['{name[1]}']"
    ]
    found = np.abs(differences(holder.policy, params, 1.0, 1))
    assert len(found) > 100 and within(found.mean(), 5e-3) and within(found, 0.1)
    holder.parameter_server.codec = "bf16"  # does not round it either
    holder.check_fields()
    assert types_read(RolloutEngine.Config(model=plain))("/".join(name), np.dtype("float32")) == jnp.bfloat16
    assert types_read(RolloutEngine.Config(model=holder.policy))("/".join(name), np.dtype("float32")) == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("products", [False, pytest.param(True, marks=pytest.mark.full)])  # slow to compile on CPUs
def test_low_rank_and_rounded_weights_are_made_for_the_engine_before_it_draws(products: bool):
    policy = tiny_policy(VOCAB, num_layers=2)
    assert isinstance(policy.block, Block.Config)
    policy.block.attention = LoRA.Config(inner=policy.block.attention, rank=2)
    rounded = QuantisedWeights.Config(inner=policy.block.feed_forward)
    policy.block.feed_forward = QuantisedProducts.Config(inner=rounded) if products else rounded
    found = np.abs(differences(policy, initialise(policy)[1], 1.0, 1))
    assert len(found) > 100 and not found.any()
