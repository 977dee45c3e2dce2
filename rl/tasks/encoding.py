"""Prompts and answers of problems as tokens; the same for SFT and RL."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from axlearn_like.tokenizers.chat import encode_answered, encode_chat
from axlearn_like.tokenizers.inside import encode_inside
from axlearn_like.tokenizers.protocol import Tokenizer, begin
from rl.protocol.messages import Problem
from rl.protocol.segments import SegmentedText, TokenSegment

_SEPARATOR = "\n"  # separator of question and answer: one token, and no question needs an escape


def encode_prompt(question: str, tokenizer: Tokenizer) -> np.ndarray:
    """Encode a question, int32; the same for SFT and RL.

    As what a user says and the opening of the answer, if the tokenizer has a chat template; else as bos, its text and a
    newline.
    """
    return _encode(({"role": "user", "content": question},), question, tokenizer, None)


def encode_segments(text: SegmentedText, tokenizer: Tokenizer) -> tuple[np.ndarray, tuple[TokenSegment, ...]]:
    """Encode a question in segments, int32, and return its segments as tokens.

    With a chat template the question is encoded as a whole, as `encode_prompt` does, and there are no segments.
    """
    if tokenizer.chat_template is not None:
        return encode_prompt(text, tokenizer), ()
    first, last = begin(tokenizer), tokenizer.encode(_SEPARATOR)
    ids, segments = encode_parts(text, tokenizer)
    ends = (TokenSegment(len(first)),) if first else (), (TokenSegment(len(last)),)
    return np.asarray([*first, *ids, *last], np.int32), (*ends[0], *segments, *ends[1])


def encode_parts(text: SegmentedText, tokenizer: Tokenizer) -> tuple[list[int], tuple[TokenSegment, ...]]:
    """Encode segments, each by itself, so that the same text has the same tokens in all prompts."""
    encoded = [(encode_inside(tokenizer, one.text), one.placeholder) for one in text.segments]
    segments = tuple(TokenSegment(len(ids), placeholder) for ids, placeholder in encoded if ids)
    return [token for ids, _ in encoded for token in ids], segments


def encode_problem(problem: Problem, tokenizer: Tokenizer) -> np.ndarray:
    """Encode the prompt of a problem: its messages, if it has any, else its question as `encode_prompt`.

    Without a chat template, the texts of messages follow each other, a blank line between them.
    """
    messages = messages_of(problem)
    prompt = _encode(messages, "\n\n".join(message["content"] for message in messages), tokenizer, problem.tools)
    return prompt[:1] if problem.asked_by_environment else prompt


def encode_solution(problem: Problem, answer: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Encode the prompt of a problem as `encode_problem`, and an answer to it with its end, as a policy draws them."""
    if tokenizer.chat_template is None:
        prompt = encode_problem(problem, tokenizer)
        drawn = [*encode_inside(tokenizer, answer, prompt.tolist()), tokenizer.eos]
        return prompt, np.asarray(drawn, np.int32)
    given, drawn = encode_answered(tokenizer, messages_of(problem), answer, tools=problem.tools)
    return np.asarray(given, np.int32), np.asarray(drawn, np.int32)


def messages_of(problem: Problem) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a problem: its own, or its question as the user's."""
    return tuple(problem.messages or ({"role": "user", "content": problem.question},))


def _encode(
    messages: Sequence[Mapping[str, Any]], text: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None
) -> np.ndarray:
    if tokenizer.chat_template is not None:
        ids = encode_chat(tokenizer, messages, tools=tools, add_generation_prompt=True)
    else:
        ids = [*begin(tokenizer), *tokenizer.encode(text + _SEPARATOR)]
    return np.asarray(ids, dtype=np.int32)
