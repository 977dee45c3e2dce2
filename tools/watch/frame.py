"""One frame of `axl watch`: phases, figures, alarms and the newest answers of a run, for a terminal of any width."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from axlearn_like.run.progress import one_line
from tools.report.cards import STYLES
from tools.report.charts import thin
from tools.report.load import Points, Row, Run, left_out, number
from tools.report.programs import latest, spent
from tools.report.table import policy_sheet
from tools.report.words import MISSING, duration, label, percent, plain
from tools.watch.standing import Standing, standing

_RECENT = 20  # updates
_COMPILES = 2  # first updates of a phase, which say nothing of its pace
_WINDOW = 60.0  # seconds of the log in which tokens of roles are counted
_BARS = "▁▂▃▄▅▆▇█"
_ANSWERS = ("eval_after", "rl", "eval_before")  # the first of these that there are
_SUPERVISED = ("loss", "accuracy", "eval_loss", "mfu")


def frame(run: Run, now: float | None = None, answers: int = 4) -> RenderableType:
    """Return the frame of what is known so far; `now`: unix time, `answers`: how many are shown at most."""
    now = time.time() if now is None else now
    stands = standing(run, now)
    parts: list[RenderableType] = [_head(run, stands, now)]
    if phases := _phases(run, stands):
        parts.append(phases)
    if run.policies:
        parts.append(left_out("policies", lambda: policy_sheet(run).terminal(60), Text(), run.notes))
    table = Table.grid("", Column(overflow="fold"), padding=(0, 2))
    for name, value in left_out("figures", lambda: list(_figures(run, stands)), [], run.notes):
        table.add_row(name, value)
    newest = left_out("answers", lambda: _answers(run, answers), [], run.notes)
    return Group(*parts, table, *newest, *(Text(f"note: {note}", style="yellow") for note in run.notes))


def line(run: Run, now: float | None = None) -> str:
    """Return the frame's gist as one line, for a log or a terminal without control."""
    now = time.time() if now is None else now
    stands = standing(run, now)
    if run.policies:
        count = f"{len(run.policies)} polic{'y' if len(run.policies) == 1 else 'ies'}"
        return "\n  ".join((f"{run.name}: {stands.words}, {count}", *(line(policy, now) for policy in run.policies)))
    words = [f"{run.name}: {stands.words}", f"{stands.phase} step {stands.progress}" if stands.progress else ""]
    words += [f"{name} {plain(value)}" for name in ("reward", "loss") if (value := stands.row.get(name)) is not None]
    figures = left_out("figures", lambda: list(_figures(run, stands)), [], run.notes)
    words += [f"{name} {value.plain}" for name, value in figures if name in ("pass@1", "tokens/s", "age")]
    return one_line(", ".join(filter(None, [*words, _left(run, stands, now), stands.why])), 500)


def spark(values: Points, width: int = 32) -> str:
    """Return a curve of one line of text, thinned to `width` points."""
    heights = [y for _, y in thin(values, width)]
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    return "".join(_BARS[round((y - low) / (high - low or 1.0) * (len(_BARS) - 1))] for y in heights)


def recent(values: Points) -> float | None:
    """Return the mean of the last values; None without any."""
    last = [y for _, y in values[-_RECENT:]]
    return sum(last) / len(last) if last else None


def _head(run: Run, stands: Standing, now: float) -> Text:
    head = Text(one_line(run.name, 60), style="bold")
    head.append(f"  {stands.words}", style=STYLES.get(stands.state, ""))
    started = f"since {duration(now - run.start)}" if stands.state == "running" and run.start else ""
    rest = [started, f"{stands.phase} step {stands.progress}" if stands.progress else "", _left(run, stands, now)]
    age = stands.age(now)
    seen = f"last sign of life {duration(age)} ago" if age is not None and stands.state != "finished" else ""
    head.append("".join(f"  {part}" for part in (*rest, stands.why, seen) if part))
    return head


def _left(run: Run, stands: Standing, now: float) -> str:
    """Return the time that the phase has left at the pace of its last updates; empty where that is unknown."""
    rows = [(number(row.get("time")), float(row["step"])) for row in run.rows(stands.phase)[_COMPILES:][-_RECENT:]]
    times = [(when, step) for when, step in rows if when is not None]
    if stands.state != "running" or stands.total is None or len(times) < 2 or times[-1][1] <= times[0][1]:
        return ""
    pace = (times[-1][0] - times[0][0]) / (times[-1][1] - times[0][1])
    left = max(0.0, pace * (stands.total - times[-1][1]) - max(0.0, now - times[-1][0]))
    return f"ETA {duration(left)}" if times[-1][1] < stands.total else ""


