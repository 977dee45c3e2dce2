"""How much of its bound each numerical comparison used: a plugin of pytest, registered by conftest.py.

In tests marked `numerics`, `np.testing.assert_allclose` and `pytest.approx` are recorded as they are, and `within`
serves where an error is compared by hand. A comparison that uses more than a third of its bound passes here and may
fail on a processor that adds in another order, so such a run fails although its tests pass. CI runs on whatever
processor it is given: there a comparison may use two thirds, since another order is what the margin is for.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LIMIT = 0.67 if os.environ.get("CI") else 0.33  # of the bound: a margin of three
SHOWN = 10
HERE = f"{Path(__file__).parents[1]}/"

_used: dict[str, float] = {}  # of the running test: the largest share of a bound at each line
_assert_allclose = np.testing.assert_allclose
_Approx = type(pytest.approx(1.0))
_approx_eq = _Approx.__eq__


def within(error: Any, bound: float) -> bool:
    """Return whether `error`, a number or an array, is at most `bound` everywhere; if so, record the share."""
    share = float(np.max(np.abs(np.asarray(error, np.float64)))) / float(bound)
    if share <= 1:
        record(share)
    return share <= 1


def record(share: float) -> None:
    """Note a share of a bound for the line of the test, or of the helper of tests, that compares."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "_pytest" in frame.f_code.co_filename):
        frame = frame.f_back
    add({f"{frame.f_code.co_filename.removeprefix(HERE)}:{frame.f_lineno}": share})


def add(shares: dict[str, float]) -> None:
    """Note the shares at some lines, of another process perhaps."""
    for line, share in shares.items():
        _used[line] = max(share, _used.get(line, 0.0))


def taken() -> dict[str, float]:
    """Return the shares recorded since the last call."""
    shares = dict(_used)
    _used.clear()
    return shares


def install() -> None:
    """Record the comparisons of this process."""
    np.testing.assert_allclose = _recorded_allclose
    _Approx.__eq__ = _recorded_approx


def _recorded_allclose(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, *args: Any, **more: Any) -> None:
    __tracebackhide__ = True
    _assert_allclose(actual, desired, rtol, atol, *args, **more)
    kind = np.complex128 if any(np.iscomplexobj(x) for x in (actual, desired)) else np.float64
    one, other = np.broadcast_arrays(np.asarray(actual, kind), np.asarray(desired, kind))
    apart = np.isfinite(one) & (one != other)
    if apart.any():
        record(float(np.max(np.abs(one - other)[apart] / (atol + rtol * np.abs(other[apart])))))


def _recorded_approx(self: Any, actual: Any) -> bool:
    equal = _approx_eq(self, actual)
    if (
        equal
        and np.ndim(actual) == 0
        and np.issubdtype(np.asarray(actual).dtype, np.number)
        and actual != self.expected
    ):
        record(abs(float(actual) - float(self.expected)) / float(self.tolerance))
    return equal


# ---- the plugin


class Bounds:
    """The thinnest comparisons of a run; the workers of xdist send theirs with their reports."""

    def __init__(self) -> None:
        self.shares: dict[str, tuple[float, str]] = {}  # by line: the largest, and the test that had it
        install()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        if call.when == "teardown":
            shares = taken()
            if item.get_closest_marker("numerics") is not None and shares:
                item.user_properties.append(("bounds", shares))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            for shares in (value for name, value in report.user_properties if name == "bounds"):
                for line, share in shares.items():  # pyright: ignore
                    self.shares[line] = max((share, report.nodeid), self.shares.get(line, (0.0, "")))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == 0 and any(share > LIMIT for share, _ in self.shares.values()):
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.shares:
            terminalreporter.section("thinnest numerical bounds")
            self._show(terminalreporter, SHOWN)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Show what failed the run once more, as the last lines: the reasons of skipped tests come before."""
        over = sum(share > LIMIT for share, _ in self.shares.values())
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if over and reporter is not None:
            self._show(reporter, over)
            advice = "condition the comparison better, or widen it with a reason"
            reporter.line(f"the run fails: {over} above {LIMIT}: {advice}", red=True)

    def _show(self, reporter: pytest.TerminalReporter, count: int) -> None:
        for line, (share, test) in sorted(self.shares.items(), key=lambda one: -one[1][0])[:count]:
            name = test.rpartition("::")[2]
            reporter.line(f"{share:.3f} of its bound: {line}, {name}", red=share > LIMIT)
