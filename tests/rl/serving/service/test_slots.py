"""Training slots: gradients against the merged model's, steps against optax, and the bits of a model among others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.wrappers.adapters import Factors
from rl.serving.service.losses import LOSSES, NAMES, NUMBERS, loss_arrays, loss_numbers, token_losses
from rl.serving.service.messages import AdamParams, Datum, LoraSpec, LossName, LossOutput, ServiceError, TrainPass
from rl.serving.service.row_batches import SlotLimits
from rl.serving.service.saved import SlotState
from rl.serving.service.slots import TrainingSlots
from tests.rl.serving.service.small import LIMITS, POLICY, VOCAB, assert_same_state, make_datum, make_pass, make_slots
from tests.rl.tiny import tiny_params

pytestmark = [pytest.mark.numerics, pytest.mark.slow]

MODELS = ("french", "poems", "sums")
SPECS = {"french": LoraSpec(4, seed=1), "poems": LoraSpec(2, seed=2, train_mlp=False), "sums": LoraSpec(3, seed=3)}
ADAM = AdamParams(0.02, weight_decay=0.1, grad_clip_norm=5.0)


@pytest.fixture(scope="module")
def slots() -> TrainingSlots:
    return make_slots()


@pytest.fixture(autouse=True)
def empty(slots: TrainingSlots) -> None:
    for model in slots.models:
        slots.unload(model)


def wild(slots: TrainingSlots, model: str, size: float = 0.2) -> SlotState:
    """Give a model random factors of both kinds, as after long training, and return its state."""
    if model not in slots.models:
        slots.create(model, SPECS[model])
    state, rng = slots.state(model), np.random.default_rng(SPECS[model].seed)

    def drawn(x: np.ndarray) -> np.ndarray:
        return (size * rng.standard_normal(x.shape)).astype(np.float32)

    slots.restore(model, dataclasses.replace(state, factors=jax.tree.map(drawn, dict(state.factors))))
    return slots.state(model)


def run(slots: TrainingSlots, *jobs: TrainPass) -> list[LossOutput]:
    for job in jobs:
        slots.check(job)
    return slots.forward_backward(jobs)


# ---- against other ways to compute the same


def merged_loss(scale: float) -> Any:
    """Return a jitted function: gradient and (loss, log-probabilities) of one row by the model with merged weights."""
    graphdef, _ = split(build_abstract(POLICY))

    def loss(factors: dict[str, Factors], params: Params, row: dict[str, Any]) -> Any:
        layers = {name: dict(part) if isinstance(part, dict) else part for name, part in params["layers"].items()}
        for path, (a, b) in factors.items():
            _, part, name = path.split("/")
            weight = layers[part][name]
            layers[part][name] = weight + scale * jnp.einsum("lir,lro->lio", a, b).reshape(weight.shape)
        context = PackedContext(jnp.arange(len(row["tokens"]))[None], jnp.ones((1, len(row["tokens"])), int))
        logits = bind(graphdef, {**params, "layers": layers})(row["tokens"][None], context)[0]
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), row["targets"][:, None], -1)[:, 0]
        arrays = {name: row[name][None] for name in NAMES}
        losses = token_losses(row["kind"][None], logprobs[None], arrays, jnp.ones_like(logprobs, bool)[None])
        return jnp.sum(losses), logprobs

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_results_and_gradients_are_those_of_the_merged_model(slots: TrainingSlots):
    state, rng, length = wild(slots, "sums"), np.random.default_rng(0), 13
    expected, sums = merged_loss(LIMITS.alpha / state.spec.rank), None
    for loss in LOSSES:
        datum = make_datum(rng, length, loss)
        [output] = run(slots, make_pass("sums", [datum], loss))
        given = loss_arrays(loss, loss_numbers(loss, {}), datum, "")
        row = {name: given.get(name, np.zeros(length, np.float32)) for name in NAMES}
        row |= {"tokens": datum.tokens, "targets": datum.inputs["target_tokens"], "kind": np.int32(NUMBERS[loss])}
        (total, logprobs), gradient = expected(dict(state.factors), tiny_params(POLICY), row)
        np.testing.assert_allclose(output.logprobs[0], logprobs, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(output.metrics["loss:sum"], total, rtol=1e-3)
        sums = gradient if sums is None else jax.tree.map(jnp.add, sums, gradient)
    found = slots.state("sums").gradients
    assert found is not None and sums is not None
    for path, both in sums.items():
        for a, b in zip(found[path], both, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4 * float(np.abs(b).max()), err_msg=path)


def test_several_targets_of_a_token_are_the_sum_of_passes_of_one_each(slots: TrainingSlots):
    wild(slots, "sums")
    rng, length, most = np.random.default_rng(8), 13, 3
    row = make_datum(rng, length)
    targets = rng.integers(0, VOCAB, (length, most))
    weights = rng.uniform(-1.0, 1.0, (length, most)).astype(np.float32)
    [together] = run(slots, make_pass("sums", [Datum(row.tokens, {"target_tokens": targets, "weights": weights})]))
    found = slots.state("sums").gradients
    slots.unload("sums")
    wild(slots, "sums")
    singly = [
        run(slots, make_pass("sums", [Datum(row.tokens, {"target_tokens": t, "weights": w})]))[0]
        for t, w in zip(targets.T, weights.T, strict=True)
    ]
    expected = slots.state("sums").gradients
    np.testing.assert_allclose(together.logprobs[0], np.stack([one.logprobs[0] for one in singly], -1), rtol=1e-5)
    np.testing.assert_allclose(
        together.metrics["loss:sum"], sum(one.metrics["loss:sum"] for one in singly), rtol=1e-4, atol=1e-4
    )
    assert found is not None and expected is not None
    for path, both in expected.items():
        for a, b in zip(found[path], both, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4 * float(np.abs(b).max()), err_msg=path)


def test_rows_of_several_targets_keep_their_bits_in_company(slots: TrainingSlots):
    rng = np.random.default_rng(9)

    def datum(most: int) -> Datum:
        tokens = rng.integers(0, VOCAB, 9).astype(np.int32)
        weights = rng.uniform(0, 1, (9, most)).astype(np.float32)
        return Datum(tokens, {"target_tokens": rng.integers(0, VOCAB, (9, most)), "weights": weights})

    jobs = [make_pass("french", [datum(3), datum(4)]), make_pass("poems", [datum(4), make_datum(rng, 9)])]
    alone = []
    for job in jobs:
        wild(slots, job.model)
        alone.append((run(slots, job)[0], slots.state(job.model)))
        slots.unload(job.model)
        wild(slots, job.model)
    for output, job, (expected, state) in zip(run(slots, *jobs), jobs, alone, strict=True):
        for found, logprobs in zip(output.logprobs, expected.logprobs, strict=True):
            np.testing.assert_array_equal(found, logprobs)
        assert output.metrics == expected.metrics
        assert_same_state(slots.state(job.model), state)


def test_passes_of_a_model_in_one_call_are_those_of_one_after_another(slots: TrainingSlots):
    """Lengths of two programs: rows of a later pass are added up behind all of an earlier one."""
    rng, lengths = np.random.default_rng(3), ((20,), (9, 20), (9,), (7,), (30,))
    jobs = [make_pass("sums", [make_datum(rng, length) for length in each]) for each in lengths]
    jobs.insert(2, make_pass("french", [make_datum(rng, 8)]))
    wild(slots, "sums")
    wild(slots, "french")
    singly = [run(slots, job)[0] for job in jobs]
    expected = [slots.state(model) for model in ("sums", "french")]
    for model in ("sums", "french"):
        slots.unload(model)
        wild(slots, model)
    for one, other in zip(run(slots, *jobs), singly, strict=True):
        assert one.metrics == other.metrics
        for found, logprobs in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_array_equal(found, logprobs)
    for state, model in zip(expected, ("sums", "french"), strict=True):
        assert_same_state(slots.state(model), state)


STEPS = {
    "plain": (AdamParams(0.1), AdamParams(0.05)),
    "clipped": (AdamParams(0.1, grad_clip_norm=0.5), AdamParams(0.1, grad_clip_norm=1e9)),
    "decayed": (AdamParams(0.1, 0.8, 0.99, 1e-8, 0.3), AdamParams(0.1, 0.8, 0.99, 1e-8, 0.3, 2.0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_optax(slots: TrainingSlots, name: str):
    start, rng = wild(slots, "french"), np.random.default_rng(4)
    weights: Any = jax.tree.map(np.asarray, dict(start.factors))
    state: Any = None
    for number, adam in enumerate(STEPS[name], start=1):
        run(slots, make_pass("french", [make_datum(rng, 9), make_datum(rng, 16)], "cross_entropy"))
        gradients = slots.state("french").gradients
        assert gradients is not None
        clip = [optax.clip_by_global_norm(adam.grad_clip_norm)] if adam.grad_clip_norm else []
        adamw = optax.adamw(adam.learning_rate, adam.beta1, adam.beta2, adam.eps, weight_decay=adam.weight_decay)
        norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(dict(gradients))))
        clipped = dict(gradients)
        for transformation in clip:
            clipped = transformation.update(clipped, transformation.init(clipped))[0]
        updates, state = adamw.update(clipped, state or adamw.init(weights), weights)
        weights = optax.apply_updates(weights, updates)
        metrics = slots.optim_step("french", adam)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        found = slots.state("french")
        assert found.step == metrics["step"] == number and found.gradients is None
        for path, both in weights.items():
            for a, b in zip(found.factors[path], both, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=path)


def test_a_rank_below_the_largest_stays_below(slots: TrainingSlots):
    wild(slots, "poems")
    run(slots, make_pass("poems", [make_datum(np.random.default_rng(5), 16)], "cross_entropy"))
    slots.optim_step("poems", ADAM)
    own = 1 + slots.models.index("poems")
    for path, matrix in slots.known.items():
        layers, part, name = path.split("/")
        for tree in slots._arrays:
            a, b = (np.asarray(leaf)[:, own] for leaf in tree[layers][part][name])
            kept = 2 if part == "attention" else 0
            assert not a[..., kept:].any() and not b[:, kept:].any(), path
            assert a.shape == (matrix.layers, matrix.inputs, 4)
    assert set(slots.state("poems").adapter(LIMITS.alpha).factors) == {
        path for path in slots.known if "attention" in path
    }
    assert slots.state("poems").adapter(LIMITS.alpha).rank == 2


# ---- alone and among others


def history(model: str) -> list[TrainPass | AdamParams]:
    """Return what a model's client sends: jobs of rows of all lengths and losses, and steps."""
    rng, losses = np.random.default_rng(SPECS[model].seed), list(LOSSES)
    sent: list[TrainPass | AdamParams] = []
    for number in range(5):
        loss: LossName = losses[int(rng.integers(len(losses)))]
        rows = [make_datum(rng, int(rng.integers(1, 33)), loss) for _ in range(int(rng.integers(1, 4)))]
        sent.append(make_pass(model, rows, loss, forward_only=number == 2))
        if number in (1, 4):
            sent.append(ADAM)
    return sent


