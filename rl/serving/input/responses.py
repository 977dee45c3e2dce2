"""Bodies of `/v1/responses` as those of `/v1/chat/completions`: the same conversation, in other words."""

import re
from collections.abc import Mapping
from typing import Any

from rl.serving.errors import ApiError, bad_field
from rl.serving.input.fields import Fields, shown

Json = dict[str, Any]
_LOGPROBS = "message.output_text.logprobs"
# Fields that are not supported, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "reasoning": ({},),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "context_management": (),
    "n": (1,),
    "messages": (),
    "response_format": (),
}
_IGNORED = ("store", "stream_options", "prompt_cache_retention")  # nothing is stored
_RENAMED = {"max_output_tokens": "max_completion_tokens"}


def as_chat(body: Any) -> Json:
    """Return the body of a chat; its own fields and vLLM's pass as they are (ApiError: 400, names the field)."""
    fields = Fields(body)
    given = fields.take("input")
    if given is None:
        raise fields.missing("input", "a text, or an array of messages, calls and their outputs")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    if (instructions := fields.take_text("instructions")) is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    chat: Json = {"messages": messages}
    if (tools := fields.take("tools")) is not None:
        chat["tools"] = _tools(tools)
    if (text := fields.take("text")) is not None:
        chat |= _format(Fields(text, "text"))
    include = fields.take("include") or []
    if not isinstance(include, list) or any(one != _LOGPROBS for one in include):
        raise bad_field("include", f"expected an array of nothing but {_LOGPROBS!r}")
    for name in _IGNORED:
        fields.take(name)
    for name, neutral in _NEUTRAL.items():
        fields.refuse(name, neutral)
    taken = ("input", "instructions", "tools", "text", "include", *_IGNORED, *_NEUTRAL)
    rest: Json = {_RENAMED.get(name, name): value for name, value in dict[str, Any](body).items() if name not in taken}
    if include:
        rest["logprobs"] = True
    elif rest.get("top_logprobs") == 0:
        del rest["top_logprobs"]
    return rest | chat


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return the error of a field with the name that the field has in another body."""
    for name, own in names.items():
        if error.param is not None and re.split(r"[.\[]", error.param)[0] == name:
            error.message = error.message.replace(name, own, 1)
            error.param = own + error.param[len(name) :]
    return error


def _messages(value: Any) -> list[Json]:
    if not isinstance(value, list) or not value:
        raise bad_field("input", f"got {shown(value)}; expected a text, or an array of items, at least one")
    return [_message(item, f"input[{i}]") for i, item in enumerate(value)]


def _message(value: Any, where: str) -> Json:
    item = Fields(value, where)
    kind = item.take_text("type") or "message"
    for name in ("id", "status", "phase"):  # fields of earlier answers
        item.take(name)
    if kind == "function_call":
        function = {"name": item.take_text("name"), "arguments": item.take_text("arguments") or "{}"}
        call = {"id": item.take_text("call_id"), "type": "function", "function": function}
        message: Json = {"role": "assistant", "tool_calls": [call]}
    elif kind == "function_call_output":
        message = {"role": "tool", "tool_call_id": item.take_text("call_id"), "content": _content(item.take("output"))}
    elif kind == "message":
        message = {"role": item.take("role"), "content": _content(item.take("content"))}
        message["role"] = "system" if message["role"] == "developer" else message["role"]
    else:
        expected = "'message', 'function_call' or 'function_call_output'"
        raise bad_field(item.path("type"), f"got {shown(kind)}; expected {expected}")
    item.finish()
    return message


def _content(value: Any) -> Any:
    """Return a content whose parts are named as in a chat; what is none is left to its reader."""
    if not isinstance(value, list):
        return value
    parts = [part if isinstance(part, dict) else {"type": None} for part in value]
    texts = ("input_text", "output_text")
    return [{"type": "text", "text": p.get("text")} if p.get("type") in texts else p for p in parts]


def _tools(value: Any) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise bad_field("tools", f"got {shown(value)}; expected an array of objects")
    for i, one in enumerate(value):
        if one.get("type") != "function":
            raise bad_field(
                f"tools[{i}].type", f"got {shown(one.get('type'))}; expected 'function': others need a host"
            )
    return [{"type": "function", "function": {k: v for k, v in one.items() if k != "type"}} for one in value]


def _format(text: Fields) -> Json:
    form = text.take("format")
    text.refuse("verbosity", ("medium",))
    text.finish()
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return {} if form is None else {"response_format": form}
    named = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": named}}
