"""Lengths of answers: a distribution, a file of numbers, or those of a run; each a function of its rollout's name."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from axlearn_like.run.metrics import read_rows
from mesh import UserError

_FORMS = "lognormal:MEAN,SIGMA, fixed:TOKENS, a file of numbers, or a run directory"


def share_of(*name: int) -> float:
    """Return a number in [0, 1) that follows from a name: as if drawn at random, and cheap."""
    return (xxhash.xxh3_64_intdigest(repr(name).encode()) >> 11) / 2**53


class AnswerLengths:
    """AnswerLengths in tokens, drawn from a sorted table of quantiles.

    A length depends on the seed, the prompt and the sample alone, so that a rollout that is drawn again has it again.
    """

    def __init__(self, sorted_lengths: Sequence[float], longest: int, seed: int = 0, growth: float = 0.0):
        """Take equally likely lengths, ascending, the longest answer's, and `growth`, a share, by the last update."""
        self._table, self._longest, self._seed, self._growth = np.asarray(sorted_lengths), longest, seed, growth

    def of(self, prompt: int, draw: int, sample: int, progress: float) -> int:
        """Return the tokens of a rollout; `progress`: share of the updates that are done."""
        share = share_of(self._seed, prompt, draw, sample)
        length = self._table[int(share * len(self._table))] * (1.0 + self._growth * progress)
        return max(1, min(round(float(length)), self._longest))


def read_lengths(text: str, longest: int, seed: int = 0, growth: float = 0.0) -> AnswerLengths:
    """Return the lengths that `lognormal:MEAN,SIGMA`, `fixed:TOKENS`, a file or a run gives (UserError: none)."""
    if not (-1 < growth < math.inf):
        raise UserError(f"--growth {growth:g}: expected a share above -1, such as 0.5")
    kind, _, rest = text.partition(":")
    if kind == "lognormal":
        mean, sigma = _numbers(rest, 2, text)
        if not (1 <= mean <= longest and 0 <= sigma <= 5):
            raise UserError(
                f"--lengths {text}: expected a mean of 1 to {longest} tokens (max_new_tokens), sigma 0 to 5"
            )
        from statistics import NormalDist

        shares, scale = (np.arange(4096) + 0.5) / 4096, math.log(mean) - sigma**2 / 2
        table = [math.exp(scale + sigma * NormalDist().inv_cdf(float(share))) for share in shares]
        return AnswerLengths([min(length, longest) for length in table], longest, seed, growth)
    if kind == "fixed":
        found = _numbers(rest, 1, text)
    else:
        found = _of_run(Path(text)) if Path(text).is_dir() else _of_file(Path(text))
    if not found or min(found) < 1 or max(found) > longest:
        got = f"{min(found):g} to {max(found):g}" if found else "none"
        raise UserError(f"--lengths {text}: expected lengths of 1 to {longest} tokens (max_new_tokens), got {got}")
    return AnswerLengths(sorted(found), longest, seed, growth)


def _numbers(text: str, count: int, whole: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count or not all(map(math.isfinite, found)):
        raise UserError(f"--lengths {whole}: expected {_FORMS}")
    return found


def _of_run(run: Path) -> list[float]:
    rows = read_rows(run / "metrics.jsonl")
    return [row["completion_length"] for row in rows if row.get("phase") == "rl" and row.get("completion_length")]


def _of_file(path: Path) -> list[float]:
    if not path.exists():
        raise UserError(f"--lengths {path}: there is no such file or run; expected {_FORMS}")
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
        return [float(number) for number in found]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--lengths {path}: expected numbers, one a line or a JSON list: {error}") from None
