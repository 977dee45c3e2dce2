"""Training slots beside an engine, with the log-probabilities with which it drew; and slots of a mixture of experts."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from axlearn_like.layers.base import build_abstract, split
from mesh import make_mesh
from models.moe import tiny_moe
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.sampling import Sampler
from rl.serving.service.messages import AdamParams, Datum, LoraSpec, LossOutput
from rl.serving.service.slots import TrainingSlots
from tests.rl.rollout.small import POLICY, make_engine, request
from tests.rl.serving.service.small import LIMITS, make_datum, make_pass
from tests.rl.tiny import tiny_params


def gradients(slots: TrainingSlots, *names: str) -> dict[str, np.ndarray]:
    """Return the gradients of one row of each of these models, run together; models and rows follow from names."""
    for model in slots.models:
        slots.unload(model)
    for name in names:
        slots.create(name, LoraSpec(3, seed=ord(name)))
        slots.forward_backward([make_pass(name, [make_datum(np.random.default_rng(ord(name)), 12)])])
        slots.optim_step(name, AdamParams(0.05))  # else the gradient of each factor a is zero
    slots.forward_backward([make_pass(name, [make_datum(np.random.default_rng(ord(name)), 12)]) for name in names])
    found = {}
    for name in names:
        state = slots.state(name)
        assert state.gradients is not None
        found[name] = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(dict(state.gradients))])
        assert found[name].any()
    return found


@pytest.mark.full
def test_log_probabilities_are_those_with_which_the_engine_drew():
    mesh, host = make_mesh(), tiny_params(POLICY)
    with jax.set_mesh(mesh):
        described = split(build_abstract(POLICY))[1]
    put = lambda x, like: jax.device_put(x, NamedSharding(mesh, like.sharding.spec))  # noqa: E731
    slots = TrainingSlots(POLICY, jax.tree.map(put, host, described), LIMITS, mesh)
    gradients(slots, "a", "b")
    slots.optim_step("b", AdamParams(0.05))
    engine = make_engine(host, adapters=AdapterLimits(3, 4), sampler=Sampler.Config(temperature=1.0))
    engine.load_adapter("b", slots.state("b").adapter(LIMITS.alpha))
    drawn = [request(number, adapter="b", samples=1) for number in range(5)]
    tested = 0
    for one, output in zip(drawn, engine.generate(drawn), strict=True):
        whole = np.concatenate([one.prompt.tokens, output.tokens])[: LIMITS.context_length + 1]
        targets = {"target_tokens": whole[1:].astype(np.int64), "weights": np.ones(len(whole) - 1, np.float32)}
        row = Datum(whole[:-1].astype(np.int32), targets)
        for forward_only in (False, True):
            [found] = slots.forward_backward([make_pass("b", [row], forward_only=forward_only)])
            assert isinstance(found, LossOutput)
            own = found.logprobs[0][len(one.prompt.tokens) - 1 :]
            np.testing.assert_array_equal(own, output.logprobs[: len(own)])
            tested += len(own)
    assert tested > 40


@pytest.mark.full
def test_attention_of_a_mixture_of_experts_is_trained_and_rows_keep_their_bits():
    cfg = tiny_moe(vocab_size=272, num_layers=1)
    slots = TrainingSlots(cfg, tiny_params(cfg, scale=1.0), LIMITS)
    assert "feed_forward" not in slots.info["adapted"] and "experts" in slots.info["left out"]
    alone = {name: gradients(slots, name)[name] for name in "abc"}
    for order in ("abc", "cab", "ba"):
        for name, found in gradients(slots, *order).items():
            np.testing.assert_array_equal(found, alone[name])
