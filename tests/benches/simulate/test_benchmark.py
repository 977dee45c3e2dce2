"""`axl bench simulate`: errors by hand, settings, and real figures of its quick sections."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tests.benches.simulate.accuracy import FIRST, MEASURED, PREDICTED, Setting, rate_of, scored
from tests.benches.simulate.control import microseconds_per_rollout
from tools.commands.bench import command


def test_errors_leave_out_the_configuration_that_was_measured():
    rows = [{"rate_error": rate, "staleness_error": age} for rate, age in ((9.0, 9.0), (0.1, 0.0), (0.3, 0.2))]
    found = scored(rows)
    assert (found["error_mean"], found["error_max"]) == (pytest.approx(0.15), 0.3)
    assert (found["rate_error_mean"], found["fitted_error"]) == (pytest.approx(0.2), 9.0)


def test_a_rate_counts_the_time_of_what_is_made_again():
    rows: list[dict[str, Any]] = [{"event": "update", "step": FIRST + n, "time": float(n)} for n in range(5)]
    rows += [{"event": "update", "step": FIRST + n, "time": 10.0 + n} for n in range(2, 9)]
    rows.append({"event": "wait", "step": FIRST + 9, "time": 99.0})
    assert rate_of(rows) == pytest.approx(8 * 128 / 18)


def test_settings_differ_and_are_those_of_the_command():
    assert len({one.name for one in (MEASURED, *PREDICTED)}) == 10
    for setting in PREDICTED:
        setting.config().check_fields()
    assert Setting(3, 2, prompts=8).words()[-1] == "groups_per_lease=8"


def test_time_of_the_controller_does_not_grow_with_what_is_in_flight():
    assert 0 < microseconds_per_rollout(1024, 64) < 20 * microseconds_per_rollout(32, 64)


@pytest.mark.full
def test_quick_sections_give_their_figures():
    done = CliRunner().invoke(command, ["simulate", "--quick", "--json", "--sections", "plan"], standalone_mode=False)
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0 and found["plan_updates"] > 0 and found["plan_peak_bytes"] > 0
