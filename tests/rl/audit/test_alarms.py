"""Alarms are raised by the rows that their rules name, said with growing intervals, and summed up."""

from rl.audit.alarms import Alarms, raised_alarms
from rl.training.logprob_diff import BOUNDS, difference_bounds

FINE = {"updates": 1, "logprob_diff_mean": 1e-7, "logprob_diff_max": 4e-6, **difference_bounds("float32", "raw")}


def test_rows_within_their_bounds_raise_nothing():
    assert raised_alarms([{"step": 1}, {"step": 2, **FINE}, {"step": 3, "logprob_diff_mean": 1.0}]) == {}


def test_drift_of_the_mean_or_of_one_token_is_an_alarm():
    mean, token = {"step": 4, **FINE, "logprob_diff_mean": 2e-5}, {"step": 9, **FINE, "logprob_diff_max": 2e-4}
    found = raised_alarms([{"step": 1, **FINE}, mean, token])["numerics_drift"]
    assert (found["count"], found["first"], found["last"]) == (2, 4, 9)


def test_what_is_measured_of_each_type_and_codec_is_within_its_bound_and_outside_the_next():
    """The figures in bfloat16 and with int8 weights are alarms where float32 was promised."""
    measured = {
        ("bfloat16", "raw"): (1.6e-3, 6.6e-3),
        ("float32", "int8"): (3e-3, 1.5e-2),
        ("float32", "delta"): (1e-7, 8e-6),
    }
    for (dtype, codec), (mean, most) in measured.items():
        bounds = difference_bounds(dtype, codec)
        assert mean < bounds["logprob_diff_mean_bound"] and most < bounds["logprob_diff_max_bound"]
        assert (mean > BOUNDS["float32"][0]) == (codec != "delta")
    assert difference_bounds("float32", "bf16") == difference_bounds("bfloat16", "raw")
    assert difference_bounds("float32", "raw", ["low-rank-weights"]) == {}  # another policy: no bound, no alarm


def test_lines_come_at_the_first_second_fourth_and_eighth_time():
    alarms, said = Alarms(), []
    for step in range(1, 12):
        said += [(step, line) for line in alarms.lines([{"step": step, "updates": 0}])]
    assert [step for step, _ in said] == [1, 2, 4, 8]
    assert said[0][1].startswith("alarm empty_batch at update 1: nothing in the batch") and "8th time" in said[3][1]
