"""Alarms are on for the updates that their rules name, are shown when they begin and end, and are summed up."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from mesh.errors import UserError
from rl.audit.alarms import Alarms, raised_alarms
from rl.training.scoring.logprob_diff import BOUNDS, difference_bounds

FINE = {"updates": 1, "logprob_diff_mean": 1e-7, "logprob_diff_max": 4e-6, **difference_bounds("float32", "raw")}
# As in the demo: shares of its zero-variance groups go up to 0.44, its entropy falls by a third.
HEALTHY = {
    **FINE,
    "reward": 0.5,
    "reward_term/format": 1.0,
    "entropy": 0.4,
    "truncation_fraction": 0.05,
    "zero_variance_fraction": 0.4,
    "clip_fraction": 0.1,
    "importance_dropped_fraction": 0.05,
    "ess": 0.95,
}


def rows(*parts: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return so many updates of each kind, one after another; a metric of None is left out."""
    made = [{**HEALTHY, **changes} for count, changes in parts for _ in range(count)]
    return [{"step": step, **{k: v for k, v in row.items() if v is not None}} for step, row in enumerate(made, start=1)]


def shown(updates: Iterable[dict[str, Any]], **limits: Any) -> list[tuple[int, str]]:
    alarms = Alarms.Config(**limits).build()
    return [(row["step"], line) for row in updates for line in alarms.observe(row)]


# Alarm: (metric, a bad value, its steps if the 30 updates before are healthy, the metric's number in its line).
# A mean of ten is beyond its limit after so many bad values; entropy's limit is a quarter of 0.4.
LEVELS: dict[str, tuple[str, float, int, str]] = {
    "entropy": ("entropy", 0.01, 38, "entropy 0.088, mean of 10 updates, below 0.1 (0.25 of its start): the policy"),
    "truncation": ("truncation_fraction", 0.9, 36, "truncation_fraction 0.56, mean of 10 updates, above 0.5: most"),
    "zero_variance": ("zero_variance_fraction", 1.0, 39, "zero_variance_fraction 0.94, mean of 10 updates, above 0.9:"),
    "clipping": ("clip_fraction", 0.95, 35, "clip_fraction 0.525, mean of 10 updates, above 0.5: most of the loss"),
    "rejection": (
        "importance_dropped_fraction",
        0.8,
        34,
        "importance_dropped_fraction 0.35, mean of 10 updates, above",
    ),
    "ess": ("ess", 0.1, 36, "ess 0.44, mean of 10 updates, below 0.5: few tokens have most of the importance weight"),
}


def test_every_alarm_has_a_test_here_and_healthy_updates_raise_none():
    names = {"empty_batch", "numerics_drift", "audit", "missing_term", *LEVELS}
    bad = {metric: value for metric, value, *_ in LEVELS.values()}
    bad |= {"updates": 0, "logprob_diff_max": 1.0, "audit_failures": 1.0, "reward_term/format": None}
    assert raised_alarms(rows((30, {}), (30, bad))).keys() == names
    assert raised_alarms(rows((200, {}))) == {}
    assert raised_alarms(rows((60, dict.fromkeys(HEALTHY)))) == {}  # updates without a metric raise nothing


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_is_judged_by_its_mean_shown_once_and_over_by_a_margin(name: str):
    metric, value, first, words = LEVELS[name]
    bad = {metric: value}
    assert shown(rows((30, {}), (1, bad), (30, {}))) == []  # one bad batch is no alarm
    lines = shown(rows((30, {}), (40, bad), (30, {})))
    assert [step for step, _ in lines][0] == first and len(lines) == 2
    assert lines[0][1].startswith(f"alarm {name} at update {first}: {words}")
    over = lines[1][0]
    assert 70 < over <= 80 and lines[1][1] == f"alarm {name} is over at update {over}"
    assert raised_alarms(rows((30, {}), (40, bad), (30, {})))[name]["last"] == over - 1
    assert shown(rows((30, {}), (40, bad)), **{name: None}) == []


def test_a_mean_that_stays_near_its_limit_is_one_alarm():
    """A fiftieth above and below the limit in turns; without a margin it would begin and end again."""
    near = [part for _ in range(6) for part in ((10, {"clip_fraction": 0.51}), (10, {"clip_fraction": 0.49}))]
    assert [step for step, _ in shown(rows((10, {}), *near))] == [20]
    assert len(shown(rows((10, {}), *near), margin=0.0)) == 12


