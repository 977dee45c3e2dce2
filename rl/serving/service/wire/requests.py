"""JSON bodies of requests, read into plain values. Errors name the field."""

import dataclasses
import hashlib
import secrets
from typing import Any, NamedTuple

import numpy as np

from rl.protocol.messages import Prompt
from rl.rollout.decoding.scores import MOST
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import COLDEST, Sampler
from rl.serving.errors import bad_field
from rl.serving.input.fields import Fields, is_integer, text
from rl.serving.input.prompts import prompt_id
from rl.serving.service.durable.folders import check_name
from rl.serving.service.messages import (
    AdamParams,
    BaseFacts,
    LoraSpec,
    SavedKind,
    SaveState,
    ServiceError,
)

LARGEST = 2**63 - 1
IGNORED = ("type", "user_metadata", "weights_access_token", "ttl_seconds", "kind")  # fields that change nothing here
# Fields of `asample` that are not supported, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "topk_sample_logprobs": (0,),
    "target_prompt_logprobs": (),
    "prompt_alt_tokens_k": (0,),
    "prompt_logprobs_last_n": (),
    "record_stability_info": (False,),
}
_MOST_SAMPLES = 1024
_MOST_STOPS = 64
_FAMILY = "service"


class PromptScores(NamedTuple):
    """Wishes for scores of a prompt: the log-probabilities of its tokens, and so many likeliest at each place."""

    logprobs: bool
    top: int


def required_text(fields: Fields, name: str, expected: str) -> str:
    """Return a string that must be there."""
    value = fields.take_text(name)
    if value is None:
        raise fields.missing(name, expected)
    return value


def required_int(fields: Fields, name: str, low: int = 0) -> int:
    """Return an integer, at least `low`, that must be there."""
    value = fields.take_int(name, low, LARGEST)
    if value is None:
        raise fields.missing(name, f"an integer from {low}")
    return value


def check_base(name: str | None, base: BaseFacts) -> None:
    """Refuse another base model than the service's; None is no name."""
    if name is not None and name not in (base.name, base.tokenizer):
        raise ServiceError(f"base_model: {name[:200]!r} is not here; this service has {base.name!r}")


def check_optimizer(value: Any) -> None:
    """Refuse the configuration of another optimizer than AdamW."""
    kind = "adamw" if value is None else value.get("type") if isinstance(value, dict) else value
    if kind != "adamw":
        raise bad_field("optimizer_config", f"got {str(kind)[:80]!r}; expected type 'adamw'")


def lora_spec(value: Any, model: str, base: BaseFacts) -> LoraSpec:
    """Return the adapter of `lora_config`, without a seed with one of the model's id (ApiError: names the field)."""
    fields = Fields({} if value is None else value, "lora_config")
    rank = fields.take_int("rank", 1, base.max_rank, f", the largest rank of this service's {base.name!r}")
    seed = fields.take_int("seed", -LARGEST - 1, LARGEST)
    parts = [fields.take_bool(f"train_{part}", True) for part in ("attn", "mlp", "unembed")]
    fields.finish()
    if not any(parts):
        raise bad_field("lora_config", "nothing to train; expected one of train_attn, train_mlp, train_unembed")
    if rank is None:
        raise fields.missing("rank", f"an integer from 1 to {base.max_rank}")
    return LoraSpec(rank, int.from_bytes(hashlib.sha256(model.encode()).digest()[:4]) if seed is None else seed, *parts)


def adam_params(fields: Fields) -> AdamParams:
    """Return the settings of an optimizer step; the slots have their limits (ApiError: names the field)."""
    fields.refuse("optimizer_params", (), "; this service has AdamW (adam_params) alone")
    settings, most = Fields(fields.take("adam_params") or {}, "adam_params"), float(2**100)
    found = {field.name: settings.take_number(field.name, -most, most) for field in dataclasses.fields(AdamParams)}
    settings.finish()
    return AdamParams(**{"learning_rate": 1e-4, **{name: one for name, one in found.items() if one is not None}})


