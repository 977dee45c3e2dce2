"""Drafts change no bit either with all rules of sampling, adapters, experts, sinks, or windows of many cells."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mesh import UserError
from rl.protocol.messages import Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.runner import ModelRunner
from rl.rollout.request import Request, StopConditions
from rl.rollout.speculation.speculator import Speculation
from tests.rl.rollout import test_engine_families as families
from tests.rl.rollout import test_engine_routing as routing
from tests.rl.rollout.small import assert_no_page_is_held, assert_same, make_engine, mixed, request
from tests.rl.rollout.speculation.oracle import Oracle, oracle
from tests.rl.rollout.test_adapters import LIMITS, NAMES, adapter
from tests.rl.tiny import tiny_params

DRAFTS = Speculation.Config(drafters=(Oracle.Config(),), depth=7, most_tokens=64, adaptive=False)


def rules() -> tuple[RolloutEngine, list[Request]]:
    return make_engine(speculation=DRAFTS, pages=16), mixed(20)


def adapters() -> tuple[RolloutEngine, list[Request]]:
    engine = make_engine(speculation=DRAFTS, adapters=LIMITS)
    for name in NAMES:
        engine.load_adapter(name, adapter(name))
    return engine, [request(number, adapter=(None, *NAMES)[number % 4]) for number in range(12)]


def experts() -> tuple[RolloutEngine, list[Request]]:
    """A mixture whose routing is recorded."""
    engine = make_engine(routing.parameters(), model=routing.RECORDING, speculation=DRAFTS)
    return engine, [request(number) for number in range(12)]


def of_family(policy: Callable[[], Any]) -> tuple[RolloutEngine, list[Request]]:
    engine = make_engine(tiny_params(policy()), model=policy(), speculation=DRAFTS)
    return engine, [request(number) for number in range(12)]


def sinks() -> tuple[RolloutEngine, list[Request]]:
    return of_family(families.sinks)


def long_windows() -> tuple[RolloutEngine, list[Request]]:
    """Windows of three cells, in groups of rows, over dispatches of many steps."""
    engine = make_engine(speculation=DRAFTS, max_num_seqs=16, max_new_tokens=400, steps_per_dispatch=16)
    lengths = (400, 30, 390, 100, 250)
    stops = [StopConditions(max_new_tokens=length) for length in lengths]
    return engine, [request(number, samples=4, stop=stop) for number, stop in enumerate(stops)]


def known(engine: RolloutEngine, rollouts: list[Rollout], wrong: float) -> None:
    drafter = oracle(engine)
    drafter.answers = {(one.prompt_id, one.sample_id): one.tokens for one in rollouts}
    drafter.wrong, drafter.random = wrong, np.random.default_rng(0)


@pytest.mark.full
@pytest.mark.parametrize("made", [rules, adapters, experts, sinks, long_windows])
def test_drafts_change_no_bit(made: Callable[[], tuple[RolloutEngine, list[Request]]]):
    engine, requests = made()
    expected = engine.generate(requests)
    for wrong in (0.0, 0.1, 0.5, 1.0):
        known(engine, expected, wrong)
        before = engine.stats()["accepted_tokens"]
        found = engine.generate(requests)
        assert_same(found, expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one.routing, other.routing)
        assert_no_page_is_held(engine)
        assert engine.stats()["accepted_tokens"] > before or wrong == 1.0


@pytest.mark.full
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_what_was_handed_back_goes_on_with_the_same_bits(turns: int):
    engine, requests = rules()
    expected = engine.generate(requests)
    known(engine, expected, 0.1)
    numbers = {engine.submit(one): one for one in requests}
    finished = [one for _ in range(turns) for one in engine.step()] + engine.abort_all()
    again = {numbers[one.number].prompt.id: one.rollouts for one in finished}
    found = engine.generate([dataclasses.replace(one, partial=again[one.prompt.id]) for one in requests])
    assert_same(found, expected)


@pytest.mark.parametrize(("policy", "what"), [(families.latent, "made from latents"), (families.windowed, "capped")])
def test_policies_whose_sums_depend_on_the_number_of_tokens_are_refused(policy: Callable[[], Any], what: str):
    with pytest.raises(UserError, match=f"speculation: .*{what}"):
        ModelRunner(
            RolloutEngine.Config(
                model=policy(), stop_tokens=(), max_prompt_tokens=4, max_new_tokens=4, speculation=DRAFTS
            )
        )
