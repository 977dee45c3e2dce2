"""An engine that holds its weights as fewer bits draws what the rounded policy draws, and says so."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.kernels.quantised_matmul import round_to
from axlearn_like.layers.wrappers.quantised import QuantisedProducts, QuantisedWeights, StoredWeights
from models.tiny import tiny
from rl.objective import TruncatedImportance
from rl.objective.presets import grpo
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import largest_dispatches
from rl.rollout.model_runner.runner import ModelRunner
from tests.rl.rollout.small import POLICY, make_engine, params, request
from tests.rl.tiny import tiny_experiment


def wrapped(wrapper: Any, **fields: Any) -> tuple[Any, Any]:
    """Return the policy with wrapped layers, and its parameters: those of the plain one."""
    model: Any = POLICY.clone()
    block = model.block
    names = ("attention", "feed_forward")
    block.set(**{name: wrapper.Config(inner=getattr(block, name), **fields) for name in names})
    own = params()
    layers = {name: {"inner": value} if name in names else value for name, value in own["layers"].items()}
    return model, {**own, "layers": layers}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "wrapper", "fields", "tags"),
    [
        (
            StoredWeights.Config(numbers="int4", group=4, vocabulary="int8"),
            QuantisedWeights,
            {"numbers": "int4", "group": 4},
            ("int4-weights", "int8-vocabulary"),
        ),
        pytest.param(
            StoredWeights.Config(activations="int8"),
            QuantisedProducts,
            {},
            ("int8-activations", "int8-weights"),
            marks=pytest.mark.full,  # slow to compile on CPUs
        ),
    ],
)
def test_it_draws_what_the_rounded_policy_draws_to_the_bit(weights, wrapper, fields, tags):
    requests = [request(number) for number in range(3)]
    found = make_engine(params(), stored=weights).generate(requests)
    model, own = wrapped(wrapper, **fields)
    if weights.vocabulary is not None:
        own["embedding"] = {
            "weight_vd": jax.jit(lambda w: round_to(w, [1], weights.vocabulary))(own["embedding"]["weight_vd"])
        }
    expected = make_engine(own, model=model).generate(requests)
    assert len(found) == len(expected) == 6
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert a.tags == tags and b.tags == ()


@pytest.mark.slow
def test_arguments_of_the_decode_program_are_half_of_the_weights_in_bfloat16():
    """The compiled program's own count, its cache included; a third of these parameters are the vocabulary's."""
    policy = tiny(vocab_size=1024, dim=256, hidden=512, num_layers=1).set(dtype="bfloat16")

    def described(weights: StoredWeights.Config | None) -> ModelRunner:
        cfg = RolloutEngine.Config(model=policy, stop_tokens=(), max_prompt_tokens=8, max_new_tokens=8, weights=weights)
        return ModelRunner(cfg.set(max_num_seqs=1, steps_per_dispatch=2), jax.devices()[:1])

    runner = described(StoredWeights.Config(vocabulary="int8"))
    plain = next(one for one in largest_dispatches(runner) if one.kind == "decode")
    with jax.set_mesh(runner.mesh):
        compiled = plain.trace().lower().compile(compiler_options={"xla_backend_optimization_level": 0})
    memory = compiled.memory_analysis()
    assert memory is not None
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(described(None).params))
    assert memory.argument_size_in_bytes <= 0.55 * weights


def test_a_run_without_importance_correction_is_refused():
    cfg = tiny_experiment()
    cfg.engine.weights = StoredWeights.Config()
    with pytest.raises(ConfigError, match=r"objective\.importance: expected TruncatedImportance.*of int8-weights"):
        cfg.check("inprocess")
    cfg.objective = grpo().set(old_policy="current", importance=TruncatedImportance.Config())
    cfg.check("inprocess")
