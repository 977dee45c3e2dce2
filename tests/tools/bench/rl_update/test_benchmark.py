"""The benchmark of the update runs, both layouts learn the same, and lengths are those it speaks of."""

import numpy as np
import pytest

from tools.bench.rl_update import benchmark


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
