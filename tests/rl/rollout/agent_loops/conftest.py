"""An engine for the tests of agent loops, which each leaves as it found it."""

from collections.abc import Iterator

import pytest

from rl.rollout.engine import RolloutEngine
from tests.rl.rollout.small import assert_no_page_is_held, drain, make_engine, request


@pytest.fixture(scope="module")
def one_engine() -> RolloutEngine:
    return make_engine()


@pytest.fixture
def engine(one_engine: RolloutEngine) -> Iterator[RolloutEngine]:
    """Whatever a test does, in the end the engine is empty, holds no page, and draws as before."""
    yield one_engine
    drain(one_engine)
    assert_no_page_is_held(one_engine)
    assert len(one_engine.generate([request(2)])) == 3
