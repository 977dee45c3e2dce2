"""Anchors that are used, computed or evicted as the rules say."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.config import ConfigError
from rl.rollout.kv_cache.kvcomm.anchors import KVComm

pytestmark = pytest.mark.numerics

KEY, PLACE, SIZE = (5, None), ("template", 1), 4


def tokens(value: float, size: int = SIZE) -> Any:
    """Return tokens whose values all are this."""
    return {name: jnp.full((1, size, 1, 1), value, jnp.float32) for name in ("k", "v")}


def pool(values: list[float], lengths: list[int] | None = None, **fields: Any) -> KVComm:
    made = KVComm.Config(**{"anchors": 8, **fields}).build()
    for value, length in zip(values, lengths or [SIZE] * len(values), strict=True):
        made.add(KEY, PLACE, length, (tokens(value), tokens(10 * value), None))
    return made


def reused(made: KVComm, value: float, count: int = SIZE) -> bool:
    return made.correction(KEY, PLACE, tokens(value), count) is not None


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=6), st.floats(-4, 4, width=32), st.floats(0.05, 0.95))
def test_a_text_is_computed_where_the_entropy_over_the_anchors_is_high(
    values: list[float], value: float, share: float
) -> None:
    distances = np.array([np.sqrt(SIZE * (one - value) ** 2) for one in values], np.float64)
    near = np.exp(-(distances - distances.min()))
    near /= near.sum()
    entropy = -sum(p * np.log2(p) for p in near if p > 0)
    limit = share * np.log2(len(values))
    if abs(entropy - limit) > 1e-3:
        assert reused(pool(values, entropy=share), value) == (len(values) > 1 and entropy <= limit)


def test_anchors_shorter_than_the_text_do_not_count() -> None:
    made = pool([0.0, 9.0, 9.0], [4, 3, 4])
    assert reused(made, 0.0, 3) and reused(made, 0.0, 4)
    assert not reused(pool([0.0, 9.0], [4, 3]), 0.0, 4) and reused(pool([0.0, 9.0], [4, 3]), 0.0, 3)


def test_other_templates_sizes_and_policies_have_other_anchors() -> None:
    made = pool([0.0, 9.0])
    assert reused(made, 0.0)
    assert made.correction((6, None), PLACE, tokens(0.0), SIZE) is None
    assert made.correction(KEY, ("template", 2), tokens(0.0), SIZE) is None
    assert made.correction(KEY, PLACE, tokens(0.0, 8), SIZE) is None
    made.forget(lambda key: key[0] == 5)
    assert reused(made, 0.0)
    made.forget()
    assert not reused(made, 0.0) and made.stats()["kvcomm_anchors"] == 0


def test_of_the_oldest_anchors_the_least_used_makes_room() -> None:
    made = pool([0.0, 10.0, 20.0, 30.0], anchors=4, oldest=3)
    for value in (0.0, 20.0, 20.0):
        assert reused(made, value)
    made.add(KEY, PLACE, SIZE, (tokens(40.0), tokens(0.0), None))  # 10 was never used, nor was 30, which is younger
    found = made.correction(KEY, PLACE, tokens(0.0), SIZE)
    assert found is not None
    offsets, _ = found.own
    assert sorted(np.asarray(offsets["v"])[:, 0, 0, 0, 0].tolist()) == [0.0, 0.0, 200.0, 300.0]
    assert made.stats()["kvcomm_anchors"] == 4


def test_weights_are_near_the_anchor_that_is_the_text() -> None:
    made = pool([0.0, 9.0], temperature=0.1)
    found = made.correction(KEY, PLACE, tokens(9.0), SIZE)
    assert found is not None
    offsets, weights = found.own
    mixed = sum(np.asarray(weights["v"])[place] * np.asarray(offsets["v"])[place] for place in range(8))
    np.testing.assert_allclose(mixed, 90.0, rtol=1e-5)


def test_bases_are_kept_by_policy_and_text_and_the_least_recently_used_goes() -> None:
    made = KVComm.Config(bases=2).build()
    for name in (b"a", b"b"):
        made.keep_base(KEY, name, tokens(1.0))
    assert made.base(KEY, b"a") is not None
    made.keep_base(KEY, b"c", tokens(1.0))
    assert [made.base(KEY, name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    assert made.base((6, None), b"a") is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"anchors": 1}, "least_anchors: expected at most anchors=1"),
        ({"entropy": 1.5}, "entropy: expected 0 to 1"),
        ({"top_p": 0.0}, "top_p: expected more than 0"),
        ({"temperature": 0.0}, "temperature: expected more than 0"),
        ({"bases": 0}, "bases: expected 1 or more"),
    ],
)
def test_numbers_that_no_pool_can_have_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KVComm.Config(**fields).check()
