"""Conversations as training examples: written by the tokenizer's chat template, the assistant's turns are learned."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input.encoding import Encoded, text_of
from axlearn_like.input.source import InputError
from axlearn_like.tokenizers.chat import encode_marked, marked_chat, turn_length
from axlearn_like.tokenizers.jinja_template import TemplateError
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import did_you_mean


class Chat(Configurable):
    """A list of messages: each turn of the assistant is learned up to the token that ends it, the rest is given.

    A turn is what the template writes behind the opening of an answer, so that the policy learns it behind the tokens
    with which it will be asked. A template that writes earlier turns in another way once there are later ones, such as
    without their reasoning, is refused: then each turn is an example of its own.
    """

    class Config(ConfigBase["Chat"]):
        messages: str = "messages"  # field of the record: objects with role, content and others that the template reads
        tools: str | None = None  # field of the record: JSON schemas of functions; None: no tools
        # Fields of a question and its answer, texts, which are the messages where records have none.
        turns: tuple[str, str] | None = None

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None):
        if tokenizer is None or tokenizer.chat_template is None:
            raise InputError("Chat.Config writes conversations: the source needs a tokenizer with a chat template")
        self._tokenizer, self._messages, self._tools = tokenizer, cfg.messages, cfg.tools
        self._turns = cfg.turns
        self.fields = (cfg.turns or (cfg.messages,)) + ((cfg.tools,) if cfg.tools else ())

    def encode(self, record: Mapping[str, Any], where: str) -> Encoded:
        """Return tokens and loss mask, see `Encoding.encode`."""
        return self.encode_messages(*self._read(record, where), where)

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
            opening = self._render(messages[:index], tools, add_generation_prompt=True) if index else written
            whole = self._render(messages[: index + 1], tools)
            if not opening.startswith(written) or not whole.startswith(opening):
                raise InputError(
                    f"{where}: the chat template writes what is before message {index} in another way once that "
                    "follows, so its tokens would not be those that the policy is asked with; make each turn an "
                    "example of its own, or take a template that keeps earlier turns"
                )
            yield opening[len(written) :], False
            yield whole[len(opening) :], index >= first
            written, learned = whole, learned or index >= first
        if not learned:
            raise InputError(f"{where}: no message of {self._messages!r} is the assistant's: nothing is learned")

    def _render(self, messages: Sequence[Any], tools: Any, *, add_generation_prompt: bool = False) -> str:
        return marked_chat(self._tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def _read(self, record: Mapping[str, Any], where: str) -> tuple[Sequence[Any], Any]:
        for name in self.fields:
            if name not in record:
                raise InputError(f"{where}: there is no field {name!r}{did_you_mean(name, map(str, record))}")
        tools = record[self._tools] or None if self._tools else None
        if self._turns is not None:
            question, answer = (text_of(record, name, where) for name in self._turns)
            return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], tools
        messages = record[self._messages]
        if not is_conversation(messages):
            raise InputError(f"{where}: expected {self._messages!r} to be a list of objects with a role")
        return messages, tools


def is_conversation(value: Any) -> bool:
    """Return True for a list of objects with a role."""
    return isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)


def _endless(turn: str) -> str:
    return (
        f"the chat template ends the assistant's turn with {turn[-24:]!r}, in which no token ends it, so a policy "
        "trained on it would never stop; expected a template that writes a special token of the tokenizer behind an "
        "answer, such as {{ eos_token }} (chat_template= of the tokenizer names another file)"
    )
