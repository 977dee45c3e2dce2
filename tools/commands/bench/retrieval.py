"""The benchmark of retrieval for many tenants."""

from __future__ import annotations

import click

from tools.commands.bench.group import command
from tools.commands.bench.options import json_option, names_in, progress, quick_option, report, sections_option


@command.command(name="retrieval")
@sections_option
@click.option("--peers", default="", metavar="NAMES", help="faiss, in an environment that is made for it.")
@quick_option
@json_option
def retrieval(sections: list[str], peers: str, quick: bool, as_json: bool) -> None:
    """Retrieval for many tenants: microseconds, recall and memory, beside faiss; results that a tenant may not see."""
    from tools.bench.retrieval import benchmark as bench

    with progress() as say:
        result = bench.run(sections, say, names_in(peers), quick=quick)
    report(result, as_json, failed=bool(result.get("foreign_results") or result.get("errors")))
