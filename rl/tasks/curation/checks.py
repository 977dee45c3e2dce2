"""Checks of rows: each says why a row goes, or nothing. Rows come in order, once."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from axlearn_like.input.encoding import find_field, text_of
from axlearn_like.input.source import InputError
from rl.tasks.curation.words import grams, words

Row = Mapping[str, Any]
Removal = tuple[str, str]  # reason, what a person wants to know
Check = Callable[[Row, str], Removal | None]  # function of a row and its location; None: the row stays
_HASHES, _BANDS = 128, 32  # signature sizes: pairs with a Jaccard similarity of 0.7 share a band in 0.9998 of cases


class Filter:
    """Conditions on single rows."""

    def __init__(
        self,
        *,
        field: str,
        shortest: int = 1,
        longest: int | None = None,
        required: Sequence[str] = (),
        match: Iterable[tuple[str, str]] = (),
        drop: Iterable[tuple[str, str]] = (),
        between: Sequence[tuple[str, tuple[float, float]]] = (),
    ):
        """Store the conditions.

        Args:
            field: with the text whose characters are counted.
            shortest: characters.
            longest: characters; None: any number.
            required: fields that are there, and neither null nor empty.
            match: fields, each with a regular expression that must be found in it.
            drop: fields, each with a regular expression that must not.
            between: fields, each with the bounds of a number, both included.
        """
        self._field, self._shortest, self._longest = field, shortest, longest
        self._required, self._between = required, between
        self._match = [(name, _pattern(text)) for name, text in match]
        self._drop = [(name, _pattern(text)) for name, text in drop]

    def __call__(self, row: Row, where: str) -> Removal | None:
        """Return why the row goes; None: it stays."""
        for name in self._required:
            if find_field(row, name) in (None, "", [], {}):
                return "missing field", name
        length = len(text_of(row, self._field, where).strip())
        if length < self._shortest:
            return "too short", f"{length} characters"
        if self._longest is not None and length > self._longest:
            return "too long", f"{length} characters"
        for name, pattern in self._match:
            if not pattern.search(_written(row, name)):
                return "no match", f"{name} has no {pattern.pattern!r}"
        for name, pattern in self._drop:
            if found := pattern.search(_written(row, name)):
                return "matched", f"{name} has {found.group()!r:.60}"
        for name, (low, high) in self._between:
            value = find_field(row, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                return "no number", f"{name} is {value!r:.60}"
            if not low <= value <= high:
                return "out of bounds", f"{name} is {value:g}"
        return None


def _written(row: Row, name: str) -> str:
    value = find_field(row, name)
    return "" if value is None else str(value)


class Duplicates:
    """Rows whose text another row before has, or nearly: by MinHash (Broder 1997), banded, then by all shingles.

    The first of a group stays. A text is the set of its runs of `n` words; near is a Jaccard similarity of at least
    `threshold`. Equal texts are those of equal words. Memory: about 1.5 kB for each row that stays.
    """

    def __init__(self, *, field: str, threshold: float = 0.8, n: int = 3):
        self._field, self._threshold, self._n = field, threshold, n
        rng = np.random.default_rng(0)
        self._a = rng.integers(1, 2**63, _HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._b = rng.integers(0, 2**63, _HASHES, dtype=np.uint64)
        self._exact: dict[str, str] = {}
        self._kept: list[tuple[str, np.ndarray]] = []  # location, shingles
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(_BANDS)]

    def __call__(self, row: Row, where: str) -> Removal | None:
        """Return why the row goes; None: it stays."""
        found = words(text_of(row, self._field, where))
        if not found:
            return "no words", ""
        plain = " ".join(found)
        if plain in self._exact:
            return "duplicate", f"of {self._exact[plain]}"
        shingles = grams(found, self._n)
        keys = self._keys(shingles)
        candidates = {number for band, key in zip(self._bands, keys, strict=True) for number in band.get(key, ())}
        for number in sorted(candidates):
            other, theirs = self._kept[number]
            common = len(np.intersect1d(shingles, theirs, assume_unique=True))
            similarity = common / (len(shingles) + len(theirs) - common)
            if similarity >= self._threshold:
                return "near duplicate", f"{similarity:.2f} of {other}"
        for band, key in zip(self._bands, keys, strict=True):
            band.setdefault(key, []).append(len(self._kept))
        self._kept.append((where, shingles))
        self._exact[plain] = where
        return None

    def _keys(self, shingles: np.ndarray) -> list[bytes]:
        with np.errstate(over="ignore"):  # modulo 2**64
            hashed = shingles[:, None] * self._a + self._b
        signature = (hashed >> np.uint64(32)).min(axis=0).astype(np.uint32).reshape(_BANDS, -1)
        return [row.tobytes() for row in signature]


class Contamination:
    """Rows that hold a question of an evaluation: `share` of its runs of n words, or all words if they are fewer."""

    def __init__(
        self, evaluations: Iterable[tuple[str, Iterable[tuple[Row, str]]]], *, fields: Sequence[str], field: str,
        n: int = 8, share: float = 0.5,
    ):  # fmt: skip
        """Read the evaluations.

        Args:
            evaluations: names, each with rows and their locations.
            fields: fields of an evaluation's rows, the first that is there is its question.
            field: field of the rows that are checked.
            n: words of a run.
            share: share of an evaluation question's runs.
        """
        self._field, self._n, self._share = field, n, share
        self._questions: list[tuple[str, int]] = []  # location, number of runs
        self._runs: dict[int, list[int]] = defaultdict(list)
        self._whole: dict[str, str] = {}
        for name, rows in evaluations:
            for row, where in rows:
                question = next((text for key in fields if isinstance(text := find_field(row, key), str)), None)
                if question is None:
                    raise InputError(f"{where}: there is none of the fields {', '.join(fields)} with a text")
                found = words(question)
                if len(found) < n:
                    self._whole.setdefault(" ".join(found), f"{name}: {where}")
                    continue
                hashes = grams(found, n).tolist()
                for each in hashes:
                    self._runs[each].append(len(self._questions))
                self._questions.append((f"{name}: {where}", len(hashes)))

    def __call__(self, row: Row, where: str) -> Removal | None:
        """Return why the row goes; None: it stays."""
        found = words(text_of(row, self._field, where))
        if (same := self._whole.get(" ".join(found))) is not None and found:
            return "contaminated", f"the whole of {same}"
        counts: Counter[int] = Counter()
        if len(found) >= self._n:
            for each in grams(found, self._n).tolist():
                counts.update(self._runs.get(each, ()))
        shares = [(count / self._questions[number][1], -number) for number, count in counts.items()]
        share, number = max(shares, default=(0.0, 0))
        if share and share >= self._share:
            return "contaminated", f"{100 * share:.0f} % of {self._questions[-number][0]}"
        return None


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InputError(f"{text!r} is no regular expression: {error}") from None
