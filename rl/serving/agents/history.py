"""The chat of an agent as the tokens that the policy has seen and drawn, request by request.

An agent sends the whole conversation each time, as text. Written and encoded again, an answer need not have the tokens
that were drawn. So an answer that comes back is recognised, and its tokens are kept; only what follows it is encoded.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, override

from axlearn_like.tokenizers.conversation import Conversation
from axlearn_like.tokenizers.protocol import Tokenizer, answer_text
from mesh.errors import UserError
from rl.environments.calls import json_or
from rl.serving.chat_template import ChatTemplate
from rl.serving.output.text import CallStream, ToolCall

_REASONING = re.compile(r"^.*</think>", re.DOTALL)


class ChatHistory(ChatTemplate):
    """The tokenizer's chat template for one conversation that grows."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(ChatTemplate.Config(), tokenizer=tokenizer)
        self._talk: Conversation | None = None
        self._said: list[dict[str, Any]] = []  # messages of the last request
        self._options: dict[str, Any] = {}
        self._asked: list[int] = []  # tokens of the last request
        self._answer: tuple[str, list[Any]] | None = None  # text and calls of the answer to it
        self.new: tuple[Mapping[str, Any], ...] = ()  # messages of the last request that were in none before

    @override
    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return a conversation's tokens, the same for the same request (UserError: not on from the last answer)."""
        said = [dict(message) for message in messages]
        known = len(self._said)
        if self._talk is None:
            self._options, self.new = options, tuple(said)
            given = {name: options.get(name) for name in ("tools", "documents", "variables")}
            self._talk = Conversation(self._tokenizer, said, template=self.template, rewritten="keep", **given)
        elif said != self._said:
            if said[:known] != self._said or len(said) < known + 2 or options != self._options:
                raise UserError(_other(self._said, said) or "its tools or options are others than at first")
            if self._answer is None or _parts(said[known]) != self._answer:
                raise UserError(f"message {known} is not the answer that the policy gave" + _EXPECTED)
            self.new = tuple(said[known + 1 :])
            self._talk.extend(self.new)
        else:
            return self._asked
        self._said, self._answer, self._asked = said, None, list(self._talk.tokens)
        return self._asked

    def answered(self, tokens: Sequence[int]) -> None:
        """Append what the policy has drawn; without a conversation, of a client that sends tokens, nothing is kept."""
        if self._talk is None:
            return
        self._talk.answered(tokens)
        tools = [tool.get("function", tool) for tool in self._options.get("tools") or ()]
        text, calls = answer_text(self._tokenizer, tokens), []
        if tools and self.call_style is not None:
            stream = CallStream(self.call_style, [str(one.get("name")) for one in tools])
            parts = [*stream.push(text), *stream.finish()]
            text = "".join(part for part in parts if isinstance(part, str))
            calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
        self._answer = _plain(text), calls


_EXPECTED = "; expected the conversation so far, the answer as it was given, and new messages: an episode is one chat"


def _other(before: Sequence[Any], now: Sequence[Any]) -> str:
    """Return how a conversation differs from its beginning; "" if it does not."""
    for index, message in enumerate(before):
        if index >= len(now) or now[index] != message:
            return f"message {index} is another than in the last request" + _EXPECTED
    return "nothing follows the last answer" + _EXPECTED if len(now) < len(before) + 2 else ""


def _parts(message: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
    """Return text and calls of an assistant's message; None: it is of another role."""
    if message.get("role") != "assistant":
        return None
    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    calls = [(one.get("name"), json_or(given := one.get("arguments"), given)) for one in functions]
    return _plain(message.get("content") or ""), calls


def _plain(text: str) -> str:
    return _REASONING.sub("", text).strip()
