"""A table of sample answers before and after RL.

The table has the first problems of each family in file order: they are not selected, so it shows
failures as well.
"""

from html import escape

from tools.report.load import Row, Run, number
from tools.report.words import plain

PER_FAMILY = 3
_MOST_LETTERS = 700

Samples = dict[tuple[str, str], list[Row]]


def samples(run: Run) -> str:
    """Return the table as markup, or an empty string if there are no rollouts on disk."""
    before, after = _by_question(run, "eval_before"), _by_question(run, "eval_after")
    if before or after:
        heads = ("Before RL", "After RL")
    else:
        before, after = {}, _by_question(run, "rl", latest=True)
        heads = ("", "During RL, latest step")
    if not before and not after:
        return ""
    body = []
    for family in run.families:
        questions = [key for key in (before or after) if key[0] == family]
        # Only questions with both answers, if there are any, in the order of the file.
        shared = [key for key in questions if key in after] or questions
        if shared:
            body.append(f'<tr class="family"><td colspan="4">{escape(family)}</td></tr>')
        body += [_row(key, before, after, heads) for key in shared[:PER_FAMILY]]
    columns = [name for name in ("Question", "Expected", *heads) if name]
    head = "".join(f"<th>{name}</th>" for name in columns)
    return (
        f'<p class="lead">The first {PER_FAMILY} problems of each family in the order of the '
        "file, not chosen. Each cell shows the first sample, and how many of all samples got full "
        "reward.</p>"
        f'<div class="card"><table class="samples stack"><thead><tr>{head}</tr></thead><tbody>'
        f"{''.join(body)}</tbody></table></div>"
    )


def _by_question(run: Run, phase: str, latest: bool = False) -> Samples:
    rows = [row for row in run.rollouts if row.get("phase") == phase and row.get("question") is not None]
    if latest and rows:
        last = max(number(row.get("step")) or 0.0 for row in rows)
        rows = [row for row in rows if (number(row.get("step")) or 0.0) == last]
    found: Samples = {}
    for row in rows:
        found.setdefault((str(row.get("family")), str(row["question"])), []).append(row)
    return found


def _row(key: tuple[str, str], before: Samples, after: Samples, heads: tuple[str, str]) -> str:
    any_row = (before.get(key) or after.get(key) or [{}])[0]
    cells = [("Question", _words(key[1])), ("Expected", _words(any_row.get("expected")))]
    cells += [(head, _answer(part.get(key))) for head, part in zip(heads, (before, after), strict=True) if head]
    return "<tr>" + "".join(f'<td data-name="{name}">{cell}</td>' for name, cell in cells) + "</tr>"


def _words(value: object) -> str:
    words = "" if value is None else str(value)
    if len(words) > _MOST_LETTERS:
        more = len(words) - _MOST_LETTERS
        words = f"{words[:_MOST_LETTERS]}\n\N{HORIZONTAL ELLIPSIS} ({more} more letters)"
    return f"<pre>{escape(words)}</pre>" if words.strip() else '<span class="none">(empty)</span>'


def _answer(rows: list[Row] | None) -> str:
    if not rows:
        return '<span class="none">no sample on disk</span>'
    reward = number(rows[0].get("reward"))
    right = sum((number(row.get("reward")) or 0.0) >= 1.0 for row in rows)
    style = "chip ok" if reward is not None and reward >= 1.0 else "chip"
    chips = f'<span class="{style}">reward {plain(reward)}</span>'
    if len(rows) > 1:
        chips += f' <span class="chip">{right} of {len(rows)} right</span>'
    if rows[0].get("finish_reason") == "length":
        chips += ' <span class="chip">cut at the limit</span>'
    return _words(rows[0].get("answer")) + chips
