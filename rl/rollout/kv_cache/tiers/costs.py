"""Costs of computing tokens again and of bringing their pages back, measured while an engine runs."""

from typing import Literal

Tier = Literal["host", "disk"]

_WEIGHT = 0.2  # weight of the newest measurement in a running mean
_PREFILLS = 16  # one dispatch of prefill in so many is timed, for which the device has to be idle before and after
_RETRY = 32  # one refusal in so many is brought back all the same: a rate that is never measured again would stay


class TransferCosts:
    """Running means of seconds for each token computed again, and for each byte brought back from a tier."""

    def __init__(self) -> None:
        self.recompute: float | None = None  # seconds a token of prefill; None: not measured yet
        self.seconds_saved = 0.0  # seconds to compute the pages that came back, minus those that bringing them took
        self._bring: dict[Tier, float] = {}
        self._prefills, self._refused = 0, 0

    def time_next(self) -> bool:
        """Return True if the next dispatch of prefill is one to be timed."""
        self._prefills += 1
        return self._prefills % _PREFILLS == 2 or (self.recompute is None and self._prefills > 1)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Record a timed dispatch."""
        self.recompute = _mean(self.recompute, seconds / tokens)

    def brought(self, tier: Tier, tokens: int, nbytes: int, seconds: float) -> None:
        """Record pages that came back, of so many tokens and bytes."""
        self._bring[tier] = _mean(self._bring.get(tier), seconds / max(nbytes, 1))
        self.seconds_saved += tokens * (self.recompute or 0.0) - seconds

    def pays(self, tokens: int, nbytes: dict[Tier, int]) -> bool:
        """Return True if bringing back so many bytes of each tier is cheaper than computing their tokens again.

        What was not measured yet counts as free, so that it will be. One refusal in 32 is none, for the same reason.
        """
        if self.recompute is None:
            return True
        seconds = sum(self._bring.get(tier, 0.0) * count for tier, count in nbytes.items())
        if seconds < tokens * self.recompute:
            return True
        self._refused += 1
        return self._refused % _RETRY == 0


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
