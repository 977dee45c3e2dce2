"""The prompts of a request as tokens: texts, token ids, or a conversation."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from axlearn_like.tokenizers.protocol import begin
from mesh import UserError
from rl.serving.context import ServingContext
from rl.serving.errors import ApiError, bad_field
from rl.serving.input.fields import Fields, checked_json, is_integer, shown, text

_JINJA_FIELDS = ("tools", "documents", "chat_template_kwargs", "continue_final_message")
# Fields of messages besides role and content: for Jinja templates.
_MESSAGE_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")


def prompt_id(tokens: np.ndarray) -> int:
    """Return 63 bits of a hash of the tokens: the same prompt has the same id, so the same seed the same answer."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def read_prompts(fields: Fields, context: ServingContext) -> list[np.ndarray]:
    """Read a text, token ids, or an array of either."""
    value = fields.take("prompt")
    if value is None:
        raise fields.missing("prompt", "a string, token ids, or an array of either")
    first = begin(context.tokenizer) if fields.take_bool("add_special_tokens", default=True) else []
    if isinstance(value, str):
        return [_encoded(value, "prompt", context, first)]
    if not isinstance(value, list) or not value:
        raise bad_field("prompt", f"got {shown(value)}; expected a string, token ids, or an array of either")
    if is_integer(value[0]):
        return [_token_ids(value, "prompt", context)]
    if len(value) > context.max_samples:
        raise bad_field("prompt", f"{len(value)} prompts; this server makes at most {context.max_samples} completions")
    return [
        _token_ids(item, f"prompt[{i}]", context)
        if isinstance(item, list)
        else _encoded(item, f"prompt[{i}]", context, first)
        for i, item in enumerate(value)
    ]


def read_chat(fields: Fields, context: ServingContext) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Read a conversation as the tokens of the template, and the tools that it may show."""
    messages = fields.take("messages")
    if messages is None:
        raise fields.missing("messages", "an array of messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "expected an array of messages, at least one")
    said = [_message(item, f"messages[{i}]", context) for i, item in enumerate(messages)]
    goes_on = fields.take_bool("continue_final_message")
    options: dict[str, Any] = {
        "tools": _json(fields, "tools", "an array of objects"),
        "documents": _json(fields, "documents", "an array of objects"),
        "variables": _json(fields, "chat_template_kwargs", "an object"),
        "add_generation_prompt": fields.take_bool("add_generation_prompt", default=not goes_on),
        "continue_final_message": goes_on,
    }
    for name, value in {**options, "chat_template_kwargs": options["variables"]}.items():
        if value and name in _JINJA_FIELDS and not context.template.in_jinja:
            raise bad_field(name, "needs a chat template in Jinja: the tokenizer's own, or server.template.jinja")
    try:
        ids = context.template.encode(said, **options)
    except UserError as error:
        raise bad_field("messages", str(error)) from None
    return _fitting(np.asarray(ids, np.int32), "messages", context), options["tools"] or []


def tokenized(body: Any, context: ServingContext) -> dict[str, Any]:
    """Return the answer of `/tokenize`: the ids of a text or of a conversation, as vLLM's server gives them."""
    fields = Fields(body)
    if (model := fields.take_text("model")) is not None:
        context.models.find(model)
    if "messages" in body:
        ids = read_chat(fields, context)[0].tolist()
    else:
        said = fields.take_text("prompt")
        if said is None:
            raise fields.missing("prompt", "a string")
        first = begin(context.tokenizer) if fields.take_bool("add_special_tokens", default=True) else []
        ids = [*first, *_ids(said, "prompt", context)]
    fields.finish()
    return {
        "count": len(ids),
        "max_model_len": context.max_prompt_tokens + context.max_new_tokens,
        "tokens": list(map(int, ids)),
    }


def detokenized(body: Any, context: ServingContext) -> dict[str, Any]:
    """Return the answer of `/detokenize`: the text of token ids."""
    fields = Fields(body)
    if (model := fields.take_text("model")) is not None:
        context.models.find(model)
    ids = _checked_ids(fields.take("tokens"), "tokens", context)
    fields.finish()
    return {"prompt": context.tokenizer.decode(ids)}


def _message(item: Any, where: str, context: ServingContext) -> dict[str, Any]:
    """Read a message: role, content, and what else the template may read, as it is."""
    message = Fields(item, where)
    role, content = message.take_text("role"), message.take("content")
    if role is None:
        raise message.missing("role", "one of the template's")
    names = _MESSAGE_FIELDS if context.template.in_jinja else ()
    taken = {name: value for name in names if (value := message.take(name)) is not None}
    taken = {name: checked_json(value, message.path(name)) for name, value in taken.items()}
    if content is None and "tool_calls" not in taken:
        raise message.missing("content", "a string, or parts of type 'text'")
    read = {"role": role, **taken}
    if content is not None:
        read["content"] = _content(content, message.path("content"))
    message.finish()
    try:
        context.template.check(read)
    except UserError as error:
        raise bad_field(message.path("role"), str(error)) from None
    return read


def _json(fields: Fields, name: str, expected: str) -> Any:
    """Read "an object" or "an array of objects"; an empty array counts as absent."""
    value = fields.take(name)
    if value is None or value == [] and expected != "an object":
        return None
    objects = [value] if expected == "an object" else value
    if not isinstance(objects, list) or not all(isinstance(item, dict) for item in objects):
        raise bad_field(name, f"got {shown(value)}; expected {expected}")
    return checked_json(value, name)


def _content(value: Any, path: str) -> str:
    """Read a string, or parts of which each is a text."""
    if not isinstance(value, list):
        return text(value, path)
    texts = []
    for i, item in enumerate(value):
        part = Fields(item, f"{path}[{i}]")
        kind, said = part.take_text("type"), part.take_text("text")
        part.finish()
        if kind != "text" or said is None:
            raise bad_field(part.path("type"), f"got {shown(kind)}; this server reads parts of type 'text'")
        texts.append(said)
    return "".join(texts)


def _encoded(value: Any, path: str, context: ServingContext, first: list[int]) -> np.ndarray:
    """Return the tokens of a text after the first ones: `bos`, if the tokenizer has one, as in training."""
    said = text(value, path)
    ids = [*first, *_ids(said, path, context)]
    return _fitting(np.asarray(ids, np.int32), path, context)


def _ids(said: str, path: str, context: ServingContext) -> Sequence[int]:
    """Return the tokens of a text; the model's own tokenizer may fail on it."""
    try:
        return context.tokenizer.encode(said)
    except UserError as error:
        raise bad_field(path, str(error)) from None


def _token_ids(value: Any, path: str, context: ServingContext) -> np.ndarray:
    return _fitting(np.asarray(_checked_ids(value, path, context), np.int32), path, context)


def _checked_ids(value: Any, path: str, context: ServingContext) -> list[int]:
    size = context.tokenizer.vocab_size
    if not isinstance(value, list):
        raise bad_field(path, f"got {shown(value)}; expected an array of token ids from 0 to {size - 1}")
    for item in value:
        if not is_integer(item) or not 0 <= item < size:
            raise bad_field(path, f"got {shown(item)}; expected token ids from 0 to {size - 1}")
    return value


def _fitting(tokens: np.ndarray, path: str, context: ServingContext) -> np.ndarray:
    if not 1 <= len(tokens) <= context.max_prompt_tokens:
        raise ApiError(
            400,
            f"{path}: {len(tokens)} tokens; this server takes 1 to {context.max_prompt_tokens}",
            param=path,
            code="context_length_exceeded" if len(tokens) else "invalid_value",
        )
    return tokens
