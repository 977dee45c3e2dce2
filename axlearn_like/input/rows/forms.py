"""The form of rows, found by looking at the first ones: which column is the question, the answer, the messages.

The names are those of TRL, verl, verifiers, OpenAI's fine-tuning, ShareGPT and Alpaca; docs/how-to/bring-your-data.md
has the table, with sources. Columns that have no part are left.
"""

import dataclasses
import itertools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from axlearn_like.input.encoding import field_of, find_field
from axlearn_like.input.rows.messages import is_conversation, read_messages
from axlearn_like.input.rows.tables import find_tables, read_rows
from axlearn_like.input.source import InputError
from mesh.errors import did_you_mean, nearest

Job = Literal["rl", "sft", "pairs"]
Rows = Sequence[tuple[Mapping[str, Any], str]]
LOOKED_AT = 16  # rows

# Columns of each part; the first that is there and holds what the part is.
_NAMES: dict[str, tuple[str, ...]] = {
    "system": ("system",),
    "prompt": ("input.messages", "prompt", "question", "problem", "instruction", "query", "input"),
    "messages": ("messages", "conversations", "conversation"),
    "completion": ("completion", "response", "output"),
    "answer": ("answer", "reward_model.ground_truth", "ground_truth", "solution"),
    "chosen": ("chosen", "preferred_output"),
    "rejected": ("rejected", "non_preferred_output"),
    "text": ("text",),
    "tools": ("tools", "input.tools"),
}
_SAID = ("text", "messages")
# Kinds of the values of parts that are not said.
_KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "answer": ("text", "number"),
    "tools": ("list", "text"),
    "system": ("text",),
    "text": ("text",),
}
_NEEDS: dict[Job, str] = {
    "rl": f"a question ({', '.join(_NAMES['prompt'][1:])} or messages) and an answer ({', '.join(_NAMES['answer'])})",
    "sft": f"messages, a text, or a question with {', '.join((*_NAMES['completion'], *_NAMES['answer'][:1]))}",
    "pairs": "chosen and rejected, with a prompt, or both whole",
}
_WANTED: dict[Job, tuple[str, ...]] = {
    "rl": ("prompt", "messages"),
    "sft": ("messages", "completion", "prompt", "text"),
    "pairs": ("chosen", "rejected"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowForm:
    """The column of each part of a row, as `field_of` and `text_of` take its name; None: the rows have no such part."""

    prompt: str | None = None  # question: a text, or messages
    messages: str | None = None  # conversation; its last turn may be the answer
    completion: str | None = None  # answer that is learned: a text, or messages
    answer: str | None = None  # reference: a text or a number
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = None
    system: str | None = None
    tools: str | None = None
    asks: bool = False  # the prompt is a list of messages
    answered: bool = False  # the last of `messages` is the assistant's
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)  # kinds of the values of all columns
    left: tuple[str, ...] = ()  # columns without a part

    @property
    def parts(self) -> dict[str, str]:
        """The column of each part that the rows have."""
        return {part: column for part in _NAMES if (column := getattr(self, part)) is not None}

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Jobs that can read the rows."""
        answer = self.completion or (None if self.kinds.get(self.answer or "") == "number" else self.answer)
        found: dict[Job, bool] = {
            "pairs": self.chosen is not None and self.rejected is not None,
            "sft": bool(self.answered or self.text or (self.prompt and answer)),
            "rl": self.prompt is not None or self.messages is not None,
        }
        return tuple(job for job, fits in found.items() if fits)

    def require(self, job: Job, where: str, *, reference: bool = False) -> None:
        """Refuse rows that a job cannot read.

        Args:
            reference: RL needs an answer, too.

        Raises:
            InputError: shows the columns, what the job needs, and the nearest that can be named.
        """
        lacking = reference and self.answer is None and self.completion is None and not self.answered
        if job in self.jobs and not lacking:
            return
        wanted = ("answer",) if job in self.jobs else _WANTED[job]
        others = [other for other in self.jobs if other != job]
        other = f"; {' and '.join(others)} can read them" if others else ""
        shown = ", ".join(f"{name} ({kind})" for name, kind in self.kinds.items())
        raise InputError(f"{where}: {job} needs {_NEEDS[job]}; the columns are {shown}{other}{self._nearest(wanted)}")

    def _nearest(self, wanted: Sequence[str]) -> str:
        for part in wanted:
            fitting = [name for name in self.left if self.kinds[name] in _KINDS.get(part, _SAID)]
            for known in _NAMES[part] if getattr(self, part) is None else ():
                if near := nearest(known, fitting, n=1):
                    return f"; did you mean {part}={near[0]!r}?"
        texts = [name for name in self.left if self.kinds[name] == "text"]
        return f"; name the columns, such as {wanted[0]}={texts[0]!r}" if texts else ""


def find_form(files: str | tuple[str, ...], split: str = "train", **named: str) -> RowForm:
    """Return the form of the rows of files, from the first ones; see `form_of`."""
    rows = first_rows(files, split)
    return form_of(rows, **named)


def first_rows(files: str | tuple[str, ...], split: str = "train", count: int = LOOKED_AT) -> Rows:
    """Return the first rows of files, with their locations (InputError: there are none, or a file cannot be read)."""
    paths = find_tables(files, split)
    rows = list(itertools.islice(itertools.chain.from_iterable(map(read_rows, paths)), count))
    if not rows:
        raise InputError(f"{paths[0]} has no rows")
    return rows


def form_of(rows: Rows, **named: str) -> RowForm:
    """Return the form of rows with their locations.

    Args:
        rows: the first rows, at least one.
        named: columns of parts that the user names, such as `prompt="body"`.

    Raises:
        InputError: no such part, or no such column; with the nearest names.
    """
    for part in named:
        if part not in _NAMES:
            raise InputError(f"rows have no part {part!r}{did_you_mean(part, _NAMES, limit=len(_NAMES))}")
    first, where = rows[0]
    for column in named.values():
        for one in [column] if column in first else column.split("+"):
            field_of(first, one, where)
    columns = dict.fromkeys(itertools.chain.from_iterable(row for row, _ in rows))
    kinds = {name: _kind(rows, name) for name in columns}
    parts = {
        part: named.get(part) or next((name for name in names if _kind(rows, name) in _KINDS.get(part, _SAID)), None)
        for part, names in _NAMES.items()
    }
    if parts["prompt"] == "instruction" and kinds.get("input") == "text":
        parts["prompt"] = "instruction+input"
    if parts["prompt"] is None and parts["chosen"] and parts["messages"] and "prompt" not in named:
        parts["prompt"], parts["messages"] = parts["messages"], None  # ShareGPT's pairs: a conversation, two answers
    used = {name for column in parts.values() if column for name in (column, *column.split("+"), column.split(".")[0])}
    said = [message for row, _ in rows for message in _messages(row, parts["messages"])[-1:]]
    return RowForm(
        **parts,
        asks=parts["prompt"] is not None and _kind(rows, parts["prompt"]) == "messages",
        answered=bool(said) and all(message["role"] == "assistant" for message in said),
        kinds=kinds,
        left=tuple(name for name in columns if name not in used),
    )


def _messages(row: Mapping[str, Any], name: str | None) -> list[dict[str, Any]]:
    value = None if name is None else find_field(row, name)
    return [] if value is None else read_messages(value, f"field {name!r}")


def _kind(rows: Rows, name: str) -> str:
    """Return the kind of the first value of a field that is not null."""
    names = [name] if name in rows[0][0] else name.split("+")
    value = next((value for row, _ in rows if (value := find_field(row, names[0])) is not None), None)
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, numbers.Number):
        return "number"
    if value and is_conversation(value):
        return "messages"
    if isinstance(value, list):
        return "list"
    return "empty" if value is None else "object" if isinstance(value, Mapping) else type(value).__name__
