"""Bodies of `/v1/completions` and `/v1/chat/completions`, and the engine's requests for them.

Fields of the protocol that this server does not have are refused by name, unless the value asks for nothing: a field
that is ignored would change answers silently.
"""

import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rl.protocol.messages import Prompt
from rl.rollout.decoding.grammar import Grammar
from rl.rollout.decoding.scores import MODES, MOST, ScoreMode
from rl.rollout.request import Request
from rl.serving.context import ServingContext
from rl.serving.errors import bad_field
from rl.serving.input.fields import Fields, shown
from rl.serving.input.grammars import read_grammar, read_tool_choice
from rl.serving.input.prompts import prompt_id, read_chat, read_prompts
from rl.serving.input.sampling import read_sampler, read_seed, read_stop
from rl.serving.output.text import CallStyle

FAMILY = "served"  # family of served prompts

# Fields of the protocol that change nothing here and may be given.
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "request_id", "session_id")
# Fields that are not supported, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "allowed_token_ids": (),
    "logprob_token_ids": (),
    "bad_words": ([],),
    "watermarking": (False,),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "stream_interval": (1,),
    "return_token_offsets": (False,),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
}
_NEUTRAL_COMPLETION = {"suffix": ("",), "prompt_embeds": ()}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "return_prompt_text": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """The work of one HTTP request; prompt `i`'s sample `j` is choice `i * samples + j`."""

    requests: tuple[Request, ...]
    model: str
    chat: bool
    stream: bool = False
    usage_in_stream: bool = False  # a chunk with it ends a stream; `continuous_usage`: all chunks have it
    continuous_usage: bool = False
    logprobs: int | None = None  # alternatives of each token; None: no log-probabilities
    as_ids: bool = False  # words of log-probabilities are `token_id:N`
    prompt_logprobs: int | None = None  # alternatives of each token of the prompt, likewise
    token_ids: bool = False
    stops: tuple[str, ...] = ()
    include_stop: bool = False  # True: the end of a text is part of it
    echo: tuple[str, ...] = ()  # texts of the prompts, if they are part of the answers
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
    """Check a decoded body, all of it, before anything is generated (ApiError: 400 or 404, names the field)."""
    fields = Fields(body)
    if (model := fields.take_text("model")) is None:
        raise fields.missing("model", repr(context.models.names[0]))
    adapter = context.models.find(model)
    tools, style, grammar = (), None, None
    if chat:
        tokens, tools, style, grammar = _read_chat(fields, context)
        prompts = [tokens]
    else:
        prompts = read_prompts(fields, context)
        grammar = read_grammar(fields, context)
    samples = fields.take_int("n", 1, context.max_samples) or 1
    if samples * len(prompts) > context.max_samples:
        raise bad_field(
            "n", f"{samples} completions of {len(prompts)} prompts; this server makes at most {context.max_samples}"
        )
    stream = fields.take_bool("stream")
    logprobs = _logprobs(fields, chat)
    echoed = prompts if not chat and fields.take_bool("echo") else []
    echo = tuple(context.tokenizer.decode(tokens.tolist()) for tokens in echoed)
    if stream and (logprobs.prompt is not None or echo and logprobs.alternatives is not None):
        raise bad_field("stream", "log-probabilities of a prompt are not given in a stream; leave one of them out")
    prompt_scores = logprobs.prompt is not None or bool(echo) and logprobs.alternatives is not None
    stop = read_stop(fields, context, chat, least=0 if prompt_scores or echo else 1)
    seed, sampler = read_seed(fields), read_sampler(fields, context)
    deadline = fields.take_number("deadline", 0, context.deadline, open_low=True)
    usage_in_stream, continuous_usage = _stream_options(fields, stream)
    token_ids, include_stop = fields.take_bool("return_token_ids"), fields.take_bool("include_stop_str_in_output")
    fields.finish(_IGNORED, _NEUTRAL | (_NEUTRAL_CHAT if chat else _NEUTRAL_COMPLETION))
    requests = [
        Request(
            prompt=Prompt(prompt_id(tokens), FAMILY, tokens),
            samples=samples,
            seed=secrets.randbits(32) if seed is None else seed,
            sampler=sampler,
            stop=stop,
            deadline=context.deadline if deadline is None else deadline,
            adapter=adapter,
            scores=logprobs.mode,
            prompt_scores=prompt_scores or stop.max_new_tokens == 0,
            grammar=grammar,
        )
        for tokens in prompts
    ]
    return GenerationJob(
        requests=tuple(requests),
        model=model,
        chat=chat,
        stream=stream,
        usage_in_stream=usage_in_stream,
        continuous_usage=continuous_usage,
        logprobs=logprobs.alternatives,
        as_ids=logprobs.as_ids,
        prompt_logprobs=logprobs.prompt,
        token_ids=token_ids,
        stops=stop.strings,
        include_stop=include_stop,
        echo=echo,
        tools=tools,
        call_style=style,
    )


def _read_chat(
    fields: Fields, context: ServingContext
) -> tuple[np.ndarray, tuple[str, ...], CallStyle | None, Grammar | None]:
    """Return the tokens of a conversation, the functions whose calls are told apart, their style, and a grammar."""
    tokens, tools = read_chat(fields, context)
    functions = [tool.get("function", tool) for tool in tools]
    names = tuple(name for one in functions if isinstance(one, dict) and isinstance(name := one.get("name"), str))
    choice = read_tool_choice(fields, names)
    style = context.template.call_style or ("bare" if choice.forced else None)
    grammar = read_grammar(fields, context, choice.forced, tools, style or "bare")
    names = names if choice.told_apart else ()
    return tokens, names, style if names else None, grammar


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Return True for usage at the end of a stream, and for usage in each chunk."""
    value = fields.take("stream_options")
    if value is None:
        return False, False
    if not stream:
        raise bad_field("stream_options", "given without stream=true")
    options = Fields(value, "stream_options")
    continuous = options.take_bool("continuous_usage_stats")
    usage = options.take_bool("include_usage") or continuous
    options.take_bool("include_obfuscation")  # padding against eavesdroppers: none is added
    options.finish()
    return usage, continuous


class _Logprobs(NamedTuple):
    """The log-probabilities that a request asks for: alternatives of each token, or None."""

    alternatives: int | None
    prompt: int | None
    mode: ScoreMode | None  # None: those of the distribution drawn from, without alternatives
    as_ids: bool


def _logprobs(fields: Fields, chat: bool) -> _Logprobs:
    wanted = fields.take_bool("logprobs") if chat else True
    name = "top_logprobs" if chat else "logprobs"
    alternatives = fields.take_int(name, 0, MOST)
    if alternatives is not None and not wanted:
        raise bad_field(name, "given without logprobs=true")
    if chat and wanted:
        alternatives = alternatives or 0
    prompt, as_ids = fields.take_int("prompt_logprobs", 0, MOST), fields.take_bool("return_tokens_as_token_ids")
    mode = fields.take("logprobs_mode")
    if mode is not None and mode not in MODES:
        raise bad_field("logprobs_mode", f"got {shown(mode)}; expected {' or '.join(map(repr, MODES))}")
    if alternatives is None:
        mode = None
    elif mode is None and alternatives:
        mode = "raw_logprobs"
    elif mode == "processed_logprobs" and not alternatives:
        mode = None
    return _Logprobs(alternatives, prompt, mode, as_ids)
