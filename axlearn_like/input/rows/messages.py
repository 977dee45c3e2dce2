"""Messages as chat templates read them, from the forms of OpenAI, ShareGPT and Arrow tables."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from axlearn_like.input.source import InputError

# Roles of ShareGPT, and what templates call them.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool"}


def is_conversation(value: Any) -> bool:
    """Return True for a list of objects with a role (or ShareGPT's `from`), and for one such object."""
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return False
    return all(isinstance(one, Mapping) and isinstance(one.get("role", one.get("from")), str) for one in messages)


def read_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return messages with a role, and a text as content unless they call tools; members that are null are left out.

    Args:
        value: list of messages or a single one, or the JSON text of either. Contents may be a list of parts of text
            (OpenAI); `from` and `value` stand for role and content (ShareGPT).

    Raises:
        InputError: it is none, or holds an image.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: the text is no JSON of messages: {error}") from None
    if not is_conversation(value):
        expected = "a list of messages, objects with role and content (or from and value)"
        raise InputError(f"{where}: expected {expected}, got {value!r:.60}")
    messages: Any = [value] if isinstance(value, Mapping) else value
    return [_message(one, where) for one in messages]


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    said = {name: part for name, part in given.items() if part is not None}
    if "role" not in said:
        role, content = said.pop("from"), said.pop("value", None)
        if role == "function_call":
            said = {"role": "assistant", "tool_calls": _calls(content, where), **said}
        else:
            said = {"role": _ROLES.get(role, role), "content": content, **said}
    content = said.get("content")
    if content is None and said.get("tool_calls"):
        said.pop("content", None)
    elif isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        kinds = {str(part.get("type")) for part in content if isinstance(part, Mapping)}
        if kinds - {"text"} or not all(isinstance(text, str) for text in texts):
            got = ", ".join(sorted(kinds - {"text"})) or f"{content!r:.60}"
            raise InputError(f"{where}: content of {got}; expected text, or parts of type 'text': images are not read")
        said["content"] = "".join(map(str, texts))
    elif not isinstance(content, str):
        raise InputError(f"{where}: expected the content of each message to be text (images are not read)")
    return said


def _calls(content: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of ShareGPT's message `function_call`, whose value is JSON of one or several."""
    try:
        found = json.loads(content)
    except (TypeError, ValueError, RecursionError):
        raise InputError(f"{where}: expected the value of function_call to be JSON, got {content!r:.60}") from None
    return [{"type": "function", "function": call} for call in (found if isinstance(found, list) else [found])]
