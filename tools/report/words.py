"""Labels and number formats of the report, the same on the page and in the terminal."""

import re
from collections.abc import Iterator

from axlearn_like.config import recorded_values
from rl.audit.alarms import raised_alarms
from tools.report.load import Row, Run, mapping, number

MISSING = "\N{EN DASH}"
_LABELS = {
    "setup": "Setup",
    "sft": "Supervised fine-tuning",
    "eval_before": "Evaluation before RL",
    "rl": "Reinforcement learning",
    "eval_after": "Evaluation after RL",
    "total": "Total",
}


def label(key: str) -> str:
    """Turn a key such as ``gen_tokens_per_second`` into words: ``Generated tokens/s``."""
    if key in _LABELS:
        return _LABELS[key]
    known = {"gen": "generated", "train": "trained", "rl": "RL", "sft": "SFT", "cpu": "CPU"}
    words = [known.get(word, word) for word in re.split(r"[_\s]+", key) if word]
    text = re.sub(r" per (s|second)$", "/s", " ".join(words))
    return text[:1].upper() + text[1:]


def plain(value: object) -> str:
    """Format a number with three significant digits and no needless exponent; other values as they are."""
    amount = number(value)
    if amount is None:
        return MISSING if value is None else str(value)
    size = abs(amount)
    if size == 0:
        return "0"
    if size >= 1000:
        return f"{amount:,.0f}"
    if size < 1e-3:
        return f"{amount:.1e}".replace("e-0", "e-")
    return f"{amount:.3g}"


def percent(value: object) -> str:
    """Format a fraction as per cent with one decimal, without the sign: ``0.3625`` is ``36.2``."""
    amount = number(value)
    return MISSING if amount is None else f"{100 * amount:.1f}"


def interval(bounds: object) -> str:
    """Format a confidence interval of fractions in per cent: ``33.1-39.4`` with an en dash."""
    low, high = bounds_of(bounds)
    return "" if low is None or high is None else f"{percent(low)}\N{EN DASH}{percent(high)}"


def bounds_of(bounds: object) -> tuple[float | None, float | None]:
    """Return the two ends of an interval, or two Nones if it is not one."""
    if isinstance(bounds, list | tuple) and len(bounds) == 2:
        return number(bounds[0]), number(bounds[1])
    return None, None


def points(before: object, after: object) -> str:
    """Format the signed change from one fraction to another in percentage points."""
    first, second = number(before), number(after)
    if first is None or second is None:
        return MISSING
    return f"{100 * (second - first):+.1f}".replace("-", "\N{MINUS SIGN}")


def duration(value: object) -> str:
    """Format seconds as ``0.42 s``, ``17.3 s``, ``4 min 05 s`` or ``2 h 03 min``."""
    amount = number(value)
    if amount is None:
        return MISSING
    if amount < 99.95:
        return f"{amount:.2f} s" if amount < 9.995 else f"{amount:.1f} s"
    minutes, seconds = divmod(round(amount), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def score_keys(run: Run) -> list[str]:
    """Return the pass@k, then the maj@k, that the evaluations hold: ``["pass@1", "pass@8", "maj@8"]``."""
    found = {key for part in (run.before, run.after) for key in part if re.fullmatch(r"(pass|maj)@\d+", key)}
    return sorted(found, key=lambda key: (key.startswith("maj"), int(key.partition("@")[2])))


def scores(run: Run, key: str) -> Iterator[tuple[str, Row, Row]]:
    """Yield (name, before, after) for the mean over the families and then for each family."""
    befores, afters = mapping(run.before.get("families")), mapping(run.after.get("families"))
    families = [name for name in run.families if name in befores or name in afters]
    yield "Mean of families", run.before, run.after
    for name in families:
        yield name, mapping(befores.get(name)), mapping(afters.get(name))


def throughput(run: Run) -> list[tuple[str, str]]:
    """Return throughput figures with their units: the report's, else from the steps logged so far."""
    given = mapping(run.report.get("throughput"))
    if given:
        return [(label(key), plain(value)) for key, value in given.items()]
    rows = run.rows("rl")
    seconds = sum(number(row.get("step_seconds")) or 0.0 for row in rows)
    if not seconds:
        return []
    return [
        (
            label(f"{key}_per_second"),
            plain(sum(number(row.get(key)) or 0.0 for row in rows) / seconds),
        )
        for key in ("gen_tokens", "train_tokens")
    ]


def mean_max(run: Run, name: str) -> tuple[float | None, float | None]:
    """Return mean and maximum of ``staleness`` or ``logprob_diff``, by the report or the metrics."""
    given = mapping(run.report.get(name))
    if given:
        return number(given.get("mean")), number(given.get("max"))
    means = [value for _, value in run.series("rl", f"{name}_mean")]
    highs = [value for _, value in run.series("rl", f"{name}_max")]
    return (sum(means) / len(means) if means else None), max(highs, default=None)


def alarms(run: Run) -> list[tuple[str, str]]:
    """Return each alarm that was raised, and by which updates; from the report, else from the steps logged so far."""
    rows = [row for row in run.rows("rl") if "step" in row]
    given = mapping(run.report.get("alarms")) or raised_alarms(rows, recorded_values(run.config))
    raised = ((label(name), mapping(found)) for name, found in given.items())
    return [
        (name, f"{plain(found.get('count'))} updates, {plain(found.get('first'))} to {plain(found.get('last'))}")
        for name, found in raised
    ]


def lost_seconds(run: Run) -> float | None:
    """Return the seconds lost to kills in all; None if no kill reports any."""
    lost = [value for kill in run.kills if (value := number(kill.get("lost_s"))) is not None]
    return sum(lost) if lost else None
