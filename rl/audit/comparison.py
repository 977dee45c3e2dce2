"""Comparison of a rollout with another drawing of it: to the bit, or by a bound where processors round differently."""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from rl.protocol.messages import Prompt, Rollout, Score
from rl.rollout.request import draw_seed


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """First difference of two drawings of a rollout."""

    what: str  # tokens, log-probabilities, versions, actions, end or reward
    position: int | None  # position of the token in the completion; None for an end or a reward
    # `one`, `other`: the values, as text
    one: str
    other: str

    def __str__(self) -> str:
        where = "" if self.position is None else f" of token {self.position}"
        return f"{self.what}{where}: {self.one}, drawn again {self.other}"


@dataclasses.dataclass(frozen=True, slots=True)
class Rounding:
    """How two classes of hardware may differ.

    A token is the largest of log-probability plus noise, and the noise is known: the two largest sums differ by no more
    than log-probabilities do. So a token may be another one, if both sums are equal up to the bound.
    """

    bound: float  # limit of the difference of two log-probabilities
    seed: int  # seed of the draws (`draw_seed` of the run's and the prompt's)
    vocab: int

    def noise(self, prompt: int, sample: int, position: int) -> np.ndarray:
        """Return the noise of a draw, float32 [vocab]."""
        identity = np.array([self.seed & 0xFFFFFFFF, prompt >> 32, prompt & 0xFFFFFFFF, sample], np.uint32)
        return np.asarray(_noise(self.vocab)(identity, position))


@functools.cache
def _noise(vocab: int) -> Any:
    """Return the program of a draw's noise, from its identity (`row_keys`) and position."""
    import jax  # a controller whose workers are of one class never needs it

    from rl.rollout.decoding.drawing import row_keys

    def noise(identity: Any, position: Any) -> Any:
        return jax.random.gumbel(jax.random.fold_in(row_keys(identity[None])[0], position), (vocab,))

    return jax.jit(noise)


_ARRAYS = {"tokens": "tokens", "actions": "action_mask", "versions": "versions", "log-probabilities": "logprobs"}


def first_difference(one: Rollout, other: Rollout, rounding: Rounding | None = None) -> Difference | None:
    """Return the first difference of two drawings of one rollout; None: there is none.

    Args:
        rounding: how classes of hardware may differ; None: not at all. Else what follows a token that is another one
            only by rounding is not compared.
    """
    malformed = next((what for what, name in _ARRAYS.items() if not _alike(one, other, name)), None)
    if malformed is not None:
        return Difference(malformed, 0, "an array of another length or type", "as it should be")
    common = min(len(one.tokens), len(other.tokens))
    found: list[tuple[int, str]] = []
    for what, name in _ARRAYS.items():
        a, b = getattr(one, name), getattr(other, name)
        wrong = np.flatnonzero(_differs(a[:common], b[:common], rounding if what == "log-probabilities" else None))
        if len(wrong):
            found.append((int(wrong[0]), what))
    if len(one.tokens) != len(other.tokens):
        found.append((common, "tokens"))
    if found:
        position, what = min(found, key=lambda one: one[0])
        if what == "tokens" and rounding is not None and _near(one, other, position, rounding):
            return None
        return Difference(what, position, *(_shown(getattr(r, _ARRAYS[what]), position) for r in (one, other)))
    if one.finish_reason != other.finish_reason:
        return Difference("end", None, one.finish_reason, other.finish_reason)
    return None


def reward_difference(one: Score, other: Score) -> Difference | None:
    """Return the difference of two rewards, if the verifier could give both."""
    if one.status == other.status == "ok" and one.reward != other.reward:
        return Difference("reward", None, f"{one.reward!r}", f"{other.reward!r}")
    return None


def rollout_name(prompt: Prompt, sample: int) -> str:
    """Return the name of a rollout in messages."""
    return f"prompt {prompt.id}{f' (draw {prompt.draw})' if prompt.draw else ''}, sample {sample}"


def _alike(one: Rollout, other: Rollout, name: str) -> bool:
    """Return True if both have one number of the same type for each token: strangers may have made them."""
    a, b = getattr(one, name), getattr(other, name)
    whole = all(isinstance(x, np.ndarray) and x.shape == (len(r.tokens),) for x, r in ((a, one), (b, other)))
    return whole and a.dtype == b.dtype


def _differs(a: np.ndarray, b: np.ndarray, rounding: Rounding | None) -> Any:
    """Return where numbers differ, bool; bits of floats, or values beyond the bound."""
    if a.dtype != np.float32:
        return a != b
    if rounding is None:
        return a.view(np.uint32) != b.view(np.uint32)
    with np.errstate(invalid="ignore"):
        return ~(np.abs(a - b) <= rounding.bound) & (a.view(np.uint32) != b.view(np.uint32))


def _near(one: Rollout, other: Rollout, position: int, rounding: Rounding) -> bool:
    """Return True if two tokens can both have been drawn at a position, by rounding."""
    if position >= min(len(one.tokens), len(other.tokens)) or not (one.drawn[position] and other.drawn[position]):
        return False
    noise = rounding.noise(other.prompt_id, other.sample_id, position)
    if not all(0 <= r.tokens[position] < len(noise) for r in (one, other)):
        return False
    sums = [float(r.logprobs[position]) + float(noise[r.tokens[position]]) for r in (one, other)]
    return abs(sums[0] - sums[1]) <= rounding.bound


def _shown(values: np.ndarray, position: int) -> str:
    return "the end" if position >= len(values) else repr(values[position].item())


@dataclasses.dataclass(frozen=True)
class AuditTerms:
    """Terms by which drawings of several classes of hardware are compared."""

    seed: int
    vocab: int
    cpu_bound: float  # limit of the difference of two log-probabilities that two CPUs give
    bound: float  # limit otherwise

    def difference(self, prompt: Prompt, one: "AuditedDraw", other: "AuditedDraw") -> Difference | None:
        """Return the first difference of two drawings, exactly for one class of hardware; None: there is none."""
        rounding = None
        if not one.hardware == other.hardware != "":
            cpus = all(drawing.hardware.startswith("cpu ") for drawing in (one, other))
            bound = self.cpu_bound if cpus else self.bound
            rounding = Rounding(bound, draw_seed(self.seed, prompt.draw), self.vocab)
        return first_difference(one.rollout, other.rollout, rounding) or reward_difference(one.score, other.score)


class AuditedDraw(NamedTuple):
    """A rollout as a worker has drawn it, with its score and the worker's class of hardware."""

    worker: str
    rollout: Rollout
    score: Score
    hardware: str
