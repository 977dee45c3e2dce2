"""Bodies of `/v1/completions` and `/v1/chat/completions` to requests of the engine.

What the protocol has and this server has not is refused by name, unless the value asks for nothing: an ignored field
would change answers without a word.
"""

import secrets
from dataclasses import dataclass
from typing import Any

from rl.roles.messages import Prompt
from rl.rollout.request import Request
from rl.serving.context import ServingContext
from rl.serving.errors import ApiError, bad_field
from rl.serving.fields import Fields, shown
from rl.serving.prompts import prompt_id, read_chat, read_prompts
from rl.serving.rules import read_sampler, read_stop_rules

FAMILY = "served"  # of the prompts, where training has its task families

# Fields of the protocol that change nothing here and may be given.
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")
# Fields that may only say what happens anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}
_NEUTRAL_COMPLETION = {"echo": (False,), "suffix": ("",), "best_of": (1,)}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
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
class Generation:
    """What one HTTP request asks for; prompt `i`'s sample `j` is choice `i * samples + j`."""

    requests: tuple[Request, ...]
    chat: bool
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    token_ids: bool
    stops: tuple[str, ...]

    @property
    def samples(self) -> int:
        return self.requests[0].samples

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt.tokens) for request in self.requests)


def parse(body: Any, served: ServingContext, *, chat: bool) -> Generation:
    """Checks a decoded body, whole, before anything is generated.

    Raises:
        ApiError: 400 (404 for another model), naming the field.
    """
    fields = Fields(body)
    _check_model(fields, served)
    prompts = [read_chat(fields, served)] if chat else read_prompts(fields, served)
    samples = fields.take_int("n", 1, served.max_samples) or 1
    if samples * len(prompts) > served.max_samples:
        raise bad_field(
            "n", f"{samples} completions of {len(prompts)} prompts; this server makes at most {served.max_samples}"
        )
    seed = fields.take_int("seed", 0, 2**32 - 1)
    stop = read_stop_rules(fields, served, chat)
    sampler = read_sampler(fields, served)
    deadline = fields.take_number("deadline", 0, served.deadline, open_low=True)
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
            deadline=served.deadline if deadline is None else deadline,
        )
        for tokens in prompts
    ]
    return Generation(
        requests=tuple(requests),
        chat=chat,
        stream=stream,
        usage_in_stream=usage_in_stream,
        logprobs=logprobs,
        token_ids=token_ids,
        stops=stop.strings,
    )


def _check_model(fields: Fields, served: ServingContext) -> None:
    model = fields.take_text("model")
    if model is None:
        raise fields.missing("model", repr(served.model))
    if model != served.model:
        raise ApiError(
            404,
            f"model: no model {shown(model)} here; this server has {served.model!r}",
            param="model",
            code="model_not_found",
        )


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
    """Whether log-probabilities are wanted; those of the tokens drawn are all there is."""
    alternatives = "; log-probabilities are given for the tokens drawn, not for alternatives"
    if not chat:
        return fields.take_int("logprobs", 0, 0, alternatives) is not None
    wanted = fields.take_bool("logprobs")
    if fields.take_int("top_logprobs", 0, 0, alternatives) is not None and not wanted:
        raise bad_field("top_logprobs", "given without logprobs=true")
    return wanted
