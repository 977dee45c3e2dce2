"""The turns of an episode as tokens: actions are decoded, observations are encoded, and neither the other way round."""

import functools
from collections.abc import Sequence

from axlearn_like.tokenizers.chat import marked_chat
from axlearn_like.tokenizers.conversation import Conversation
from axlearn_like.tokenizers.inside import encode_inside
from axlearn_like.tokenizers.jinja_template import TemplateError
from axlearn_like.tokenizers.protocol import Tokenizer, answer_text
from rl.protocol.messages import Problem

_SHOWN = "a result"


class Turns:
    """The conversation of one episode. With a chat template an observation is a message, without one plain text."""

    def __init__(self, tokenizer: Tokenizer, problem: Problem, role: str = "user"):
        """Begin with a problem's messages; `role`: of observations, "user" where the template does not show it."""
        self._tokenizer = tokenizer
        self._talk: Conversation | None = None
        self._acted = False
        self._last: Sequence[int] = ()  # the last action's tokens, where there is no conversation
        if tokenizer.chat_template is not None:
            messages = problem.messages or ({"role": "user", "content": problem.question},)
            self._role = role if role == "user" or _shows(tokenizer, role) else "user"
            self._talk = Conversation(tokenizer, messages, tools=problem.tools, rewritten="keep")

    def action(self, tokens: Sequence[int]) -> str:
        """Append an action as it was drawn; returns its text, without special tokens at its ends."""
        if self._talk is not None:
            self._talk.answered(tokens)
        self._acted, self._last = True, tokens
        return answer_text(self._tokenizer, tokens)

    def observation(self, text: str) -> list[int]:
        """Append an observation; returns the tokens up to the policy's next action.

        Before the first action a conversation has room for it only behind an empty turn of the policy's.
        """
        if self._talk is None:
            return encode_inside(self._tokenizer, text, self._last)
        if not self._acted:
            if not text:
                return []
            self._talk.answered(())
        self._acted = False
        return self._talk.extend([{"role": self._role, "content": text}])


@functools.lru_cache(maxsize=16)
def _shows(tokenizer: Tokenizer, role: str) -> bool:
    """Return True if the chat template writes messages of a role: some refuse them, some leave them out."""
    talk = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "."}, {"role": role, "content": _SHOWN})
    try:
        return _SHOWN in marked_chat(tokenizer, talk)
    except TemplateError:
        return False
