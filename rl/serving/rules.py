"""The rules of a request: how tokens are drawn, and when a completion ends."""

from typing import Any

from rl.rollout.request import StopConditions
from rl.rollout.sampling import Sampler
from rl.serving.context import ServingContext
from rl.serving.errors import bad_field
from rl.serving.fields import Fields, is_integer, is_number, shown, text
from rl.serving.text import REPLACEMENT

MAX_STOPS = 16  # strings, and token ids, of one request
MAX_STOP_LENGTH = 1024  # characters
MAX_BIASES = 1024


def read_stop_rules(fields: Fields, served: ServingContext, chat: bool) -> StopConditions:
    """The request's strings and tokens, besides the server's tokens."""
    limit = f" (the most that this server generates is {served.max_new})"
    max_new = fields.take_int("max_tokens", 1, served.max_new, limit)
    if chat:
        newer = fields.take_int("max_completion_tokens", 1, served.max_new, limit)
        if None not in (max_new, newer) and max_new != newer:
            raise bad_field("max_completion_tokens", f"is {newer}, but max_tokens is {max_new}; give one of them")
        max_new = newer if max_new is None else max_new
    stop = fields.take("stop")
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or len(strings) > MAX_STOPS:
        raise bad_field("stop", f"expected a string or an array of at most {MAX_STOPS}")
    for string in strings:
        if not 0 < len(text(string, "stop")) <= MAX_STOP_LENGTH:
            raise bad_field("stop", f"a string has {len(string)} characters; expected 1 to {MAX_STOP_LENGTH}")
        if REPLACEMENT in string:
            raise bad_field("stop", "a string has U+FFFD in it, which text shows only until a character is complete")
    ids, size = fields.take("stop_token_ids") or [], served.tokenizer.vocab_size
    if not isinstance(ids, list) or len(ids) > MAX_STOPS:
        raise bad_field("stop_token_ids", f"expected an array of at most {MAX_STOPS} token ids")
    if not all(is_integer(item) and 0 <= item < size for item in ids):
        raise bad_field("stop_token_ids", f"expected token ids from 0 to {size - 1}")
    tokens = tuple(dict.fromkeys([*served.stop_tokens, *map(int, ids)]))
    return StopConditions(tokens=tokens, strings=tuple(strings), max_new=served.max_new if max_new is None else max_new)


def read_sampler(fields: Fields, served: ServingContext) -> Sampler.Config | None:
    """The server's sampler with the request's changes; None where there are none."""
    size = served.tokenizer.vocab_size
    temperature = fields.take_number("temperature", 0, 100)
    if temperature is not None and 0 < temperature < 0.01:
        raise bad_field("temperature", f"got {temperature:g}; expected 0 (greedy) or 0.01 and more")
    changes: dict[str, Any] = {
        "temperature": temperature,
        "top_p": fields.take_number("top_p", 0, 1, open_low=True),
        "top_k": fields.take_int("top_k", 1, 2**31 - 1, "; leave it out for all tokens"),
        "min_p": fields.take_number("min_p", 0, 1),
        "repetition_penalty": fields.take_number("repetition_penalty", 0.01, 100),
        "logit_bias": _logit_bias(fields, size),
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    return served.sampler.clone(**changes) if changes else None


def _logit_bias(fields: Fields, size: int) -> tuple[tuple[int, float], ...] | None:
    value = fields.take("logit_bias")
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise bad_field("logit_bias", f"expected an object of at most {MAX_BIASES} token ids with their biases")
    biases = []
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < size):
            raise bad_field("logit_bias", f"got the key {shown(name)}; expected token ids from 0 to {size - 1}")
        if not is_number(bias) or not -100 <= bias <= 100:
            raise bad_field("logit_bias", f"got {shown(bias)} for token {name}; expected a number from -100 to 100")
        biases.append((int(name), float(bias)))
    return tuple(sorted(biases))