def save_state(fields: Fields, kind: SavedKind, seq: int) -> SaveState:
    """Return what to save, and under which name; without one, that of the request's number."""
    name, overwrite = fields.take_text("path"), kind == "weights" and fields.take_bool("overwrite")
    return SaveState(check_name(name or f"{seq:06d}"), kind, overwrite)


def sample_request(fields: Fields, base: BaseFacts) -> tuple[Request, PromptScores]:
    """Return the request of an `asample` body, and what it wants to know of its prompt (ApiError: names the field)."""
    tokens = _prompt(fields.take("prompt"), base)
    wanted = Fields(fields.take("sampling_params") or {}, "sampling_params")
    temperature = wanted.take_number("temperature", 0.0, 100.0)
    if temperature is not None and 0 < temperature < COLDEST:
        raise bad_field(
            "sampling_params.temperature", f"got {temperature:g}; expected 0 (greedy) or {COLDEST:g} and more"
        )
    top_p = wanted.take_number("top_p", 0.0, 1.0, open_low=True)
    room = base.context_length - len(tokens)
    max_tokens = wanted.take_int("max_tokens", 1, max(room, 1), f", the room after {len(tokens)} tokens of the prompt")
    if room < 1:
        raise bad_field("prompt", f"has {len(tokens)} tokens; {base.context_length} of prompt and answer are the most")
    top_k, seed = wanted.take_int("top_k", -1, LARGEST), wanted.take_int("seed", -LARGEST - 1, LARGEST)
    ids, texts = _stops(wanted.take("stop"), base)
    scores = PromptScores(fields.take_bool("prompt_logprobs"), fields.take_int("topk_prompt_logprobs", 0, MOST) or 0)
    request = Request(
        Prompt(prompt_id(tokens), _FAMILY, tokens),
        samples=fields.take_int("num_samples", 1, _MOST_SAMPLES) or 1,
        seed=(secrets.randbits(32) if seed is None else seed) % 2**32,
        sampler=Sampler.Config(
            temperature=1.0 if temperature is None else temperature,
            top_k=top_k if top_k is not None and top_k > 0 else None,
            top_p=1.0 if top_p is None else top_p,
        ),
        stop=StopConditions(tuple(dict.fromkeys((*base.stop_tokens, *ids))), texts, max_tokens),
        prompt_scores=any(scores),
    )
    wanted.finish()
    fields.finish(IGNORED, NEUTRAL)
    return request, scores


def _prompt(value: Any, base: BaseFacts) -> np.ndarray:
    chunks = value.get("chunks") if isinstance(value, dict) else None
    if not isinstance(chunks, list):
        raise bad_field("prompt", "expected an object with chunks of tokens")
    parts = [np.zeros(0, np.int32)]
    for index, chunk in enumerate(chunks):
        tokens = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(tokens, list):
            raise bad_field(f"prompt.chunks[{index}]", "expected tokens of text")
        parts.append(_token_ids(tokens, f"prompt.chunks[{index}].tokens", base))
    prompt = np.concatenate(parts)
    if not len(prompt):
        raise bad_field("prompt", "has no tokens; expected at least one")
    return prompt


def _token_ids(values: list[Any], where: str, base: BaseFacts) -> np.ndarray:
    for value in values:
        if not is_integer(value) or not 0 <= value < base.vocab_size:
            raise bad_field(where, f"got {str(value)[:40]}; expected token ids from 0 to {base.vocab_size - 1}")
    return np.asarray(values, np.int32)


def _stops(value: Any, base: BaseFacts) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the token ids and the texts that end a sample."""
    values = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(values, list) or len(values) > _MOST_STOPS:
        raise bad_field("sampling_params.stop", f"expected a text, or up to {_MOST_STOPS} texts or token ids")
    if not all(isinstance(one, str) for one in values):
        return tuple(int(token) for token in _token_ids(values, "sampling_params.stop", base)), ()
    texts = tuple(text(one, "sampling_params.stop") for one in values)
    if "" in texts:
        raise bad_field("sampling_params.stop", "an empty text ends nothing")
    return (), texts
