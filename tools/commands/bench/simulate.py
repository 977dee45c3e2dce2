"""The benchmark of simulated runs."""

from __future__ import annotations

from tools.commands.bench.group import command
from tools.commands.bench.options import json_option, progress, quick_option, report, sections_option


@command.command(name="simulate")
@sections_option
@quick_option
@json_option
def simulate(sections: list[str], quick: bool, as_json: bool) -> None:
    """Simulated runs against real ones, the cost of planning a large run, and CPU time of the controller.

    `accuracy` runs real jobs of several processes and predicts each from the measurement of one. Figures are shown as
    they come. Ctrl-C ends it with those that there are, and names the missing sections.
    """
    from tools.bench.simulate import benchmark as bench

    with progress() as say:
        result = bench.run(sections, say, quick=quick)
    report(result, as_json, failed=False)
