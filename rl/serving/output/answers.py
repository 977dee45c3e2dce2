"""Response bodies: choices, chunks of a stream, log-probabilities and usage, for completions and for chats.

Every sampled token counts and has a log-probability, the stop token too, as in training; the text of that one is empty.
The text of a stream's chunks, joined, is the text of the whole answer.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from axlearn_like.tokenizers.protocol import Tokenizer, completion_text
from rl.protocol.messages import Rollout
from rl.rollout.decoding.scores import TokenScores
from rl.rollout.request import RequestOutput
from rl.serving.errors import ApiError
from rl.serving.input.request import GenerationJob
from rl.serving.output.logprobs import LogprobWriter, values_of
from rl.serving.output.text import CallStream, TextStream, ToolCall

Json = dict[str, Any]


class Answer:
    """The response to one generation, choice by choice."""

    def __init__(self, generation: GenerationJob, tokenizer: Tokenizer, model: str, version: int):
        """`version` of the weights, at the beginning."""
        self._generation, self._tokenizer = generation, tokenizer
        count = len(generation.requests) * generation.samples
        self._choices = [_Choice(i, generation, tokenizer) for i in range(count)]
        self._head: Json = {
            "id": f"{'chatcmpl' if generation.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"weights-{version}",
        }

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.count for choice in self._choices)

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the body of a response that is no stream, from the results of all requests."""
        choices: list[Json] = []
        for output in outputs:
            for rollout, scores in zip(output.rollouts, output.scores, strict=True):
                choices.append(self._choices[len(choices)].whole(rollout, scores, output.prompt_scores))
        kind = "chat.completion" if self._generation.chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices, "usage": self._usage()}
        if self._generation.chat and self._generation.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._choices[0].prompt_logprobs(outputs[0].prompt_scores)
        return body

    def opening(self) -> list[Json]:
        """Return the chunks before any token: a chat names the role, and an echo is the prompt."""
        if not self._generation.chat:
            pieces = [choice.echo() for choice in self._choices] if self._generation.echo else []
            return [self._chunk([piece]) for piece in pieces]
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([{"index": c.index, "delta": delta, "finish_reason": None}]) for c in self._choices]

    def more(
        self, index: int, sample: int, tokens: np.ndarray, logprobs: np.ndarray, scores: TokenScores | None = None
    ) -> list[Json]:
        """Return the chunk for more tokens of a sample of request `index`; none if they give no text yet."""
        choice = self._choices[index * self._generation.samples + sample]
        piece = choice.more(tokens, logprobs, scores)
        return [] if piece is None else [self._chunk([piece])]

    def end(self, index: int, output: RequestOutput) -> Iterator[Json]:
        """Yield the last chunks of request `index`."""
        for rollout, scores in zip(output.rollouts, output.scores, strict=True):
            choice = self._choices[index * self._generation.samples + rollout.sample_id]
            rest = slice(choice.count, None)  # tokens not yet passed to the callback
            some = None if scores is None else scores[rest]
            yield from self.more(index, rollout.sample_id, rollout.tokens[rest], rollout.logprobs[rest], some)
            for piece in choice.end(rollout):
                yield self._chunk([piece])

    def usage_chunk(self) -> Json:
        """Return the chunk after the last one, for a client that asked for it."""
        return {**self._chunk([]), "usage": self._usage()}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._generation.chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        if self._generation.usage_in_stream:
            chunk["usage"] = self._usage() if self._generation.continuous_usage else None
        return chunk

    def _usage(self) -> Json:
        prompt, completion = self._generation.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class _Choice:
    def __init__(self, index: int, generation: GenerationJob, tokenizer: Tokenizer):
        self.index, self.count = index, 0
        self._sent = 0  # calls in chunks so far
        self._generation, self._tokenizer = generation, tokenizer
        request = generation.requests[index // generation.samples]
        self._prompt = request.prompt.tokens.tolist()
        self._stop_tokens = frozenset(() if generation.include_stop or request.stop is None else request.stop.tokens)
        free = 0 if request.stop is None else request.stop.min_new_tokens
        included: Json = {"included": generation.include_stop, "free": free}
        self._text = TextStream(partial(completion_text, tokenizer), generation.stops, **included)
        self._writer = LogprobWriter(tokenizer, generation.logprobs or 0, generation.as_ids)
        style = generation.call_style
        self._calls = None if style is None else CallStream(style, generation.tools)

    def whole(self, rollout: Rollout, scores: TokenScores | None, of_prompt: TokenScores | None) -> Json:
        said, logprobs = self._push(rollout.tokens, rollout.logprobs, scores, of_prompt)
        said += self._text.finish()
        body: Json = {"text": self._echoed + said}
        if self._generation.chat:
            body = {"message": {"role": "assistant", "content": None, **self._body(said, final=True)}}
        body = {"index": self.index, **body, "logprobs": logprobs, "finish_reason": self._reason(rollout)}
        if self._generation.prompt_logprobs is not None and not self._generation.chat:
            body["prompt_logprobs"] = self.prompt_logprobs(of_prompt)
        return self._with_ids(body, rollout.tokens)

    def prompt_logprobs(self, scores: TokenScores | None) -> list[Json | None]:
        writer = LogprobWriter(self._tokenizer, self._generation.prompt_logprobs or 0)
        return writer.prompt(self._prompt, scores)

    def echo(self) -> Json:
        return self._piece({"content": self._echoed}, None, None)

    @property
    def _echoed(self) -> str:
        return self._generation.echo[self.index // self._generation.samples] if self._generation.echo else ""

    def more(self, tokens: np.ndarray, logprobs: np.ndarray, scores: TokenScores | None = None) -> Json | None:
        said, written = self._push(tokens, logprobs, scores)
        body = self._body(said)
        if not body and (written is None and not self._generation.token_ids or not len(tokens)):
            return None
        return self._with_ids(self._piece(body, written, None), tokens)

    def end(self, rollout: Rollout) -> list[Json]:
        rest = self._body(self._text.finish(), final=True)
        reason = self._reason(rollout)
        if not self._generation.chat:
            return [self._piece(rest, None, reason)]
        last: Json = {"index": self.index, "delta": {}, "finish_reason": reason}
        return [*([self._piece(rest, None, None)] if rest else []), last]

    def _piece(self, body: Json, logprobs: Json | None, reason: str | None) -> Json:
        said: Json = {"text": body.get("content", "")}
        if self._generation.chat:
            calls = [{"index": self._sent + i, **call} for i, call in enumerate(body.get("tool_calls", ()))]
            self._sent += len(calls)
            said = {"delta": {**body, "tool_calls": calls} if calls else body or {"content": ""}}
        return {"index": self.index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _body(self, said: str, *, final: bool = False) -> Json:
        """Return new text as the fields of a message: `content` and `tool_calls`, as far as there are any."""
        if self._calls is None:
            return {"content": said} if said or final and not self._generation.stream else {}
        parts = [*self._calls.push(said), *(self._calls.finish() if final else [])]
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [_call(part) for part in parts if isinstance(part, ToolCall)]
        return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}

    def _reason(self, rollout: Rollout) -> str | None:
        reason = rollout.finish_reason if rollout.finish_reason in ("stop", "length") else None
        return "tool_calls" if reason == "stop" and self._calls is not None and self._calls.count else reason

    def _push(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        scores: TokenScores | None,
        of_prompt: TokenScores | None = None,
    ) -> tuple[str, Json | None]:
        """Return new text and, if requested, the log-probabilities of new tokens in the form of the endpoint."""
        ids = [int(token) for token in tokens]
        self.count += len(ids)
        texts = [[] if token in self._stop_tokens else [token] for token in ids]  # a stop token is the last
        if self._generation.logprobs is None:
            return self._text.push([token for text in texts for token in text]), None
        values = values_of(logprobs, scores)
        if self._generation.chat:
            return "".join(map(self._text.push, texts)), self._writer.chat(ids, values, scores)
        said, offsets = "", []
        for text in texts:
            offsets.append(len(self._echoed) + self._text.length)
            said += self._text.push(text)
        if not self._generation.echo:
            return said, self._writer.completion(ids, values, offsets, scores)
        return said, self._with_prompt(ids, values.tolist(), offsets, scores, of_prompt)

    def _with_prompt(
        self,
        ids: list[int],
        values: list[float],
        offsets: list[int],
        scores: TokenScores | None,
        of_prompt: TokenScores | None,
    ) -> Json:
        """Return the log-probabilities of prompt and completion, whose offsets are those in both."""
        text, before = TextStream(partial(completion_text, self._tokenizer)), []
        for token in self._prompt:
            before.append(text.length)
            text.push([token])
        blank = text.length - len(self._echoed)  # blank that some tokenizers put before a text
        before = [max(0, at - blank) for at in before]
        known = [] if of_prompt is None else of_prompt.logprobs.tolist()
        joined = [one for one in (of_prompt, scores) if one is not None]
        both = joined[0] + joined[1] if len(joined) == 2 else joined[0] if joined else None
        return self._writer.completion([*self._prompt, *ids], [None, *known, *values], before + offsets, both)

    def _with_ids(self, body: Json, tokens: np.ndarray) -> Json:
        if not self._generation.token_ids:
            return body
        return {**body, "token_ids": [int(token) for token in tokens]}


def problem(rollouts: Sequence[Rollout]) -> ApiError | None:
    """Return the error of rollouts that failed, were aborted or met the deadline; None for an answer."""
    reasons = {rollout.finish_reason for rollout in rollouts}
    count = sum(len(rollout.tokens) for rollout in rollouts)
    if "error" in reasons:
        return ApiError(500, f"generation failed after {count} tokens", code="generation_failed")
    if "abort" in reasons:
        return ApiError(503, f"generation was aborted after {count} tokens", code="aborted")
    if "deadline" in reasons:
        return ApiError(504, f"the deadline passed after {count} tokens", code="deadline")
    return None


def _call(call: ToolCall) -> Json:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call._asdict()}
