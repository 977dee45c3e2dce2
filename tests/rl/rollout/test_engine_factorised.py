"""An engine that holds its weights as factors draws what the factorised policy draws, and says so."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import REQUIRED, ConfigBase, ConfigError, Configurable, label
from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.layers.wrappers.low_rank.factorised import (
    CalibrationRows,
    FactorisedWeights,
    factorised_config,
    factorised_params,
)
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.training.logprobs import score_rows
from tests.elsewhere import elsewhere
from tests.rl.rollout.small import POLICY, STOP, TEMPERATURE, _at, _in_rows, make_engine, params, request
from tests.rl.rollout.test_engine_mesh import TWO_DEVICES
from tests.rl.tiny import make_prompt, tiny_experiment, tiny_params, tiny_policy


class Texts(Configurable):
    """Random rows of tokens, of several lengths, as a source."""

    class Config(ConfigBase["Texts"]):
        rows: int = REQUIRED
        vocab: int = 272

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def __len__(self) -> int:
        return self.cfg.rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        size = 80 if index == 1 else 5 + index
        return {"tokens": np.random.default_rng(index).integers(0, self.cfg.vocab, size).astype(np.int32)}


def rows(texts: Texts.Config, longest: int) -> CalibrationRows:
    """Return the same rows, padded and cut."""
    found = [one["tokens"][:longest] for one in (texts.build()[index] for index in range(texts.rows))]
    size = max(len(one) for one in found)
    tokens = np.stack([np.pad(one, (0, size - len(one))) for one in found])
    return CalibrationRows(tokens, np.arange(size) < np.array([len(one) for one in found])[:, None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "calibration", "rank_cache"),
    [
        pytest.param(1, Texts.Config(rows=8), False, marks=pytest.mark.full),
        (2, Texts.Config(rows=8), True),
        pytest.param(4, None, False, marks=pytest.mark.full),
    ],
    ids=["whitened", "whitened, cached in rank space", "plain"],
)
def test_log_probabilities_are_those_of_scoring_with_the_factors_to_the_bit(count, calibration, rank_cache):
    how = FactorisedWeights.Config(rank=4, calibration=calibration, rank_cache=rank_cache)
    policy = tiny_policy()
    own, requests = tiny_params(policy), [request(3 + number, samples=count) for number in range(count)]
    engine = make_engine(own, stored=how, model=policy)
    drawn = engine.generate(requests)
    held = build_abstract(factorised_config(policy, how))
    graphdef, text = split(held)[0], None if calibration is None else rows(calibration, engine.cfg.longest)
    made = jax.jit(lambda own: factorised_params(build_abstract(policy), held, own, text))(own)
    prompts = {one.prompt.id: one.prompt for one in requests}
    pairs = [(prompts[one.prompt_id], one) for one in drawn]
    tokens = _in_rows(pairs)
    score = jax.jit(lambda own, *rest: score_rows(bind(graphdef, own), *rest))
    found = score(made, tokens[:, :-1], tokens[:, 1:], np.array([TEMPERATURE], np.float32)).logprobs()
    for index, pair in enumerate(pairs):
        np.testing.assert_array_equal(pair[1].logprobs, found[index, _at(*pair)])
        assert pair[1].tags == ("low-rank-weights",)


def test_a_run_without_importance_correction_is_refused():
    cfg = tiny_experiment()
    cfg.engine.weights = FactorisedWeights.Config()
    with pytest.raises(ConfigError, match=r"objective\.importance: expected TruncatedImportance.*of low-rank-weights"):
        cfg.check("inprocess")


@pytest.mark.parametrize("changes", [{"share": 1.5}, {"layers": ()}], ids=["share", "layers"])
def test_fields_are_refused_by_the_path_that_was_set(changes):
    how = FactorisedWeights.Config(**changes)
    label(how, "run.engine.weights")
    with pytest.raises(ConfigError, match=rf"run\.engine\.weights\.{next(iter(changes))}: expected"):
        factorised_config(tiny_policy(), how)


def test_calibration_of_another_vocabulary_is_refused():
    calibration = Texts.Config(rows=2, vocab=1000)
    with pytest.raises(ConfigError, match=r"calibration: expected tokens below the model's vocab_size=272"):
        make_engine(stored=FactorisedWeights.Config(rank=4, calibration=calibration))


def last_bits_changed(own: Params, seed: int) -> Params:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.nextafter(x, random.choice([-np.inf, np.inf], x.shape).astype(x.dtype)), own)


def drawn_on(mesh: dict[str, int], rank_cache: bool, shifted: int | None = None) -> list[list[Any]]:
    """Return tokens and log-probabilities on a mesh; `shifted`: the seed of a last-bit change of all weights."""
    cfg = RolloutEngine.Config(
        model=POLICY, stop_tokens=STOP, max_prompt_tokens=24, max_new_tokens=12, mesh=mesh, max_num_seqs=4
    )
    rank = 3 if rank_cache else 5
    cfg.weights = FactorisedWeights.Config(rank=rank, calibration=Texts.Config(rows=8), rank_cache=rank_cache)
    engine = cfg.build()
    engine.set_weights(params() if shifted is None else last_bits_changed(params(), shifted), 0)
    found = engine.generate([Request(make_prompt(i, 1 + 3 * i), samples=2, seed=5) for i in range(4)])
    return [[r.tokens.tolist(), r.logprobs.tolist()] for r in found]


@pytest.mark.full
@pytest.mark.parametrize("rank_cache", [False, True])
def test_on_two_devices_it_draws_the_same_tokens(rank_cache: bool):
    """Log-probabilities move no further than by last bits of the weights, to which some contexts are sensitive."""
    found = elsewhere(drawn_on, {"tensor": 2}, rank_cache, environ=TWO_DEVICES)
    shifted = [drawn_on({}, rank_cache, seed) for seed in range(3)]
    for expected, on_two, *moved in zip(drawn_on({}, rank_cache), found, *shifted, strict=True):
        assert [one[0] for one in (on_two, *moved)] == [expected[0]] * 4
        apart = np.abs(np.array([one[1] for one in (on_two, *moved)]) - expected[1])
        assert (apart[0] <= 4 * apart[1:].max(axis=0) + 2e-5).all(), apart


def test_a_rank_that_saves_nothing_is_named_as_it_was_set():
    with pytest.raises(ConfigError, match=r"^RolloutEngine\.weights\.rank: expected one with .*, got 4096") as caught:
        make_engine(stored=FactorisedWeights.Config(rank=4096))
    assert caught.value.path == "RolloutEngine.weights.rank"
