"""The model card of an export: what was trained on what, how, and how good it was before and after."""

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from axlearn_like.run.metrics import read_rows
from experiments.start.plan import Start

_PACKAGES = ("axlearn-like", "jax", "flax", "optax")


def model_card(found: Start, run: Path, command: str) -> str:
    """Return README.md of the model that a finished run has made, with the metadata that the Hub reads.

    Args:
        found: what was trained.
        run: directory of the run.
        command: command that made it.
    """
    base = _metadata(found.base / "README.md")
    data = {name: base[name] for name in ("license", "license_name", "license_link", "language") if name in base}
    data |= {"base_model": base.get("base_model_name") or found.base.name, "library_name": "transformers"}
    data |= {"tags": ["axlearn-like"]}
    import yaml

    plan = {what: (value, why) for what, value, why in found.plan.entries}
    lines = [f"| {what} | {value} | {why} |" for what, (value, why) in plan.items()]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(data, sort_keys=True, allow_unicode=True)}---\n",
            f"# {found.base.name}, trained\n\n{found.about}.\n",
            "| held out | before | after |\n|---|---|---|",
            *(_scores(run) or ["| not evaluated | | |"]),
            "\n| setting | value | derived from |\n|---|---|---|",
            *(_public(line) for line in lines),
            f"\nMade by `{_public(command)}` with {versions}.\n",
        ]
    )


def _public(line: str) -> str:
    """Return a text in one line, with the names of files in place of their paths, which a card does not tell."""
    return re.sub(r"(?<![\w:/.])/(?:[^/\s()|`]+/)+", "", re.sub(r"\s+", " ", line))


def _metadata(card: Path) -> dict[str, Any]:
    """Return the fields in front of a card's text; {} where it has none that can be read."""
    import yaml

    try:
        text = card.read_text(encoding="utf-8")
        found = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _scores(run: Path) -> list[str]:
    """Return rows of the table of held-out scores: those of RL with 95 % intervals, or the losses of evaluations."""
    both = [run / f"eval_{when}.json" for when in ("before", "after")]
    if all(path.is_file() for path in both):
        before, after = (json.loads(path.read_text()) for path in both)
        names = [name for name in after if f"{name}_ci" in after]
        rows = [
            f"| {name} of {after['problems']} prompts | {_share(before, name)} | {_share(after, name)} |"
            for name in names
        ]
        terms = after.get("terms", {})
        return rows + [f"| mean {name} | {before['terms'][name]:.4g} | {terms[name]:.4g} |" for name in terms]
    before = [row for row in read_rows(run / "events.jsonl") if row.get("event") == "evaluated_before"]
    rows = [row for row in read_rows(run / "metrics.jsonl") if "eval_loss" in row]
    first, last = (before[0], rows[-1]) if before and rows else ({}, {})
    names = {"eval_loss": "loss", "eval_accuracy": "accuracy of a token", "eval_exact": "greedy exact match"}
    return [f"| {text} | {first[name]:.4f} | {last[name]:.4f} |" for name, text in names.items() if name in first]


def _share(summary: dict[str, Any], name: str) -> str:
    low, high = summary[f"{name}_ci"]
    return f"{summary[name]:.1%} (95 % interval {low:.1%} to {high:.1%})"
