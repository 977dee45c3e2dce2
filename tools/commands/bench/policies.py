"""Benchmarks of many policies on one fleet, of episodes, and of tiers of the KV cache."""

from __future__ import annotations

from tools.commands.bench.group import command
from tools.commands.bench.options import json_option, progress, quick_option, report, sections_option


@command.command(name="policies")
@sections_option
@quick_option
@json_option
def policies(sections: list[str], quick: bool, as_json: bool) -> None:
    """Many policies on one fleet: RL beside each alone, and a service's slots, first tokens and fairness.

    Figures are shown as they come. Ctrl-C ends it with those that there are, and names the missing sections.
    """
    from tools.bench.policies import benchmark as bench

    with progress() as say:
        result = bench.run(sections, say, quick=quick)
    report(result, as_json, failed=False)


@command.command(name="episodes")
@sections_option
@quick_option
@json_option
def episodes(sections: list[str], quick: bool, as_json: bool) -> None:
    """Episodes with tools, tools that start while they are called, and plans that are answered in parallel.

    Figures are shown as they come. Ctrl-C ends it with those that there are, and names the missing sections.
    """
    from tools.bench.episodes import benchmark as bench

    with progress() as say:
        result = bench.run(sections, say, quick=quick)
    report(result, as_json, failed=False)


@command.command(name="tiers")
@sections_option
@quick_option
@json_option
def tiers(sections: list[str], quick: bool, as_json: bool) -> None:
    """Pages of a KV cache on the host against computing again, requests that move, and codecs of tensors.

    Figures are shown as they come. Ctrl-C ends it with those that there are, and names the missing sections.
    """
    from tools.bench.tiers import benchmark as bench

    with progress() as say:
        result = bench.run(sections, say, quick=quick)
    report(result, as_json, failed=False)