Results = dict[str, list[Any]]


def play(slots: TrainingSlots, models: tuple[str, ...], draw: Any) -> tuple[Results, dict[str, SlotState]]:
    """Send the histories of models, mixed as `draw(choices)` says, and return results and final states."""
    for model in models:
        wild(slots, model)
    left, results = {model: history(model) for model in models}, Results({model: [] for model in models})
    while any(left.values()):
        jobs: list[TrainPass] = []
        for _ in range(draw((1, 2, 3, 4, 5))):
            free = [model for model in models if left[model] and all(model != job.model for job in jobs)]
            ready = [model for model in free if isinstance(left[model][0], TrainPass)]
            if ready and isinstance(job := left[draw(ready)].pop(0), TrainPass):
                jobs.append(job)
        for job, output in zip(jobs, run(slots, *jobs), strict=True):
            results[job.model].append(output)
        stepping = [model for model in models if left[model] and isinstance(left[model][0], AdamParams)]
        for model in stepping:
            if len(stepping) == len([m for m in models if left[m]]) or draw((0, 1)):
                left[model].pop(0)
                results[model].append(slots.optim_step(model, ADAM))
    return results, {model: slots.state(model) for model in models}


@pytest.fixture(scope="module")
def alone(slots: TrainingSlots) -> dict[str, tuple[list[Any], SlotState]]:
    """Results and final state of each model by itself, one job after another."""
    found = {}
    for model in slots.models:
        slots.unload(model)
    for model in MODELS:
        results, states = play(slots, (model,), lambda choices: choices[0])
        found[model] = results[model], states[model]
        slots.unload(model)
    return found


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(MODELS), count=st.integers(2, 3), seed=st.integers(0, 2**32 - 1))
def test_a_model_among_others_has_the_bits_that_it_has_alone(
    slots: TrainingSlots, alone: dict[str, Any], order: list[str], count: int, seed: int
):
    for model in slots.models:
        slots.unload(model)
    rng = np.random.default_rng(seed)
    results, states = play(slots, tuple(order[:count]), lambda choices: choices[int(rng.integers(len(choices)))])
    for model, found in results.items():
        expected, state = alone[model]
        assert_same_state(states[model], state)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, LossOutput):
                assert one.metrics == other.metrics
                for a, b in zip(one.logprobs, other.logprobs, strict=True):
                    np.testing.assert_array_equal(a, b)
            else:
                assert one == other


