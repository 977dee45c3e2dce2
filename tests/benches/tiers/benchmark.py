"""`axl bench tiers`: sections that can be measured one by one; an interruption leaves what is done."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mesh.programs.compilation import enable_compilation_cache
from tests.benches.tiers import codecs, episodes, link, moves
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.harness.sections import run_sections

SECTIONS = {"episodes": 120.0, "move": 60.0, "codecs": 600.0, "link": 120.0}


def _episodes(quick: bool, say: Say) -> dict[str, Any]:
    del say
    return episodes.measure(episodes.QUICK if quick else episodes.EpisodeJob())


def _move(quick: bool, say: Say) -> dict[str, Any]:
    del say
    return moves.measure(256 if quick else 8192, rounds=1 if quick else 3)


def _codecs(quick: bool, say: Say) -> dict[str, Any]:
    return codecs.measure(say, quick=quick)


def _link(quick: bool, say: Say) -> dict[str, Any]:
    return link.measure(say, quick=quick)


# A section returns its figures; the first argument asks for tiny jobs, which show that all runs.
_MEASURES: Mapping[str, Callable[[bool, Say], dict[str, Any]]] = {
    "episodes": _episodes,
    "move": _move,
    "codecs": _codecs,
    "link": _link,
}


def run(sections: Sequence[str], say: Say, *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of sections, and `missing`: those that Ctrl-C has left out."""
    enable_compilation_cache()
    where = machine()  # measured before our own load
    found, missing = run_sections({name: partial(_MEASURES[name], quick, say) for name in sections}, say)
    about = {"bench": "tiers", "missing": missing, "machine": where, **circumstances()}
    return about | {figure: value for figures in found.values() for figure, value in figures.items()}