def _phases(run: Run, stands: Standing) -> Text | None:
    """Return the phases of an RL run with their seconds, the one under way last."""
    spent: defaultdict[str, float] = defaultdict(float)
    for row in run.events:
        if row.get("event") == "phase" and "phase" in row:
            spent[row["phase"]] += number(row.get("seconds")) or 0.0
    words = [f"{label(name)} {duration(seconds)}" for name, seconds in spent.items()]
    if stands.state == "running" and stands.phase and run.events and run.events[-1].get("event") != "phase":
        words.append(f"{label(stands.phase)} now")
    return Text("  >  ".join(words), style="dim") if spent else None


def _figures(run: Run, stands: Standing) -> Iterator[tuple[str, Text]]:
    if (reward := run.series("rl", "reward")) and (mean := recent(reward)) is not None:
        yield "reward", Text(f"{mean:.3f} in the last {len(reward[-_RECENT:])} updates  {spark(reward)}")
    scores = [r for r in run.events if r.get("event") == "evaluated" and number(r.get("pass@1")) is not None]
    if scores:
        yield "pass@1", Text(", ".join(f"{percent(r['pass@1'])} % at {plain(r.get('version'))}" for r in scores[-6:]))
    for phase in () if run.rows("rl") else dict.fromkeys(str(row.get("phase")) for row in run.metrics):
        for name in _SUPERVISED:
            if values := run.series(phase, name):
                yield name, Text(f"{values[-1][1]:.4g}  {spark(values)}")
    if speeds := _speeds(run, stands):
        yield "tokens/s", Text(one_line(", ".join(f"{role} {speed:,.0f}" for role, speed in speeds.items()), 300))
    if age := run.series("rl", "staleness_mean"):
        most = run.series("rl", "staleness_max")
        words = f"{plain(recent(age))} versions in the mean, at most {plain(max((y for _, y in most), default=None))}"
        yield "age", Text(words)
    if lanes := latest(run)[1]:
        yield "program", Text(one_line(spent(lanes), 300))
    for text in _alarms(run, stands):
        yield "alarm", Text(text, style="red")
    for kill in run.outages[-3:]:
        back = MISSING if kill.back is None else f"back after {duration(kill.back - kill.killed)}"
        yield "died", Text(f"{kill.target}, {back}")


def _speeds(run: Run, stands: Standing) -> dict[str, float]:
    """Return the tokens a second of each role: drawn by workers in the last minute, learned by the trainer."""
    rows = [row for row in run.rows("rl")[-_RECENT:] if number(row.get("time")) is not None]
    learned = number(stands.row.get("tokens_per_second")) if stands.row.get("phase") == stands.phase != "rl" else None
    found = {} if learned is None else {"trainer": learned}
    if len(rows) > 1 and (seconds := rows[-1]["time"] - rows[0]["time"]) > 0:
        found["trainer"] = sum(number(row.get("train_tokens")) or 0.0 for row in rows[1:]) / seconds
    drawn: defaultdict[str, float] = defaultdict(float)
    until = run.events[-1]["time"] if run.events else 0.0
    since = max(until - _WINDOW, run.start)
    for row in reversed(run.events):
        if row["time"] < since:
            break
        if row.get("event") in ("generate", "evaluate"):
            drawn[str(row.get("role"))] += number(row.get("tokens")) or 0.0
    return found | {role: tokens / max(until - since, 1.0) for role, tokens in sorted(drawn.items())}


def _alarms(run: Run, stands: Standing) -> list[str]:
    """Return the last word on each alarm that is on, the newest last; none of a run that has ended.

    Those of updates that the run does not have, as it went on from an earlier checkpoint, are left out.
    """
    last, made = dict[str, str](), max((float(row["step"]) for row in run.rows("rl")[-1:]), default=0.0)
    if stands.state not in ("running", "silent"):
        return []
    for row in run.events:
        if row.get("event") == "alarm":
            text = str(row.get("text"))
            name = " ".join(text.split()[:2])
            last.pop(name, None)
            if " is over at " not in text and (number(row.get("step")) or 0.0) <= made:
                last[name] = one_line(text, 200).removeprefix("alarm ")
    return list(last.values())


def _answers(run: Run, most: int) -> list[Text]:
    rows: Sequence[Row] = ()
    for phase in _ANSWERS:
        if rows := [row for row in run.rollouts if row.get("phase") == phase]:
            break
    shown = [Text(f"newest answers ({label(rows[-1]['phase'])})", style="bold")] if rows else []
    for row in rows[-most:]:
        reward = number(row.get("reward"))
        style = "green" if reward is not None and reward >= 1.0 else "red" if not reward else "yellow"
        text = Text(f"  {plain(row.get('step'))}: ").append(f"reward {plain(reward)}", style=style)
        asked = one_line(row.get("question", ""), 100)
        shown.append(text.append(f"  {asked} → ", style="dim").append(one_line(row.get("answer", ""), 200)))
    return shown
