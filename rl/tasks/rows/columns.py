"""Columns of a table as a problem: which fields are the question, the answer and the id."""

import string
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input.chat import read_system, read_tools
from axlearn_like.input.encoding import field_of, text_of
from axlearn_like.input.rows.forms import RowForm
from axlearn_like.input.rows.messages import read_messages
from axlearn_like.input.source import InputError

Message = Mapping[str, Any]
_LAST = ".-1.content"  # field of the last of some messages


class Columns(Configurable):
    """Mapping of a row's fields. All other fields stay with the row, for the verifier.

    Names are as `field_of` takes them: `reward_model.ground_truth` is a field within a field. A prompt may be made of
    several, `instruction+input`, each on a line of its own.
    """

    class Config(ConfigBase["Columns"]):
        prompt: str | None = "prompt"  # column of the question's text
        messages: str | None = None  # column used instead: a list of {"role", "content"}, texts; images are not read
        template: str | None = None  # text used instead, with fields in braces, such as "{question}\nAnswer:"
        system: str | None = None  # a system message before the prompt; needs a tokenizer with a chat template
        system_from: str | None = None  # column of such a message; the rows without one have none
        tools: str | None = None  # column of tools that the chat template shows: JSON schemas of functions
        answer: str | None = "answer"  # column of the reference, a text or a number; None: no reference
        answer_after: str = ""  # mark whose last occurrence begins the scored text, in reference and answer; "": all
        final: Literal["text", "number"] = "text"  # compared value; "number": the final number, in any usual form
        id: str | None = None  # column of a text or number, different in all rows; None: the row's number

        @override
        def check_fields(self) -> None:
            ways = [name for name in ("messages", "template") if getattr(self, name) is not None]
            self.require("prompt", len(ways) < 2 and bool(ways or self.prompt), "one of prompt, messages, template")
            fits = self.system is None or (self.messages is None and self.system_from is None)
            self.require("system", fits, "None with messages, which hold their own, or with system_from")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def question(self, row: Mapping[str, Any], where: str) -> tuple[str, tuple[Message, ...] | None]:
        """Return the question as text, and as messages (None: as text only)."""
        cfg = self.cfg
        system = [{"role": "system", "content": cfg.system}] if cfg.system else read_system(row, cfg.system_from, where)
        if cfg.messages is not None:
            at = f"{where}, field {cfg.messages!r}"
            said = [*system, *read_messages(field_of(row, cfg.messages, where), at)]
            if said and said[-1]["role"] == "assistant" and cfg.answer == f"{cfg.messages}{_LAST}":
                said.pop()  # the reference
            if len(said) == len(system) or said[-1]["role"] == "assistant":
                why = "the last message is the assistant's" if len(said) > len(system) else "there is no message"
                advice = f"; answer='{cfg.messages}{_LAST}' makes it the reference" if len(said) > 1 else ""
                raise InputError(f"{at}: {why}: there is nothing to answer{advice}")
            return "\n\n".join(message.get("content", "") for message in said), tuple(said)
        if cfg.template is not None:
            text = _filled(cfg.template, row, where)
        else:
            text = _question(row, cfg.prompt or "", where)
        if not text.strip():
            raise InputError(f"{where}: the prompt is empty")
        return text, (*system, {"role": "user", "content": text}) if system else None

    def tools(self, row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...] | None:
        """Return the tools that the row's prompt shows; None: there are none."""
        found = read_tools(row, self.cfg.tools, where)
        return None if found is None else tuple(found)

    def answer(self, row: Mapping[str, Any], where: str) -> str:
        """Return the reference answer; "" if there is none."""
        if self.cfg.answer is None:
            return ""
        value = _reference(row, self.cfg.answer, where)
        text = value if isinstance(value, str) else _number_text(value)
        if text is None:
            got = f"{value!r:.60} ({type(value).__name__})"
            raise InputError(f"{where}: expected field {self.cfg.answer!r} to be text or a finite number, got {got}")
        return text

    def identity(self, row: Mapping[str, Any], number: int, where: str) -> str:
        """Return the id of a row."""
        if self.cfg.id is None:
            return str(number)
        value = field_of(row, self.cfg.id, where)
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise InputError(f"{where}: expected field {self.cfg.id!r} to be text or a whole number, got {value!r:.60}")
        return str(value)

    def final(self, text: str) -> str:
        """Return the part of an answer that is scored, as text."""
        return text.rpartition(self.cfg.answer_after)[2].strip() if self.cfg.answer_after else text.strip()


def _number_text(value: Any) -> str | None:
    """Return a number as people write it, with the digits that it needs at its own width; None: it is none."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | Decimal | np.integer | np.floating):
        return None
    number = Decimal(str(value))
    if not number.is_finite():
        return None
    return f"{number:f}" if -30 < number.adjusted() < 40 else str(value)


def _reference(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name.endswith(_LAST) and (said := read_messages(field_of(row, name.removesuffix(_LAST), where), where)):
        return said[-1].get("content")
    return field_of(row, name, where)


def _question(row: Mapping[str, Any], name: str, where: str) -> str:
    try:
        return text_of(row, name, where)
    except InputError as error:
        listed = isinstance(row.get(name), Sequence) and not isinstance(row[name], str | bytes)
        raise InputError(f"{error}; messages={name!r} reads a list of messages" if listed else str(error)) from None


class _Filler(string.Formatter):
    """A filler of templates whose fields are named as `field_of` takes them."""

    def __init__(self, where: str):
        self._where = where

    @override
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if "[" in field_name:
            return super().get_field(field_name, args, kwargs)
        return field_of(kwargs, field_name, f"{self._where}: template"), field_name


def _filled(template: str, row: Mapping[str, Any], where: str) -> str:
    try:
        return _Filler(where).vformat(template, (), row)
    except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
        raise InputError(f"{where}: template {template!r:.60} cannot be filled: {error}") from None


def form_columns(form: RowForm, where: str, *, reference: bool) -> Columns.Config:
    """Return which columns of rows of a form are the question and the answer of a task.

    The answer is a reference, else what the rows would have a policy learn.

    Args:
        where: file, for errors.
        reference: refuse rows that have neither; else the answer may be None, which needs a reward of the user's own.

    Raises:
        InputError: the rows have no question, or no answer.
    """
    form.require("rl", where, reference=reference)
    said: dict[str, Any] = {"system_from": form.system, "tools": form.tools}
    if form.prompt is None:
        answer = form.answer or (f"{form.messages}{_LAST}" if form.answered else None)
        return Columns.Config(prompt=None, messages=form.messages, answer=answer, **said)
    spoken = form.completion is not None and form.kinds.get(form.completion) == "messages"
    answer = form.answer or (f"{form.completion}{_LAST}" if spoken else form.completion)
    if form.asks:
        return Columns.Config(prompt=None, messages=form.prompt, answer=answer, **said)
    return Columns.Config(prompt=form.prompt, answer=answer, **said)
