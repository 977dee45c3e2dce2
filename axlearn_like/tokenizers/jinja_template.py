"""Chat templates in Jinja, as model directories carry them: rendered as transformers does, in a sandbox.

A template comes with a model from anywhere, so it is code of a stranger: it sees plain JSON values only, Jinja's
immutable sandbox keeps it from the interpreter behind them, and it is rendered in a process whose time, memory and
output are bounded (`template_process`).
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.tokenizers.files import located
from axlearn_like.tokenizers.template_process import ExceededError, template_process
from mesh.errors import UserError
from mesh.files.bounded import read_text

Message = Mapping[str, Any]

# The names under which a message may carry its reasoning; templates read one or another.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Where the last message is to be continued. The blank behind the mark shows whether the template trims what is said.
_MARK = "\ue002continued here\ue002"


class TemplateError(UserError, ValueError):
    """A chat template that cannot be read, or a conversation that it refuses."""


class JinjaTemplate:
    """A compiled template; safe to share between threads.

    Args:
        special_tokens: the variables `bos_token`, `eos_token` and so on that the template may write.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str = "chat template"):
        self.source, self.special_tokens, self.where = source, dict(special_tokens), where
        self._ask(None, where)

    @classmethod
    def read(cls, path: str | Path, special_tokens: Mapping[str, str]) -> "JinjaTemplate":
        """Read a template's file, or `package:path` of an installed package.

        Raises:
            TemplateError: it cannot be read, or is no template.
        """
        place = located(str(path))
        try:
            return cls(read_text(place), special_tokens, where=str(place))
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"{place}: cannot be read as a chat template: {error}") from None

    def _ask(self, variables: dict[str, Any] | None, where: str = "the chat template") -> str:
        """Return the text with these variables; None: only check the template."""
        try:
            answer = template_process().ask(self.source, variables)
        except ExceededError as error:
            raise TemplateError(f"{where} takes too much: {error}") from None
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"{where}: the conversation is no JSON: {error}") from None
        match answer:
            case {"text": text}:
                return text
            case {"mistake": said, "line": line}:
                raise TemplateError(f"{where}, line {line} of the template: {said}")
            case {"exceeds": said}:
                raise TemplateError(f"{where} takes too much: {said}")
            case {"refused": said}:
                raise TemplateError(f"{where} refuses this conversation: {said}")
        said = "cannot be compiled" if variables is None else "fails on this conversation"
        raise TemplateError(f"{where} {said}: {answer['failed']}")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, as `apply_chat_template(tokenize=False)` of transformers.

        Args:
            messages: objects with `role` and what else the template reads; a null counts as absent.
            tools: JSON schemas of functions.
            documents: objects with `title` and `text`.
            add_generation_prompt: end with the opening of the assistant's answer.
            continue_final_message: end within the last message, which the model goes on with.
            variables: further ones of the template, such as `enable_thinking`.

        Raises:
            TemplateError: what the template itself refuses, or fails on.
        """
        if not messages:
            raise TemplateError("a conversation needs at least one message")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        try:
            said = [_aliased({name: v for name, v in message.items() if v is not None}) for message in _plain(messages)]
            given = {**_plain(variables or {}), "tools": _plain(tools), "documents": _plain(documents)}
        except RecursionError:
            raise TemplateError("the conversation is nested too deeply") from None
        last = _continued(said) if continue_final_message else ""
        given |= {"messages": said, "add_generation_prompt": add_generation_prompt}
        text = self._ask({**self.special_tokens, **given})
        return _cut(text, last) if continue_final_message else text


def _continued(messages: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text; returns that text."""
    content = messages[-1].get("content")
    part = content
    if isinstance(content, list):
        part = next((p for p in reversed(content) if isinstance(p, dict) and isinstance(p.get("text"), str)), None)
    if isinstance(part, dict):
        text = part["text"]
        part["text"] = f"{text}{_MARK} "
        return text
    if not isinstance(part, str):
        raise TemplateError("continue_final_message: the last message has no text to continue")
    messages[-1]["content"] = f"{part}{_MARK} "
    return part


def _cut(text: str, last: str) -> str:
    at = text.rfind(_MARK)
    if at < 0 or last.strip() not in text:
        raise TemplateError("continue_final_message: the template does not write the last message as it is")
    kept = text[:at]
    return kept if text.startswith(" ", at + len(_MARK)) else kept.rstrip()


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under the names that templates read."""
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _plain(value: Any) -> Any:
    """Return a copy of JSON values; anything else is refused, as its methods would be open to the template."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return copy.copy(value)
    raise TemplateError(f"a conversation holds JSON values only, not {type(value).__name__}")
