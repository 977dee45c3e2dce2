"""The benchmark of `axl bisect`."""

from __future__ import annotations

from tools.commands.bench.group import command
from tools.commands.bench.options import json_option, progress, quick_option, report


@command.command(name="bisect")
@quick_option
@json_option
def bisect(quick: bool, as_json: bool) -> None:
    """Inject faults into one of two equal runs (an ulp, a reward, a token, a flag): which of them are located.

    Each is shown as it comes. Ctrl-C ends it with those that there are.
    """
    from tools.bench.recovery.injected_faults import benchmark as bench

    with progress() as say:
        result = bench.run(say, quick=quick)
    report(result, as_json, failed=result["located"] < result["faults"] or result["interrupted"] is not None)