def test_a_restored_model_continues_with_the_same_bits_in_another_slot(slots: TrainingSlots):
    rng = np.random.default_rng(8)
    jobs = [make_pass("sums", [make_datum(rng, 16), make_datum(rng, 7)], "cross_entropy") for _ in range(4)]
    wild(slots, "sums")
    run(slots, jobs[0])
    slots.optim_step("sums", ADAM)
    run(slots, jobs[1])  # its gradient is part of the state
    kept = slots.state("sums")
    assert kept.step == 1 and kept.gradients is not None

    def go_on() -> SlotState:
        run(slots, jobs[2])
        slots.optim_step("sums", ADAM)
        run(slots, jobs[3])
        return slots.state("sums")

    expected = go_on()
    slots.unload("sums")
    wild(slots, "french")
    slots.restore("sums", kept)
    assert_same_state(slots.state("sums"), kept)
    assert_same_state(go_on(), expected)
    slots.restore("sums", kept, optimizer=False)
    weights_alone = slots.state("sums")
    assert (weights_alone.step, weights_alone.first, weights_alone.gradients) == (0, None, None)


# ---- failures


def test_a_model_that_diverges_is_refused_by_name_and_the_others_go_on(slots: TrainingSlots, alone: dict[str, Any]):
    wild(slots, "french")
    wild(slots, "sums")
    before, rng = slots.state("sums"), np.random.default_rng(9)
    datum = make_datum(rng, 12)
    huge = Datum(datum.tokens, {**datum.inputs, "weights": np.full(12, 1e38, np.float32)})
    own = [one for one in history("french") if isinstance(one, TrainPass)]
    run(slots, make_pass("sums", [huge, datum], "cross_entropy"), own[0])
    run(slots, own[1])
    with pytest.raises(ServiceError, match="model 'sums'") as error:
        slots.optim_step("sums", ADAM)
    assert error.value.category == "user"
    assert_same_state(slots.state("sums"), before)  # and no gradient
    assert slots.optim_step("french", ADAM) == alone["french"][0][2]
    with pytest.raises(ServiceError, match="sums"):
        run(slots, make_pass("sums", [huge], "cross_entropy"))
        slots.optim_step("sums", ADAM)


