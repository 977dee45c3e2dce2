"""`POST /inference/v1/generate`: token ids in, token ids and log-probabilities out, as vLLM's endpoint for trainers.

Its clients render and parse chats themselves, such as the training client of the library verifiers. Log-probabilities
are those of the distribution drawn from.
"""

from collections.abc import Mapping
from typing import Any

from rl.serving.errors import bad_field
from rl.serving.input.fields import Fields

Json = dict[str, Any]
# Fields that change nothing here: there is no text in an answer, and the cache of prefixes changes none.
_IGNORED = ("cache_salt", "priority")
_IGNORED_OF_SAMPLING = (
    "detokenize",
    "include_stop_str_in_output",
    "output_kind",
    "routed_experts_prompt_start",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
# Fields that are not supported, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"features": (), "content_parts": ([],), "stream": (False,)}


def as_completion(body: Any) -> Json:
    """Return the body of a completion, with the fields of `sampling_params` (ApiError: 400, names the field)."""
    fields = Fields(body)
    completion = {name: value for name in ("model", "request_id") if (value := fields.take(name)) is not None}
    if (tokens := fields.take("token_ids")) is None:
        raise fields.missing("token_ids", "an array of token ids")
    if not isinstance(tokens, list) or any(isinstance(one, list | str) for one in tokens):
        raise bad_field("token_ids", "expected an array of token ids, of one prompt")
    sampling = fields.take("sampling_params") or {}
    Fields(sampling, "sampling_params")
    fields.finish((*_IGNORED, "return_token_ids"), _NEUTRAL)
    rest: Json = {name: value for name, value in sampling.items() if name not in _IGNORED_OF_SAMPLING}
    if rest.get("logprobs") == 1:
        rest["logprobs"] = 0
    rest |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs_mode": "processed_logprobs"}
    return {**rest, **completion, "prompt": tokens}


class GenerateWriter:
    """The answer, made of the body of a completion; `request` is the body that asked for it."""

    names: Mapping[str, str] = {"prompt": "token_ids"}  # names of the completion fields here

    def __init__(self, request: Mapping[str, Any]):
        self._request = request

    def whole(self, completion: Json) -> Json:
        """Return the body of the answer."""
        choices = [
            {
                "index": choice["index"],
                "token_ids": choice["token_ids"],
                "finish_reason": choice["finish_reason"],
                "logprobs": _content(choice["logprobs"]),
            }
            for choice in completion["choices"]
        ]
        name = self._request.get("request_id") or completion["id"]
        return {"request_id": name, "choices": choices, "usage": completion["usage"]}


def _content(logprobs: Json | None) -> Json | None:
    if logprobs is None:
        return None
    tops = logprobs["top_logprobs"] or [{}] * len(logprobs["tokens"])
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    return {
        "content": [
            {
                "token": token,
                "logprob": value,
                "top_logprobs": [{"token": name, "logprob": other} for name, other in top.items()],
            }
            for token, value, top in rows
        ]
    }
