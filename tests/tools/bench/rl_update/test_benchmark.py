"""The benchmark of the update runs, both layouts learn the same, and lengths are those it speaks of."""

import numpy as np
import pytest

from rl.roles.headers import header_of
from tests.bounds import within
from tools.bench.rl_update import benchmark, shared_prefix


@pytest.mark.full
def test_both_layouts_make_the_same_update_of_which_one_wastes_less():
    result = benchmark.run(1, groups=4, samples=4, max_new=32)
    assert result["grad_norm_ratio"] == pytest.approx(1, abs=1e-3)
    assert 0 < result["wasted_tokens"] < result["wasted_tokens_padded"] < 1
    assert result["cpu_ratio_to_padded"] > 0


def test_lengths_are_log_normal_and_three_in_a_hundred_are_at_the_limit():
    groups = benchmark.make_groups(0, 400, 16, 10_000)
    lengths = np.asarray([len(rollout.tokens) for group in groups for rollout in group.rollouts])
    assert lengths.max() == 10_000 and np.mean(lengths == 10_000) == pytest.approx(0.03, abs=0.01)
    below = np.log(lengths[lengths < 10_000] / 10_000) + benchmark.PERCENTILE_97
    assert np.median(below) == pytest.approx(0, abs=0.1)
    assert np.quantile(below, 0.163) == pytest.approx(-1, abs=0.1)  # one sigma below, of those that are not cut


@pytest.mark.numerics
@pytest.mark.full
def test_groups_that_share_make_the_gradient_of_separate_rows_by_fewer_products():
    result = shared_prefix.measure(1, samples=4, answer=16, ratios=(1, 4))
    assert list(result) == ["1:1", "4:1", "1:1 forked"]
    for layouts in result.values():
        for name in ("row", "tree"):
            ratios = layouts[name]["to_separate"]
            assert within(ratios["grad_norm_error"], 1e-5) and ratios["flops"] < 0.7 and ratios["temp_bytes"] < 1
    shared = [result[name]["tree"]["to_separate"]["flops"] for name in result]
    assert shared[1] < shared[0] and shared[2] < shared[0]
    assert result["1:1"]["tree"]["tokens"] == 16 + 4 * 16
    assert result["1:1 forked"]["tree"]["tokens"] == 16 + 4 * (1 + 2 + 4 + 4)


def test_forked_answers_share_a_quarter_then_by_halves_then_by_pairs():
    header = header_of(shared_prefix.make_group(8, 64, 1, forked=True))
    assert header.tree.distinct(dict.fromkeys(range(8), 64)) == 16 * (1 + 2 + 4 + 8)
    assert sorted(header.tree.common) == [0, 16, 32, 32, 48, 48, 48, 48]
