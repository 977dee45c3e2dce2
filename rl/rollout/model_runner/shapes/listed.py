"""The programs that a server compiles ahead: a short list, and the choice among those that are ready.

Every request fits one of them, whatever arrives in which order, so none waits for a compilation. They are fewer than
the sizes in buckets.py: a dispatch may take a larger program than it needs, and has the same results to the bit.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Items
from enum import IntEnum
from typing import Any, Literal

from rl.rollout.config import EngineConfig
from rl.rollout.model_runner.shapes.buckets import Buckets, bucket
from rl.rollout.sampling import Sampler, plain, uses_tables
from rl.rollout.speculation.speculator import chunk_of

STOPS = 16  # stop tokens of a request beside the engine's
_NARROW = 8  # the narrow window of a prefill is so many times narrower than the widest
_FEWER = 4  # rows of a prefill that are listed differ by this factor

Kind = Literal["prefill", "decode", "verify", "score"]


class Rules(IntEnum):
    """The sampling rules that a decoding program knows; each knows those before it, too."""

    PLAIN = 0  # a temperature above 0
    EVERY = 1  # greedy draws and truncation, by numbers of each row
    TABLES = 2  # biases, penalties, masks and scores too, by arrays of the vocabulary


def rules_of(samplers: Iterable[Sampler.Config]) -> Rules:
    """Return the rules that rows of these samplers need together."""
    found = Rules.PLAIN
    for sampler in samplers:
        if uses_tables(sampler):
            return Rules.TABLES
        found = found if plain(sampler) else Rules.EVERY
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One program."""

    kind: Kind  # verify: decoding with drafts. score: a prefill of one row that scores its tokens.
    rows: int  # sequences
    tokens: int = 1  # tokens of each row; of decoding, that a step feeds
    keys: int = 0  # keys of a prefill's window
    rules: Rules = Rules.PLAIN  # sampling rules of decoding

    def covers(self, other: "Shape") -> bool:
        """Return True if a dispatch for `other` can take this program."""
        mine = self.rows, self.tokens, self.keys, self.rules
        asked = other.rows, other.tokens, other.keys, other.rules
        return self.kind == other.kind and all(a >= b for a, b in zip(mine, asked, strict=True))


def listed_programs(buckets: Buckets, cfg: EngineConfig[Any]) -> list[Shape]:
    """Return the programs of a server. The first three fit every request."""
    most = [Shape("decode", buckets.all_rows[0], rules=Rules.TABLES)]
    largest, few = buckets.all_rows[:2], buckets.all_rows[2:]
    sizes = [*few[::-1][::2], *reversed(largest)]  # every other small size
    decoding = [Shape("decode", rows, rules=Rules.EVERY) for rows in sizes]
    prefills = _prefills(buckets, cfg)
    drafted = [] if cfg.speculation is None else buckets.few_rows
    chunks = [(rows, chunk_of(cfg.speculation, rows)) for rows in drafted if cfg.speculation is not None]
    drafts = [Shape("verify", rows, chunk, rules=Rules.EVERY) for rows, chunk in chunks if chunk > 1]
    return [prefills[0], *most, dataclasses.replace(prefills[0], kind="score"), *prefills[1:], *decoding, *drafts]


def _prefills(buckets: Buckets, cfg: EngineConfig[Any]) -> list[Shape]:
    """Return prefills of up to all tokens of a sequence: after a preemption, its completion is prefilled too.

    First comes one row of the longest chunk and the widest window, which fits all.
    """
    longest, found = max(1, cfg.longest - 1), list[Shape]()
    widest = buckets.width(longest)
    for shorter, chunk in itertools.pairwise([0, *buckets.chunks]):
        if shorter >= longest:
            break
        rows = [buckets.prefill_rows(min(cfg.max_num_seqs, buckets.prefill(chunk)[0]), chunk)]
        while rows[-1] > 1:
            rows.append(buckets.prefill_rows(max(1, rows[-1] // _FEWER), chunk))
        narrow = buckets.width(max(min(chunk, longest), widest // _NARROW))
        sizes = sorted({narrow, widest}, reverse=True)
        found += [Shape("prefill", n, chunk, keys) for n in reversed(rows) for keys in sizes]
    found.sort(key=lambda one: (one.rows, -one.tokens, -one.keys))
    return found


class ReadyPrograms:
    """The listed programs that are compiled, which the dispatches of an engine keep to."""

    NEEDED = 3  # the first of the list, which fit every request and must be ready before one comes

    def __init__(self, listed: Items[Shape]):
        self.listed = listed
        self._added: list[Shape] = []
        self._ready: list[Shape] = []

    @property
    def compiled(self) -> list[Shape]:
        """The programs that dispatches use."""
        return list(self._ready)

    def add(self, shape: Shape) -> None:
        """Note a compiled program, on any thread."""
        self._added.append(shape)

    def refresh(self) -> None:
        """Use what was added; between two iterations, which choose several times."""
        if len(self._added) > len(self._ready):
            self._ready = list(self._added)

    def prefill_room(self, unfilled: int) -> tuple[int, int]:
        """Return (most rows, chunk) of the dispatch for a sequence that has so many tokens to prefill."""
        widest = max(one.keys for one in self._ready)
        usable = [one for one in self._ready if one.kind == "prefill" and one.keys == widest]
        chunk = bucket(unfilled, [one.tokens for one in usable])
        return max(one.rows for one in usable if one.tokens == chunk), chunk

    def rows(self, kind: Kind, rules: Rules) -> list[int]:
        """Return the rows of the programs that know these rules."""
        return [one.rows for one in self._ready if one.kind == kind and one.rules >= rules]

    def find(self, asked: Shape) -> Shape | None:
        """Return the program that takes least for such a dispatch; None: there is none."""
        fitting = [one for one in self._ready if one.covers(asked)]
        return min(fitting, key=lambda one: (one.rows * one.tokens, one.keys, one.rules), default=None)
