"""Bodies of `/v1/completions` and `/v1/chat/completions`, and the engine's requests for them.

Fields of the protocol that this server does not have are refused by name, unless the value asks for nothing: a field
that is ignored would change answers silently.
"""

import secrets
from dataclasses import dataclass
from typing import Any

from rl.roles.messages import Prompt
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.serving.context import ServingContext
from rl.serving.errors import bad_field
from rl.serving.fields import Fields, is_integer, is_number, shown, text
from rl.serving.prompts import prompt_id, read_chat, read_prompts
from rl.serving.text import REPLACEMENT, CallStyle

MAX_STOPS = 16  # strings, and token ids, of one request
MAX_STOP_LENGTH = 1024  # characters
MAX_BIASES = 1024
FAMILY = "served"  # of the prompts, where training has its task families

# Fields of the protocol that change nothing here and may be given.
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")
# Fields that are not supported, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}
_NEUTRAL_COMPLETION = {"echo": (False,), "suffix": ("",), "best_of": (1,)}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_PENALTY_HINT = "; repetition_penalty is there"


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """The work of one HTTP request; prompt `i`'s sample `j` is choice `i * samples + j`."""

    requests: tuple[Request, ...]
    chat: bool
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    token_ids: bool
    stops: tuple[str, ...]
    model: str
    tools: tuple[str, ...] = ()  # names of functions whose calls are told apart from text
    call_style: CallStyle | None = None

    @property
    def samples(self) -> int:
        """Completions of each prompt."""
        return self.requests[0].samples

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt.tokens) for request in self.requests)


def parse(body: Any, context: ServingContext, *, chat: bool) -> GenerationJob:
    """Check a decoded body, all of it, before anything is generated.

    Raises:
        ApiError: 400 (404 for another model), naming the field.
    """
    fields = Fields(body)
    model, adapter = _model(fields, context)
    tools: tuple[str, ...] = ()
    if chat:
        tokens, tools = read_chat(fields, context)
        prompts = [tokens]
        tools = tools if _may_call(fields) else ()
    else:
        prompts = read_prompts(fields, context)
    samples = fields.take_int("n", 1, context.max_samples) or 1
    if samples * len(prompts) > context.max_samples:
        raise bad_field(
            "n", f"{samples} completions of {len(prompts)} prompts; this server makes at most {context.max_samples}"
        )
    seed = _seed(fields)
    stop = _stop_conditions(fields, context, chat)
    sampler = _sampler(fields, context)
    deadline = fields.take_number("deadline", 0, context.deadline, open_low=True)
    stream = fields.take_bool("stream")
    usage_in_stream = _stream_options(fields, stream)
    logprobs = _logprobs(fields, chat)
    token_ids = fields.take_bool("return_token_ids")
    for name in _IGNORED:
        fields.take(name)
    for name, neutral in (_NEUTRAL | (_NEUTRAL_CHAT if chat else _NEUTRAL_COMPLETION)).items():
        fields.refuse(name, neutral, _PENALTY_HINT if name.endswith("_penalty") else "")
    fields.finish()
    requests = [
        Request(
            prompt=Prompt(prompt_id(tokens), FAMILY, tokens),
            samples=samples,
            seed=secrets.randbits(32) if seed is None else seed,
            sampler=sampler,
            stop=stop,
            deadline=context.deadline if deadline is None else deadline,
            adapter=adapter,
        )
        for tokens in prompts
    ]
    return GenerationJob(
        requests=tuple(requests),
        chat=chat,
        stream=stream,
        usage_in_stream=usage_in_stream,
        logprobs=logprobs,
        token_ids=token_ids,
        stops=stop.strings,
        model=model,
        tools=tools,
        call_style=context.template.call_style if tools else None,
    )


def _may_call(fields: Fields) -> bool:
    """Return True if calls of tools are to be told apart, which is the default."""
    choice = fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise bad_field(
            "tool_choice", f"got {shown(choice)}; expected 'auto' or 'none': no answer is forced into a call"
        )
    return choice != "none"


def _model(fields: Fields, context: ServingContext) -> tuple[str, str | None]:
    """Return the model that a request names, and the adapter that this is, None for the base."""
    model = fields.take_text("model")
    if model is None:
        raise fields.missing("model", repr(context.models.names[0]))
    return model, context.models.find(model)


def _stream_options(fields: Fields, stream: bool) -> bool:
    value = fields.take("stream_options")
    if value is None:
        return False
    if not stream:
        raise bad_field("stream_options", "given without stream=true")
    options = Fields(value, "stream_options")
    usage = options.take_bool("include_usage")
    options.take_bool("include_obfuscation")  # padding against eavesdroppers: none is added
    options.finish()
    return usage


def _logprobs(fields: Fields, chat: bool) -> bool:
    """Return True if log-probabilities are requested; there are only those of the tokens drawn."""
    alternatives = "; log-probabilities are given for the tokens drawn, not for alternatives"
    if not chat:
        return fields.take_int("logprobs", 0, 0, alternatives) is not None
    wanted = fields.take_bool("logprobs")
    if fields.take_int("top_logprobs", 0, 0, alternatives) is not None and not wanted:
        raise bad_field("top_logprobs", "given without logprobs=true")
    return wanted


def _seed(fields: Fields) -> int | None:
    """Return the seed in 32 bits; None: one is drawn, as for -1 in vLLM."""
    seed = fields.take_int("seed", -(2**63), 2**63 - 1)
    return None if seed in (None, -1) else seed % 2**32


def _stop_conditions(fields: Fields, context: ServingContext, chat: bool) -> StopConditions:
    """Return the request's strings and tokens, besides the server's tokens."""
    limit = f" (the most that this server generates is {context.max_new})"
    max_new = fields.take_int("max_tokens", 1, context.max_new, limit)
    if chat:
        newer = fields.take_int("max_completion_tokens", 1, context.max_new, limit)
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
    ids, size = fields.take("stop_token_ids") or [], context.tokenizer.vocab_size
    if not isinstance(ids, list) or len(ids) > MAX_STOPS:
        raise bad_field("stop_token_ids", f"expected an array of at most {MAX_STOPS} token ids")
    if not all(is_integer(item) and 0 <= item < size for item in ids):
        raise bad_field("stop_token_ids", f"expected token ids from 0 to {size - 1}")
    ends = () if fields.take_bool("ignore_eos") else context.stop_tokens
    tokens = tuple(dict.fromkeys([*ends, *map(int, ids)]))
    return StopConditions(
        tokens=tokens, strings=tuple(strings), max_new=context.max_new if max_new is None else max_new
    )


def _sampler(fields: Fields, context: ServingContext) -> Sampler.Config | None:
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
