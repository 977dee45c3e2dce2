"""Conversations that grow turn by turn as tokens: what was drawn is never written as text and read again.

A text has several encodings, and a policy draws any of them; a template may drop what an earlier turn said. So turn
n+1, rendered and encoded again, need not begin with the tokens of turn n, and a policy would be trained on tokens that
it did not draw. Here the tokens of a conversation only grow: by the tokens drawn, and by those that the template writes
behind them. A template that writes earlier turns in another way is noticed, and refused unless asked not to.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from axlearn_like.tokenizers.chat import encode_marked, marked_chat, marked_text
from axlearn_like.tokenizers.jinja_template import Message, TemplateError
from axlearn_like.tokenizers.protocol import Template, Tokenizer, completion_text

_ANSWER = "\ue003the answer\ue003"  # placeholder that finds the template's text after an answer


class Conversation:
    """The tokens of a conversation between a policy and its environment.

        talk = Conversation(tokenizer, [{"role": "user", "content": "2+2?"}])
        ...                                        # a policy draws after talk.tokens
        talk.answered(drawn)
        given = talk.extend([{"role": "user", "content": "Sure?"}])  # Observe(given), then Generate()

    Attributes:
        tokens: all of it, ending where the policy goes on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        template: Template | None = None,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
        rewritten: Literal["refuse", "keep"] = "refuse",
    ):
        """Begin with messages, and the opening of the first answer.

        Args:
            tokenizer: encodes what the template writes.
            messages, template, tools, documents, variables: see `ChatOptions`.
            rewritten: earlier turns that the template would write in another way, such as without their reasoning:
                "refuse" them, or "keep" them as they were drawn.
        """
        self._tokenizer, self._messages, self._rewritten = tokenizer, list(messages), rewritten
        self._options: dict[str, Any] = {
            "template": template,
            "tools": tools,
            "documents": documents,
            "variables": variables,
        }
        self._text = self._render(self._messages)
        self._drawn: list[int] | None = None  # the last turn, until it is followed by another
        self.tokens = encode_marked(tokenizer, self._text)

    def answered(self, tokens: Iterable[int]) -> None:
        """Append the policy's turn as it was drawn, the token that ended it included."""
        if self._drawn is not None:
            raise TemplateError("a turn was drawn already, and no message follows it (Conversation.extend)")
        self._drawn = list(map(int, tokens))
        said = completion_text(self._tokenizer, self._drawn)
        self._messages.append({"role": "assistant", "content": said})
        self._text += marked_text(self._tokenizer, said)
        self.tokens += self._drawn

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """Append messages behind the policy's turn; returns the tokens up to the opening of its next one.

        Raises:
            TemplateError: with them, the template would write the conversation so far in another way.
        """
        if self._drawn is None:
            raise TemplateError("no turn was drawn yet (Conversation.answered)")
        whole = self._render([*self._messages, *messages])
        if whole.startswith(self._text):
            rest = whole[len(self._text) :]
        elif self._rewritten == "keep":
            rest = self._behind_answer(messages)
        else:
            raise TemplateError(_difference(self._text, whole))
        given = encode_marked(self._tokenizer, rest, self.tokens)
        ended = self._drawn[-1:] if set(self._drawn[-1:]) <= set(self._tokenizer.stop_ids) else []
        if ended and given[:1] == ended:
            given = given[1:]  # the end of the turn was drawn
        self._messages += messages
        self._text += rest
        self._drawn = None
        self.tokens += given
        return given

    def _render(self, messages: Sequence[Message]) -> str:
        return marked_chat(self._tokenizer, messages, add_generation_prompt=True, **self._options)

    def _behind_answer(self, messages: Sequence[Message]) -> str:
        """Return what the template writes behind an answer and then these messages."""
        answer = {**self._messages[-1], "content": _ANSWER}
        text = self._render([*self._messages[:-1], answer, *messages])
        at = text.rfind(_ANSWER)
        if at < 0:
            raise TemplateError("the chat template does not write what the assistant said last before these messages")
        return text[at + len(_ANSWER) :]


def _difference(before: str, after: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    return (
        "with these messages the chat template rewrites the conversation so far, so that the tokens drawn would not be "
        f"those trained on: at character {at}, {before[at : at + 40]!r} becomes {after[at : at + 40]!r}; pass "
        'rewritten="keep" to go on with the tokens as they were drawn'
    )
