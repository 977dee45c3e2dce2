"""Tables of a run for the terminal and the page: scores before and after, kills; and its figures for the terminal."""

from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from axlearn_like.operations.goodput import CAUSES, Account, account, account_lines
from tools.report.cards import Sheet, bars
from tools.report.load import Row, Run, left_out, mapping, number
from tools.report.words import (
    MISSING,
    alarms,
    duration,
    interval,
    label,
    mean_max,
    percent,
    plain,
    points,
    score_keys,
    scores,
    throughput,
)

_STOPPED = ", stopped"
_RECENT = 20  # updates


def print_tables(run: Run, console: Console | None = None) -> None:
    """Print the tables of a run; parts that are not there yet are left out."""
    out = console or Console()
    for part in tables(run):
        out.print(part, "")


def tables(run: Run) -> list[RenderableType]:
    """Return the tables of a run, ready for ``rich``; each fits 80 columns."""
    made: dict[str, Callable[[], RenderableType | None]] = {
        "Scores": lambda: score_sheet(run).terminal() if score_keys(run) else Text(_progress(run)),
        "Figures of the run": lambda: Sheet("", ("run", "value"), list(_figures(run)), numeric=(1,)).terminal(),
        "Kills": lambda: kill_sheet(run).terminal() if run.kills else None,
        "Goodput": lambda: Text(told) if (told := goodput_text(run)) else None,
    }
    if run.policies:
        made = {"Policies": lambda: policy_sheet(run).terminal(), "Kills": made["Kills"]}
    drawn = (left_out(name, make, None, run.notes) for name, make in made.items())
    parts = [part for part in drawn if part is not None]
    parts += [Text(f"note: {note}", style="yellow") for note in run.notes]
    return parts


def score_sheet(run: Run) -> Sheet:
    """Return the table of pass@k (with 95 % confidence intervals) and maj@k in per cent, the mean first."""
    rows = [
        (
            f"  {name}" if index else f"{key}  mean",
            plain((after or before).get("problems")),
            *(_score(part, key) for part in (before, after)),
            points(before.get(key), after.get(key)),
        )
        for key in score_keys(run)
        for index, (name, before, after) in enumerate(scores(run, key))
    ]
    heads = ("task family", "of", "before RL", "after RL", "points")
    return Sheet(f"{run.name}: held-out problems solved, % (95 % CI)", heads, rows, numeric=range(1, 5))


def policy_sheet(run: Run) -> Sheet:
    """Return a table of the policies of a run that trains several: updates, reward, held-out problems, tokens."""
    ended = _ended(run)
    rows = []
    for policy in run.policies:
        reward = [value for _, value in policy.series("rl", "reward")]
        mean = sum(reward[-_RECENT:]) / len(reward[-_RECENT:]) if reward else None
        scores = [r for r in policy.events if r.get("event") == "evaluated" and number(r.get("pass@1")) is not None]
        ends = [f"{percent(r['pass@1'])} %" for r in (scores[:1] + scores[1:][-1:])]
        tokens = sum(value for _, value in policy.series("rl", "gen_tokens"))
        updates = str(len(policy.rows("rl")))
        rows.append(
            (
                policy.path.name,
                updates + ended.get(policy.path.name, ""),
                plain(reward[0] if reward else None),
                plain(mean),
                " → ".join(ends) or MISSING,
                f"{tokens:,.0f}",
            )
        )
    heads = ("policy", "updates", "first reward", "last", "pass@1", "tokens")
    title = f"{len(rows)} polic{'y' if len(rows) == 1 else 'ies'}, each a run in {run.path}/policies"
    return Sheet(title, heads, rows, numeric=(2, 3, 5))


def _ended(run: Run) -> dict[str, str]:
    """Return how policies have ended that were stopped, or have failed since they or the run were last begun."""
    found: dict[str, str] = {}
    for row in run.events:
        name, event = str(row.get("policy")), row.get("event")
        if event in ("policy_failed", "policy_stopped"):
            found[name] = _STOPPED if event == "policy_stopped" else f", failed: {row.get('why')}"
        elif event == "policy_admitted":
            found.pop(name, None)
        elif event == "session":
            found = {name: how for name, how in found.items() if how == _STOPPED}
    return found


def kill_sheet(run: Run) -> Sheet:
    """Return a table with one row per killed role: when, and the seconds to notice, to replace, and lost in all."""
    times = ("detected_s", "replaced_s", "lost_s")
    rows = [
        (str(kill.get("target")), plain(kill.get("step")), *(duration(kill.get(key)) for key in times))
        for kill in run.kills
    ]
    heads = ("killed", "at RL step", "noticed after", "replaced after", "run lost")
    return Sheet("Kills", heads, rows, numeric=range(1, 5))


def _progress(run: Run) -> str:
    logged = [f"{phase.upper()} step {rows[-1]['step']}" for phase in ("sft", "rl") if (rows := run.rows(phase))]
    return f"{run.name}: no evaluation yet; logged so far: {', '.join(logged) or 'nothing'}"


def _score(row: Row, key: str) -> str:
    return f"{percent(row.get(key))}  {interval(row.get(f'{key}_ci'))}".rstrip()


def _figures(run: Run) -> Iterator[tuple[str, str]]:
    """Yield speed, staleness, trainer-sampler difference, alarms and seconds by phase, as name and value."""
    yield from throughput(run)
    for name, words in (
        ("staleness", "Staleness, versions (mean, max)"),
        ("logprob_diff", "Trainer-sampler log-prob difference (mean, max)"),
        ("scoring_diff", "The same, scored in the sampler's order (mean, max)"),
    ):
        mean, high = mean_max(run, name)
        if mean is not None or high is not None:
            yield words, f"{plain(mean)}, {plain(high)}"
    for name, value in alarms(run):
        yield f"Alarm: {name}", value
    for key, value in {"total": run.report.get("seconds"), **mapping(run.report.get("phase_seconds"))}.items():
        yield label(key), duration(value)


def _account(run: Run) -> Account:
    return account(row for row in run.events if _sound(row))


def _sound(row: Row) -> bool:
    """Return whether a row is irrelevant to the time account, or has all fields of its kind."""
    wanted = {"train_begin": ("began", "step"), "goodput": ("since", "step")}.get(str(row.get("event")), ())
    causes = mapping(row.get("causes")).values()
    return all(number(value) is not None for value in (*(row.get(name) for name in wanted), *causes)) and (
        row.get("event") != "goodput" or bool(causes)
    )


def goodput_text(run: Run) -> str:
    """Return the terminal's table; empty if the run has no time account."""
    return "\n".join(account_lines(_account(run)))


def goodput_card(run: Run) -> str:
    """Return a card with a bar for each cause; empty if the run has no time account."""
    found = _account(run)
    if not found.total:
        return ""
    shares = found.shares()
    sizes = {CAUSES[cause]: (one, f"{duration(found.seconds[cause])}, {one:.1%}") for cause, one in shares.items()}
    plural = "es" if found.sessions != 1 else ""
    note = f"{duration(found.total)} in {found.sessions} process{plural}"
    return bars(f"Goodput {shares.get('step', 0.0):.1%}", note, sizes)
