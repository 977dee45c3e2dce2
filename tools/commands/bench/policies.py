"""The benchmark of many policies on one fleet."""

from __future__ import annotations

import click

from tools.commands.bench.group import command
from tools.commands.bench.options import json_option, names_in, progress, quick_option, report


@command.command(name="policies")
@click.option("--sections", default="", metavar="NAMES", help="Parts to measure, as slots,fairness; default: all.")
@quick_option
@json_option
def policies(sections: str, quick: bool, as_json: bool) -> None:
    """Many policies on one fleet: RL beside each alone, and a service's slots, first tokens and fairness.

    Figures are shown as they come. Ctrl-C ends it with those that there are.
    """
    from tools.bench.policies import benchmark as bench

    with progress() as say:
        result = bench.run(names_in(sections), say, quick=quick)
    report(result, as_json, failed=result["interrupted"] is not None)
