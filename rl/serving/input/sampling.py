"""How the tokens of a request are drawn, and what ends them: fields to the engine's sampler and stop conditions."""

from typing import Any

from rl.rollout.request import StopConditions
from rl.rollout.sampling import Sampler
from rl.serving.context import ServingContext
from rl.serving.errors import bad_field
from rl.serving.input.fields import Fields, is_integer, is_number, shown, text
from rl.serving.output.text import REPLACEMENT

MAX_STOPS = 16  # strings, and token ids, of one request
MAX_STOP_LENGTH = 1024  # characters
MAX_BIASES = 1024


def read_seed(fields: Fields) -> int | None:
    """Return the seed in 32 bits; None: one is drawn, as for -1 in vLLM."""
    seed = fields.take_int("seed", -(2**63), 2**63 - 1)
    return None if seed in (None, -1) else seed % 2**32


def read_stop(fields: Fields, context: ServingContext, chat: bool, least: int) -> StopConditions:
    """Return the request's strings and tokens, besides the server's tokens; `least`: of `max_tokens`."""
    limit = f" (the most that this server generates is {context.max_new_tokens})"
    max_new_tokens = fields.take_int("max_tokens", least, context.max_new_tokens, limit)
    if chat:
        newer = fields.take_int("max_completion_tokens", least, context.max_new_tokens, limit)
        if None not in (max_new_tokens, newer) and max_new_tokens != newer:
            raise bad_field(
                "max_completion_tokens", f"is {newer}, but max_tokens is {max_new_tokens}; give one of them"
            )
        max_new_tokens = newer if max_new_tokens is None else max_new_tokens
    stop = fields.take("stop")
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or len(strings) > MAX_STOPS:
        raise bad_field("stop", f"expected a string or an array of at most {MAX_STOPS}")
    for string in strings:
        if not 0 < len(text(string, "stop")) <= MAX_STOP_LENGTH:
            raise bad_field("stop", f"a string has {len(string)} characters; expected 1 to {MAX_STOP_LENGTH}")
        if REPLACEMENT in string:
            raise bad_field("stop", "a string has U+FFFD in it, which text shows only until a character is complete")
    ids, size = fields.take("stop_token_ids") or [], context.tokenizer.vocab_size
    if not isinstance(ids, list) or len(ids) > MAX_STOPS:
        raise bad_field("stop_token_ids", f"expected an array of at most {MAX_STOPS} token ids")
    if not all(is_integer(item) and 0 <= item < size for item in ids):
        raise bad_field("stop_token_ids", f"expected token ids from 0 to {size - 1}")
    ends = () if fields.take_bool("ignore_eos") else context.stop_tokens
    tokens = tuple(dict.fromkeys([*ends, *map(int, ids)]))
    most = context.max_new_tokens if max_new_tokens is None else max_new_tokens
    min_new_tokens = fields.take_int("min_tokens", 0, most, ", the most that the request generates") or 0
    return StopConditions(tokens=tokens, strings=tuple(strings), max_new_tokens=most, min_new_tokens=min_new_tokens)


def read_sampler(fields: Fields, context: ServingContext) -> Sampler.Config | None:
    """Return the server's sampler with the request's changes; None where there are none."""
    size = context.tokenizer.vocab_size
    temperature = fields.take_number("temperature", 0, 100)
    if temperature is not None and 0 < temperature < 0.01:
        raise bad_field("temperature", f"got {temperature:g}; expected 0 (greedy) or 0.01 and more")
    changes: dict[str, Any] = {
        "temperature": temperature,
        "top_p": fields.take_number("top_p", 0, 1, open_low=True),
        "top_k": _top_k(fields, context),
        "min_p": fields.take_number("min_p", 0, 1),
        "repetition_penalty": fields.take_number("repetition_penalty", 0.01, 100),
        "presence_penalty": fields.take_number("presence_penalty", -2, 2),
        "frequency_penalty": fields.take_number("frequency_penalty", -2, 2),
        "logit_bias": _logit_bias(fields, size),
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    return context.sampler.clone(**changes) if changes else None


def _top_k(fields: Fields, context: ServingContext) -> int | None:
    """Return how many tokens may be drawn; -1 and 0 are all of them, as in vLLM, whatever the server's default is."""
    value = fields.take_int("top_k", -1, 2**31 - 1)
    if value not in (-1, 0):
        return value
    return None if context.sampler.top_k is None else context.tokenizer.vocab_size


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
