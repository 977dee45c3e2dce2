"""The prompts of a request as tokens: texts, token ids, or a conversation."""

import hashlib
from typing import Any

import numpy as np

from mesh import UserError
from rl.serving.context import ServingContext
from rl.serving.errors import ApiError, bad_field
from rl.serving.fields import Fields, is_integer, shown, text


def prompt_id(tokens: np.ndarray) -> int:
    """Return 63 bits of a hash of the tokens: the same prompt has the same id, so the same seed the same answer."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def read_prompts(fields: Fields, context: ServingContext) -> list[np.ndarray]:
    """Read a text, token ids, or an array of either."""
    value = fields.take("prompt")
    if value is None:
        raise fields.missing("prompt", "a string, token ids, or an array of either")
    if isinstance(value, str):
        return [_encoded(value, "prompt", context)]
    if not isinstance(value, list) or not value:
        raise bad_field("prompt", f"got {shown(value)}; expected a string, token ids, or an array of either")
    if is_integer(value[0]):
        return [_token_ids(value, "prompt", context)]
    if len(value) > context.max_samples:
        raise bad_field("prompt", f"{len(value)} prompts; this server makes at most {context.max_samples} completions")
    return [
        _token_ids(item, f"prompt[{i}]", context) if isinstance(item, list) else _encoded(item, f"prompt[{i}]", context)
        for i, item in enumerate(value)
    ]


def read_chat(fields: Fields, context: ServingContext) -> np.ndarray:
    """Read a conversation as one text."""
    messages = fields.take("messages")
    if messages is None:
        raise fields.missing("messages", "an array of messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "expected an array of messages, at least one")
    pairs = []
    for i, item in enumerate(messages):
        message = Fields(item, f"messages[{i}]")
        role = message.take_text("role")
        content = message.take("content")
        if role is None:
            raise message.missing("role", "one of the template's")
        if content is None:
            raise message.missing("content", "a string, or parts of type 'text'")
        content = _content(content, message.path("content"))
        message.finish()
        try:
            context.template.render([(role, content)])
        except UserError as error:
            raise bad_field(message.path("role"), str(error)) from None
        pairs.append((role, content))
    return _encoded(context.template.render(pairs), "messages", context)


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


def _encoded(value: Any, path: str, context: ServingContext) -> np.ndarray:
    """Return the tokens of a text after `bos`, as in training."""
    said = text(value, path)
    ids = [context.tokenizer.bos, *context.tokenizer.encode(said)]
    return _fitting(np.asarray(ids, np.int32), path, context)


def _token_ids(value: list[Any], path: str, context: ServingContext) -> np.ndarray:
    """Return token ids as they are."""
    size = context.tokenizer.vocab_size
    for item in value:
        if not is_integer(item) or not 0 <= item < size:
            raise bad_field(path, f"got {shown(item)}; expected token ids from 0 to {size - 1}")
    return _fitting(np.asarray(value, np.int32), path, context)


def _fitting(tokens: np.ndarray, path: str, context: ServingContext) -> np.ndarray:
    if not 1 <= len(tokens) <= context.max_prompt:
        raise ApiError(
            400,
            f"{path}: {len(tokens)} tokens; this server takes 1 to {context.max_prompt}",
            param=path,
            code="context_length_exceeded" if len(tokens) else "invalid_value",
        )
    return tokens