def test_wrong_jobs_are_refused(slots: TrainingSlots):
    rng = np.random.default_rng(10)
    wild(slots, "french")

    def refusal(*rows: Datum, loss: LossName = "cross_entropy", model: str = "french") -> str:
        with pytest.raises(ServiceError) as refused:
            run(slots, make_pass(model, rows, loss))
        return str(refused.value)

    datum = make_datum(rng, 4)
    assert "datum 1 has 33 tokens; expected 1 to 32" in refusal(make_datum(rng, 8), make_datum(rng, 33))
    assert "did you mean 'french'" in refusal(datum, model="frnch")
    assert "no rows" in refusal()
    beyond = Datum(datum.tokens, {**datum.inputs, "target_tokens": np.array([1, 2, VOCAB, 3])})
    assert f"target_tokens[2] is {VOCAB}; expected 0 to {VOCAB - 1}" in refusal(beyond)
    assert "needs logprobs" in refusal(datum, loss="ppo")
    assert slots.state("french").gradients is None, "nothing of a refused job has run"
    for adam, message in (
        (AdamParams(float("nan")), "learning_rate: got nan"),
        (AdamParams(0.1, 1.0), "beta1: got 1.0"),
    ):
        with pytest.raises(ServiceError, match=message):
            slots.check(adam)


