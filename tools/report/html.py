"""The HTML page: sections in reading order, from the headline to the config."""

import time
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path

from tools.report import invariants, programs, sections, timeline
from tools.report.charts import FULL, Curve, curves
from tools.report.headline import dumbbells, headline
from tools.report.load import Run, left_out, mapping, number
from tools.report.samples import samples
from tools.report.table import kill_sheet, policy_sheet, score_sheet
from tools.report.words import duration, score_keys

# The page's style sheet and the widths of bars, and nothing else: no script, picture, frame, form or address.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = Path(__file__).with_name("style.css")


def render(run: Run, stands: str = "") -> str:
    """Return the whole page, self-contained: it has no script and fetches nothing, which its policy says too.

    `stands`: how the run stands, beside its date.
    """

    def drawn(heading: str, *made: Callable[[Run], str]) -> str:
        return "".join(left_out(heading, partial(make, run), "", run.notes) for make in made)

    shown = _OF_SEVERAL if run.policies else _SECTIONS
    body = "".join(
        f'<section id="{key}"><h2>{heading}</h2>{drawn(heading, *made) or _nothing(run)}</section>'
        for key, heading, *made in shown
    )
    top, meta = (
        "" if run.policies else drawn("The first card", headline),
        left_out("Time", lambda: _meta(run), "", run.notes),
    )
    links = "".join(f'<a href="#{key}">{heading}</a>' for key, heading, *_ in shown)
    notes = "".join(f"<p>{escape(note)}</p>" for note in run.notes)
    below = (
        f"{notes}<p>Read from {escape(run.path.resolve().name)}/ (metrics.jsonl, events.jsonl, "
        "report.json, rollouts/). Point at a curve or a bar for its values.</p>"
    )
    meta = " · ".join(filter(None, (stands, meta)))
    return page(run.name, "run report", meta, f"{top}<nav>{links}</nav>{body}<footer>{below}</footer>")


def page(name: str, kind: str, meta: str, body: str) -> str:
    """Return a page in the report's style; `body` is markup, the rest is text."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}: {kind}</title><style>{_style()}</style></head><body><main>"
        f'<header class="top"><h1>{escape(name)}</h1><p class="meta">{escape(meta)}</p></header>'
        f"{body}</main></body></html>\n"
    )


def _style() -> str:
    lines = STYLE.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines)


def _meta(run: Run) -> str:
    parts = []
    if run.report.get("seed") is not None:
        parts.append(f"seed {run.report['seed']}")
    if run.start:
        parts.append(time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime(run.start)))
    total = number(run.report.get("seconds"))
    if total is not None:
        parts.append(duration(total))
    return " · ".join(parts)


def _nothing(run: Run) -> str:
    why = "nothing was logged for this." if run.finished else "nothing logged for this yet."
    return f'<p class="card none">Empty: {why}</p>'


def _tasks(run: Run) -> str:
    keys = score_keys(run)
    if not keys:
        return ""
    return (
        '<p class="lead">Held-out problems that training never saw, answered before and after '
        "RL, in per cent with 95&nbsp;% confidence intervals.</p>"
        f'<div class="grid2">{"".join(dumbbells(run, key) for key in keys)}</div>{score_sheet(run).card()}'
    )


def _kills(run: Run) -> str:
    return kill_sheet(run).card()


def _policies(run: Run) -> str:
    drawn = ((policy.path.name, policy.series("rl", "reward")) for policy in run.policies)
    lines = [Curve(name, values, f"c{n % 8 + 1}") for n, (name, values) in enumerate(drawn)]
    says = (
        "Dots are single updates, lines moving means. Each policy has a report of its own: policies/NAME/report.html."
    )
    chart = curves(run, "Reward of each policy", says, lines, y_label="reward", size=FULL, events=False)
    return policy_sheet(run).card() + chart


def _config(run: Run) -> str:
    versions = mapping(run.report.get("versions"))
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(version))}</td></tr>" for name, version in versions.items()
    )
    parts = ""
    if rows:
        parts += _folded(f"Versions ({len(versions)} packages)", f"<table>{rows}</table>")
    if run.config:
        lines = len(run.config.splitlines())
        parts += _folded(f"Config ({lines} lines)", f'<pre class="code">{escape(run.config)}</pre>')
    return parts


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


_SECTIONS: tuple[tuple[str, str, *tuple[Callable[[Run], str], ...]], ...] = (
    ("tasks", "Tasks solved", _tasks),
    ("reward", "Reward during RL", sections.reward),
    ("sft", "Supervised fine-tuning", sections.sft),
    ("timeline", "Who did what when", timeline.overview, programs.timeline, _kills, invariants.section),
    ("offpolicy", "Off-policy by how much", sections.off_policy),
    ("speed", "Speed", sections.speed),
    ("health", "Health of the policy", sections.health),
    ("samples", "Answers one can read", samples),
    ("config", "Versions and config", _config),
)
# A run of several policies, each of which has a page of its own.
_OF_SEVERAL: tuple[tuple[str, str, *tuple[Callable[[Run], str], ...]], ...] = (
    ("policies", "Policies", _policies),
    ("timeline", "Who did what when", timeline.overview, _kills),
    ("config", "Versions and config", _config),
)
