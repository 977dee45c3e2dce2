"""The prompts of a request as tokens: texts, token ids, or a conversation."""

import hashlib
from typing import Any

import numpy as np

from mesh import UserError
from rl.serving.context import ServingContext
from rl.serving.errors import ApiError, bad_field
from rl.serving.fields import Fields, is_integer, shown, text


def prompt_id(tokens: np.ndarray) -> int:
    """63 bits of a hash of the tokens: the same prompt has the same id everywhere, so the same seed the same answer."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def read_prompts(fields: Fields, served: ServingContext) -> list[np.ndarray]:
    """A text, token ids, or an array of either."""
    value = fields.take("prompt")
    if value is None:
        raise fields.missing("prompt", "a string, token ids, or an array of either")
    if isinstance(value, str):
        return [_encoded(value, "prompt", served)]
    if not isinstance(value, list) or not value:
        raise bad_field("prompt", f"got {shown(value)}; expected a string, token ids, or an array of either")
    if is_integer(value[0]):
        return [_token_ids(value, "prompt", served)]
    if len(value) > served.max_samples:
        raise bad_field("prompt", f"{len(value)} prompts; this server makes at most {served.max_samples} completions")
    return [
        _token_ids(item, f"prompt[{i}]", served) if isinstance(item, list) else _encoded(item, f"prompt[{i}]", served)
        for i, item in enumerate(value)
    ]


def read_chat(fields: Fields, served: ServingContext) -> np.ndarray:
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
            served.template.render([(role, content)])
        except UserError as error:
            raise bad_field(message.path("role"), str(error)) from None
        pairs.append((role, content))
    return _encoded(served.template.render(pairs), "messages", served)


def _content(value: Any, path: str) -> str:
    """A string, or parts of which each is a text."""
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


def _encoded(value: Any, path: str, served: ServingContext) -> np.ndarray:
    """The tokens of a text, begun as in training: with `bos`."""
    said = text(value, path)
    ids = [served.tokenizer.bos, *served.tokenizer.encode(said)]
    return _fitting(np.asarray(ids, np.int32), path, served)


def _token_ids(value: list[Any], path: str, served: ServingContext) -> np.ndarray:
    """Token ids, taken as they are."""
    size = served.tokenizer.vocab_size
    for item in value:
        if not is_integer(item) or not 0 <= item < size:
            raise bad_field(path, f"got {shown(item)}; expected token ids from 0 to {size - 1}")
    return _fitting(np.asarray(value, np.int32), path, served)


def _fitting(tokens: np.ndarray, path: str, served: ServingContext) -> np.ndarray:
    if not 1 <= len(tokens) <= served.max_prompt:
        raise ApiError(
            400,
            f"{path}: {len(tokens)} tokens; this server takes 1 to {served.max_prompt}",
            param=path,
            code="context_length_exceeded" if len(tokens) else "invalid_value",
        )
    return tokens