def test_a_start_is_the_run_s_own():
    """Entropy 0.05 from the beginning is no collapse; the limit is a share, and the window a number of updates."""
    assert shown(rows((50, {"entropy": 0.05}))) == []
    assert shown(rows((3, {}), (3, {"entropy": 0.24})), window=3, entropy=0.75)[0][0] == 5
    assert shown(rows((3, {}), (3, {"entropy": 0.35})), window=3, entropy=0.75) == []


def test_a_term_of_the_reward_that_is_no_longer_there():
    lines = shown(rows((5, {}), (30, {"reward_term/format": None}), (5, {})))
    assert [step for step, _ in lines] == [25, 36]
    assert lines[0][1].startswith("alarm missing_term at update 25: no reward_term/format for 20 updates: a term of")
    unscored = {"reward_term/format": None, "reward": None}
    assert shown(rows((5, {}), (30, unscored))) == []  # nothing could be scored
    assert shown(rows((5, {}), (30, {"reward_term/format": None})), missing_term=None) == []


def test_limits_are_those_of_the_config_and_are_checked():
    updates = rows((30, {}), (40, {"clip_fraction": 0.3}))
    assert raised_alarms(updates) == {}
    assert raised_alarms(updates, {"alarms.clipping": 0.2, "prompts_per_step": 3})["clipping"]["count"] == 35
    for field, value in {"window": 0, "margin": 1.0, "ess": 1.5, "entropy": 0.0, "missing_term": 0}.items():
        with pytest.raises(UserError, match=rf"Alarms\.{field}: "):
            Alarms.Config(**{field: value}).build()
    assert len(dataclasses.fields(Alarms.Config)) == 9  # each is in the table of docs/reference/report.md


def test_rows_within_their_bounds_raise_nothing():
    assert raised_alarms([{"step": 1}, {"step": 2, **FINE}, {"step": 3, "logprob_diff_mean": 1.0}]) == {}


def test_drift_of_the_mean_or_of_one_token_is_an_alarm():
    mean, token = {"step": 4, **FINE, "logprob_diff_mean": 2e-5}, {"step": 9, **FINE, "logprob_diff_max": 2e-4}
    found = raised_alarms([{"step": 1, **FINE}, mean, token])["numerics_drift"]
    assert (found["count"], found["first"], found["last"]) == (2, 4, 9)


def test_what_is_measured_of_each_type_and_codec_is_within_its_bound_and_outside_the_next():
    """The figures in bfloat16 and with int8 weights are alarms where float32 was promised."""
    measured = {
        ("bfloat16", "raw"): (2.2e-3, 0.12),
        ("float32", "int8"): (3e-3, 1.5e-2),
        ("float32", "delta"): (1e-7, 8e-6),
    }
    for (dtype, codec), (mean, most) in measured.items():
        bounds = difference_bounds(dtype, codec)
        assert mean < bounds["logprob_diff_mean_bound"] and most < bounds["logprob_diff_max_bound"]
        assert (mean > BOUNDS["float32"][0]) == (codec != "delta")
    assert difference_bounds("float32", "bf16") == difference_bounds("bfloat16", "raw")
    assert difference_bounds("float32", "raw", ["low-rank-weights"]) == {}  # another policy: no bound, no alarm


def test_lines_of_single_updates_come_at_the_first_second_fourth_and_eighth_time():
    said = shown({"step": step, "updates": 0} for step in range(1, 12))
    assert [step for step, _ in said] == [1, 2, 4, 8]
    assert said[0][1].startswith("alarm empty_batch at update 1: nothing in the batch")
    assert "8 times by now" in said[3][1]


def test_an_alarm_of_single_updates_is_over_after_a_window_without_it_and_may_begin_again():
    said = shown({"step": step, "updates": int(step not in (3, 9, 30))} for step in range(1, 45))
    began, over = "alarm empty_batch at update {}", "alarm empty_batch is over at update {}"
    expected = [began.format(3), began.format(9), over.format(19), began.format(30), over.format(40)]
    assert [line[: len(text)] for (_, line), text in zip(said, expected, strict=True)] == expected
