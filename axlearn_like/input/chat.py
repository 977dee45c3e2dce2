"""Conversations as training examples: written by the tokenizer's chat template, the assistant's turns are learned."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input.encoding import Encoded, field_of, find_field, text_of
from axlearn_like.input.rows.messages import is_conversation, read_messages
from axlearn_like.input.source import InputError
from axlearn_like.tokenizers.chat import encode_marked, marked_chat, turn_length
from axlearn_like.tokenizers.jinja_template import TemplateError
from axlearn_like.tokenizers.protocol import Tokenizer

Said = str | list[dict[str, Any]]  # a text, or messages


class Chat(Configurable):
    """A list of messages: each turn of the assistant is learned up to the token that ends it, the rest is given.

    A turn whose `weight` is 0 is given, too (OpenAI). For the forms of messages see `read_messages`.

    A turn is what the template writes behind the opening of an answer, so that the policy learns it behind the tokens
    with which it will be asked. A template that writes earlier turns in another way once there are later ones, such as
    without their reasoning, is refused: then each turn is an example of its own.
    """

    class Config(ConfigBase["Chat"]):
        messages: str = "messages"  # field: objects with role, content and others that the template reads
        tools: str | None = None  # field: JSON schemas of functions, or their JSON text; None: no tools
        # Fields of a question and its answer, each a text or messages, where records have no single conversation. The
        # question's own messages are given.
        turns: tuple[str, str] | None = None
        system: str | None = None  # field: text of a system message that comes first, unless it is empty

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None):
        if tokenizer is None or tokenizer.chat_template is None:
            raise InputError("Chat.Config writes conversations: the source needs a tokenizer with a chat template")
        self._tokenizer, self._cfg = tokenizer, cfg
        self.fields = (*(cfg.turns or (cfg.messages,)), *(name for name in (cfg.tools, cfg.system) if name))

    def encode(self, record: Mapping[str, Any], where: str) -> Encoded:
        """Return tokens and loss mask, see `Encoding.encode`."""
        cfg = self._cfg
        said: list[Any] = read_system(record, cfg.system, where)
        first = 0
        if cfg.turns is None:
            said += read_messages(field_of(record, cfg.messages, where), f"{where}, field {cfg.messages!r}")
        else:
            said += as_messages(read_said(record, cfg.turns[0], where), "user")
            first = len(said)
            said += as_messages(read_said(record, cfg.turns[1], where), "assistant")
        return self.encode_messages(said, read_tools(record, cfg.tools, where), where, first)

    def encode_messages(self, messages: Sequence[Any], tools: Any, where: str, first: int = 0) -> Encoded:
        """Return tokens and loss mask of a conversation, of which turns before message `first` are given."""
        ids: list[int] = []
        learned: list[bool] = []
        try:
            for text, answer in self._pieces(messages, tools, where, first):
                piece = encode_marked(self._tokenizer, text, ids)
                ids += piece
                kept = turn_length(self._tokenizer, piece) if answer else 0
                if answer and not kept:
                    raise InputError(f"{where}: {_endless(text)}")
                learned += [True] * kept + [False] * (len(piece) - kept)
        except TemplateError as error:
            raise InputError(f"{where}: {error}") from None
        return ids, np.asarray(learned, bool)

    def _pieces(self, messages: Sequence[Any], tools: Any, where: str, first: int) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a conversation's text in order, and whether an assistant's turn from `first` on is one."""
        written, learned = "", False
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            learn = index >= first and message.get("weight") != 0
            opening = self._render(messages[:index], tools, add_generation_prompt=True) if index else written
            whole = self._render(messages[: index + 1], tools)
            if not opening.startswith(written) or not whole.startswith(opening):
                raise InputError(
                    f"{where}: the chat template writes what is before message {index} in another way once that "
                    "follows, so its tokens would not be those that the policy is asked with; make each turn an "
                    "example of its own, or take a template that keeps earlier turns"
                )
            yield opening[len(written) :], False
            yield whole[len(opening) :], learn
            written, learned = whole, learned or learn
        if not learned:
            raise InputError(
                f"{where}: no message of {(self._cfg.turns or [self._cfg.messages])[-1]!r} is the assistant's: nothing "
                "is learned"
            )

    def _render(self, messages: Sequence[Any], tools: Any, *, add_generation_prompt: bool = False) -> str:
        return marked_chat(self._tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt)


def read_said(record: Mapping[str, Any], name: str, where: str) -> Said:
    """Return a field that is messages, or else a text; InputError if it is neither."""
    value = find_field(record, name)
    if value is not None and is_conversation(value):
        return read_messages(value, f"{where}, field {name!r}")
    return text_of(record, name, where)


def as_messages(said: Said, role: str) -> list[dict[str, Any]]:
    """Return messages as they are, and a text as one of this role."""
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def read_system(record: Mapping[str, Any], name: str | None, where: str) -> list[dict[str, Any]]:
    """Return the system message in a field, if there is one."""
    if name is None or field_of(record, name, where) in (None, ""):
        return []
    return as_messages(text_of(record, name, where), "system")


def read_tools(record: Mapping[str, Any], name: str | None, where: str) -> list[Any] | None:
    """Return the tools in a field, which may be their JSON text; None: there are none."""
    found: Any = None if name is None else field_of(record, name, where)
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}, field {name!r}: the text is no JSON of tools: {error}") from None
    return found or None


def _endless(turn: str) -> str:
    return (
        f"the chat template ends the assistant's turn with {turn[-24:]!r}, in which no token ends it, so a policy "
        "trained on it would never stop; expected a template that writes a special token of the tokenizer behind an "
        "answer, such as {{ eos_token }} (chat_template= of the tokenizer names another file)"
    )
