"""Preferences as input of a policy: pairs of completions of one prompt, and completions judged good or bad alone.

The batches have `sides`, int32: 1 on targets that a chosen or good completion consists of, -1 on those of a rejected or
bad one, 0 on prompts and padding. `weights` are 1 / (examples in the global batch) at the end of each example, else 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input.batches import BatchStream
from axlearn_like.input.chat import Chat, Said, as_messages, read_said, read_system, read_tools
from axlearn_like.input.encoding import field_of, find_field, required_tokenizer
from axlearn_like.input.labelled import labelled_text
from axlearn_like.input.source import IndexedSource, InputError, LabelledReadAhead
from axlearn_like.input.supervised import Contents, SupervisedInput
from axlearn_like.tokenizers.inside import encode_inside
from axlearn_like.tokenizers.protocol import Tokenizer, begin

Ids = Sequence[int] | np.ndarray
Mask = Sequence[bool] | np.ndarray
_ROLES = ("user", "assistant", "assistant")  # roles of the prompt and both completions


class PreferenceStream(BatchStream):
    """Batches of examples whose completions are marked."""

    @override
    def _fill_piece(
        self, source: IndexedSource, index: int, start: int, stop: int, out: dict[str, np.ndarray], learned: np.ndarray
    ) -> None:
        super()._fill_piece(source, index, start, stop, out, learned)
        assert isinstance(source, LabelledReadAhead), "checked by the input"
        others = source.others(index)
        out["positions"][:] = source.labels(index)[1]
        for name in ("sides", "other_sides"):
            if name in out:
                out[name][:-1] = others[name][1:]
        if "other_tokens" in out:
            out["other_tokens"][:], out["other_targets"][:-1] = others["other_tokens"], others["other_tokens"][1:]


class PreferenceInput(SupervisedInput):
    """A `SupervisedInput` of pairs, which stay side by side in one row (see `preference`)."""

    class Config(SupervisedInput.Config):
        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("long", self.long == "refuse", "refuse: a part of a completion is not what was judged")

        @property
        @override
        def dtypes(self) -> dict[str, str]:
            return {**super().dtypes, "sides": "int32"}

        @property
        @override
        def contents(self) -> Contents:
            return "pairs"

    _stream = PreferenceStream
    _labelled = True

    @override
    def check_source(self, source: IndexedSource, name: str) -> None:
        super().check_source(source, name)
        assert isinstance(source, LabelledReadAhead), "checked above"
        others = source.others(0)
        sides = set(np.unique(others["sides"]).tolist()) if "sides" in others else set[int]()
        if not {-1, 1} <= sides or "other_tokens" in others:
            raise InputError(f"{name}: expected pairs with their completions marked, see input.preference")


class UnpairedInput(PreferenceInput):
    """A `SupervisedInput` of single completions that are good or bad (see `unpaired`).

    Arrays `other_tokens`, `other_targets` and `other_sides`, laid out like the others, hold the prompt of each example
    with the completion of another, which KTO's estimate of the divergence needs.
    """

    class Config(PreferenceInput.Config):
        @property
        @override
        def dtypes(self) -> dict[str, str]:
            return {**super().dtypes, **dict.fromkeys(("other_tokens", "other_targets", "other_sides"), "int32")}

        @property
        @override
        def contents(self) -> Contents:
            return "judgements"

    @override
    def check_source(self, source: IndexedSource, name: str) -> None:
        SupervisedInput.check_source(self, source, name)
        if not isinstance(source, LabelledReadAhead) or not {"sides", "other_tokens"} <= source.others(0).keys():
            raise InputError(f"{name}: expected single completions that are good or bad, see input.unpaired")


class EncodedCompletion(NamedTuple):
    """A prompt with its completion, and which tokens of this are the policy's."""

    prompt: np.ndarray
    tokens: np.ndarray
    drawn: np.ndarray  # bool

    @classmethod
    def of(cls, ids: Ids, drawn: Mask) -> "EncodedCompletion":
        """Return a sequence, of whose tokens these were drawn, cut before the first of them."""
        ids, drawn = np.asarray(ids, np.int32), np.asarray(drawn, bool)
        first = int(np.argmax(drawn))
        return cls(ids[:first], ids[first:], drawn[first:])

    def sequence(self, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Return all tokens, and their sides."""
        sides = np.append(np.zeros(len(self.prompt), np.int32), self.drawn * np.int32(side))
        return np.append(self.prompt, self.tokens), sides.astype(np.int32)


def preference(
    chosen: Ids | EncodedCompletion, rejected: Ids | EncodedCompletion, margin: float = 0.0
) -> dict[str, np.ndarray]:
    """Return the example of two sequences of which the first is preferred, by a margin of the score if there is one.

    Sequences without marks of their completions are for reward models only.
    """
    pair = [
        one.sequence(side) if isinstance(one, EncodedCompletion) else (one, None)
        for one, side in ((chosen, 1), (rejected, -1))
    ]
    both = np.concatenate([np.asarray(ids, np.int32) for ids, _ in pair])
    positions = np.concatenate([np.arange(len(ids)) for ids, _ in pair])
    sides = [side for _, side in pair if side is not None]
    marks = {"sides": np.concatenate(sides)} if len(sides) == 2 else {}
    return {**labelled_text(both, margin), "positions": positions.astype(np.int32), **marks}


def unpaired(given: EncodedCompletion, good: bool, other: EncodedCompletion) -> dict[str, np.ndarray]:
    """Return the example of a completion that is good or bad, with the completion of another prompt beside it."""
    tokens, sides = given.sequence(1 if good else -1)
    mismatched, others = given._replace(tokens=other.tokens, drawn=other.drawn).sequence(1)
    size = max(len(tokens), len(mismatched))

    def padded(x: np.ndarray) -> np.ndarray:
        return np.pad(x, (0, size - len(x)))  # padding after a sequence is invisible to it

    arrays = {"sides": padded(sides), "other_tokens": padded(mismatched), "other_sides": padded(others)}
    return {**labelled_text(padded(tokens), 0.0), **arrays}


class Preference(Configurable):
    """A record's prompt with the completion that is preferred, and with the one that is not.

    They are texts, or messages. Where there is no prompt, it is what both begin with: messages, or whole words.
    """

    class Config(ConfigBase["Preference"]):
        prompt: str | None = "prompt"  # field; not needed where both are whole conversations, None: nor for texts
        chosen: str = "chosen"  # field
        rejected: str = "rejected"  # field
        margin: str | None = None  # field; None: 0
        separator: str = "\n"  # text between a prompt and completion that are texts
        chat: bool = False  # texts are what a user and the assistant say, by the chat template
        tools: str | None = None  # field, as that of `Chat`
        system: str | None = None  # field, as that of `Chat`

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None):
        self._tokenizer, self._cfg = required_tokenizer(tokenizer, cfg), cfg

    def encode(self, record: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
        """Return the example of both sequences: bos, prompt, separator, completion, eos; or by the chat template."""
        cfg = self._cfg
        margin = 0.0 if cfg.margin is None else float(field_of(record, cfg.margin, where))
        chosen, rejected = (read_said(record, name, where) for name in (cfg.chosen, cfg.rejected))
        whole = isinstance(chosen, list) and isinstance(rejected, list)
        absent = cfg.prompt is None or (whole and find_field(record, cfg.prompt) is None)
        prompt = None if absent or cfg.prompt is None else read_said(record, cfg.prompt, where)
        if prompt is None or (whole and isinstance(prompt, str)):
            same = _same(chosen, rejected, where)
            if same or prompt is None:
                prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        said: list[Any] = [prompt, chosen, rejected]
        if cfg.chat or any(isinstance(part, list) for part in said):
            said = [as_messages(part, role) for part, role in zip(said, _ROLES, strict=True)]
            said[0] = [*read_system(record, cfg.system, where), *said[0]]
        encode = Completions(self._tokenizer, "" if absent else cfg.separator, read_tools(record, cfg.tools, where))
        return preference(encode(said[0], said[1], where), encode(said[0], said[2], where), margin)


def _same(chosen: str | list[Any], rejected: str | list[Any], where: str) -> int:
    """Return how much of both is their prompt: the messages that both begin with, or the characters of whole words."""
    if type(chosen) is not type(rejected):
        raise InputError(f"{where}: expected chosen and rejected to be both texts or both messages")
    pairs = zip(chosen, rejected, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)) - 1)
    if isinstance(chosen, str):
        return max((at for at, letter in enumerate(chosen[: same + 1]) if letter.isspace()), default=0)
    return same


class UnpairedPreference(Configurable):
    """A record's prompt with one completion, and whether it is a good one."""

    class Config(ConfigBase["UnpairedPreference"]):
        prompt: str = "prompt"  # field
        completion: str = "completion"  # field
        label: str = "label"  # field: true if it is good
        separator: str = "\n"  # text between prompt and completion

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None):
        self._tokenizer, self._cfg = required_tokenizer(tokenizer, cfg), cfg

    def encode(self, record: Mapping[str, Any], where: str) -> tuple[EncodedCompletion, bool]:
        """Return the completion, and whether it is good; `joined` makes examples of all."""
        cfg = self._cfg
        prompt, answer = (read_said(record, name, where) for name in (cfg.prompt, cfg.completion))
        label = field_of(record, cfg.label, where)
        if label not in (True, False):
            raise InputError(f"{where}: expected {cfg.label!r} to be true or false, got {label!r:.60}")
        return Completions(self._tokenizer, cfg.separator)(prompt, answer, where), bool(label)

    def joined(self, records: Sequence[tuple[EncodedCompletion, bool]]) -> list[dict[str, np.ndarray]]:
        """Return the examples, each with the completion of another prompt, half of all records away.

        Records of one prompt often follow each other, so that the next record's completion may well fit.
        """
        prompts = [completion.prompt.tobytes() for completion, _ in records]
        if len(set(prompts)) < 2:
            raise InputError("UnpairedPreference: expected records of two prompts or more, to mismatch completions")
        other = len(records)  # the nearest from here on whose prompt is another; all are looked at twice, as in a ring
        nearest, size = [0] * len(records), len(records)
        for at in range(2 * size - 2, -1, -1):
            other = at + 1 if prompts[(at + 1) % size] != prompts[at % size] else other
            nearest[at % size] = other % size
        partners = [(at + size // 2) % size for at in range(size)]
        partners = [far if prompts[far] != prompts[at] else nearest[at] for at, far in enumerate(partners)]
        return [unpaired(*record, records[partner][0]) for record, partner in zip(records, partners, strict=True)]


class Completions:
    """Encoder of prompts with completions, both texts or both messages."""

    def __init__(self, tokenizer: Tokenizer, separator: str, tools: list[Any] | None = None):
        self._tokenizer, self._separator, self._tools = tokenizer, separator, tools

    def __call__(self, prompt: Said, answer: Said, where: str) -> EncodedCompletion:
        """Return the tokens of both; InputError, with `where`, for a text and messages."""
        if isinstance(prompt, list) and isinstance(answer, list):
            chat = Chat.Config().build(tokenizer=self._tokenizer)
            said = chat.encode_messages([*prompt, *answer], self._tools, where, first=len(prompt))
            return EncodedCompletion.of(*said)
        if isinstance(prompt, list) or isinstance(answer, list):
            raise InputError(f"{where}: expected prompt and completion to be both texts or both messages")
        given = [*begin(self._tokenizer), *self._tokenizer.encode(prompt + self._separator)]
        drawn = [*encode_inside(self._tokenizer, answer, given), self._tokenizer.eos]
        return EncodedCompletion(np.asarray(given, np.int32), np.asarray(drawn, np.int32), np.ones(len(drawn), bool))
