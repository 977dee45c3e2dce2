"""Columns of a table as a problem: which fields are the question, the answer and the id."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input.source import InputError
from mesh.errors import did_you_mean

__all__ = ["Columns", "Message"]

Message = Mapping[str, Any]


class Columns(Configurable):
    """Mapping of a row's fields. All other fields stay with the row, for the verifier."""

    class Config(ConfigBase["Columns"]):
        prompt: str | None = "prompt"  # column of the question's text
        messages: str | None = None  # column used instead: a list of {"role", "content"}, texts; images are not read
        template: str | None = None  # text used instead, with fields in braces, such as "{question}\nAnswer:"
        system: str | None = None  # a system message before the prompt; needs a tokenizer with a chat template
        answer: str | None = "answer"  # column of the reference, a text or a number; None: no reference
        answer_after: str = ""  # mark whose last occurrence begins the scored text, in reference and answer; "": all
        final: Literal["text", "number"] = "text"  # compared value; "number": the final number, in any usual form
        id: str | None = None  # column of a text or number, different in all rows; None: the row's number

        @override
        def check_fields(self) -> None:
            ways = [name for name in ("messages", "template") if getattr(self, name) is not None]
            self.require("prompt", len(ways) < 2 and bool(ways or self.prompt), "one of prompt, messages, template")
            fits = self.system is None or self.messages is None
            self.require("system", fits, "None with messages, which hold their own")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def question(self, row: Mapping[str, Any], where: str) -> tuple[str, tuple[Message, ...] | None]:
        """Return the question as text, and as messages (None: as text only)."""
        cfg = self.cfg
        if cfg.messages is not None:
            messages = _messages(_field(row, cfg.messages, where), f"{where}, field {cfg.messages!r}")
            return "\n\n".join(message["content"] for message in messages), messages
        plain = cfg.template is None
        text = _text(row, cfg.prompt or "", where) if plain else _filled(cfg.template or "", row, where)
        if not text.strip():
            raise InputError(f"{where}: the prompt is empty")
        if cfg.system is None:
            return text, None
        return text, ({"role": "system", "content": cfg.system}, {"role": "user", "content": text})

    def answer(self, row: Mapping[str, Any], where: str) -> str:
        """Return the reference answer; "" if there is none."""
        if self.cfg.answer is None:
            return ""
        value = _field(row, self.cfg.answer, where)
        text = value if isinstance(value, str) else _number_text(value)
        if text is None:
            got = f"{value!r:.60} ({type(value).__name__})"
            raise InputError(f"{where}: expected field {self.cfg.answer!r} to be text or a finite number, got {got}")
        return text

    def identity(self, row: Mapping[str, Any], number: int, where: str) -> str:
        """Return the id of a row."""
        if self.cfg.id is None:
            return str(number)
        value = _field(row, self.cfg.id, where)
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


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise InputError(f"{where}: there is no field {name!r}{did_you_mean(name, map(str, row))}")
    return row[name]


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(value := _field(row, name, where), str):
        raise InputError(f"{where}: expected field {name!r} to be text, got {value!r:.60} ({type(value).__name__})")
    return value


def _filled(template: str, row: Mapping[str, Any], where: str) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        name = str(error.args[0])
        raise InputError(f"{where}: template needs a field {name!r}{did_you_mean(name, map(str, row))}") from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise InputError(f"{where}: template {template!r:.60} cannot be filled: {error}") from None


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InputError(f"{where}: expected a list of messages, got {value!r:.60}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"{where}: expected objects with a role, got {message!r:.60}")
        if not isinstance(message.get("content"), str):
            raise InputError(f"{where}: expected the content of each message to be text (images are not read)")
    if value[-1]["role"] == "assistant":
        raise InputError(f"{where}: the last message is the assistant's: there is nothing to answer")
    return tuple(value)