def test_models_that_do_not_fit_are_refused(slots: TrainingSlots):
    for model in MODELS:
        slots.create(model, SPECS[model])
    with pytest.raises(ServiceError, match="all 3 slots have a model; unload one"):
        slots.create("fourth", LoraSpec(2))
    with pytest.raises(ServiceError, match="has a slot already"):
        slots.create("sums", LoraSpec(2))
    slots.unload("poems")
    with pytest.raises(ServiceError, match="rank: got 5; expected 1 to 4"):
        slots.create("fourth", LoraSpec(5))
    with pytest.raises(ServiceError, match="nothing is adapted.*head"):
        slots.create("fourth", LoraSpec(2, train_attention=False, train_mlp=False))
    with pytest.raises(ServiceError, match="expected one for the other"):
        slots.restore("sums", slots.state("french"))
    state = slots.state("french")
    path = next(iter(state.factors))
    wrong = {**state.factors, path: Factors(state.factors[path].a[:, 1:], state.factors[path].b)}
    with pytest.raises(ServiceError, match=f"does not fit this base: its factors of {path}"):
        slots.restore("fourth", dataclasses.replace(state, factors=wrong))
    assert slots.models == ("french", "sums")


def test_the_same_seed_draws_the_same_factors_and_the_adapter_begins_as_the_base(slots: TrainingSlots):
    slots.create("one", LoraSpec(4, seed=7))
    slots.create("two", LoraSpec(4, seed=7, train_mlp=False))
    slots.create("three", LoraSpec(4, seed=8))
    one, two, three = (slots.state(model).factors for model in ("one", "two", "three"))
    for path, (a, b) in one.items():
        assert not b.any() and np.abs(a).max() <= 1 / np.sqrt(a.shape[1]) and np.abs(a).max() > 0
        assert not np.array_equal(a, three[path].a)
        if path in two:
            np.testing.assert_array_equal(a, two[path].a)
    assert len(two) == 4 and len(one) == 7
    assert slots.info["left out"].startswith("not adapted: the embedding and the head")


def test_the_adapter_has_the_scale_in_b(slots: TrainingSlots):
    state = wild(slots, "poems")
    for path, (a, b) in slots.state("poems").adapter(LIMITS.alpha).factors.items():
        np.testing.assert_array_equal(a, state.factors[path].a)
        np.testing.assert_array_equal(b, state.factors[path].b * np.float32(LIMITS.alpha / 2))


def test_rows_of_a_program_follow_from_its_length_and_the_memory_of_gradients():
    limits = SlotLimits(tokens=256, shortest=32)
    assert [limits.length(tokens) for tokens in (1, 32, 33, 64, 65, 2048)] == [32, 32, 64, 64, 128, 2048]
    each = 4 * 2 * 4 * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 24))  # bytes of an adapter of rank 4, two layers
    slots = make_slots(tokens=256, gradient_bytes=6 * each + 5)
    assert [slots.rows_of(length) for length in (16, 64, 512)] == [6, 4, 1]


def test_compiling_ahead_changes_no_model_and_leaves_nothing_to_compile():
    slots, rng = make_slots(), np.random.default_rng(11)
    slots.create("french", SPECS["french"])
    before = slots.state("french")
    for compile_one in slots.compilations():
        compile_one()
    assert_same_state(slots.state("french"), before)
    programs = (slots._programs.forward_backward, slots._programs.step)
    sizes = [one._cache_size() for one in programs]
    run(slots, make_pass("french", [make_datum(rng, 5), make_datum(rng, 30)]))
    slots.optim_step("french", ADAM)
    assert [one._cache_size() for one in programs] == sizes
