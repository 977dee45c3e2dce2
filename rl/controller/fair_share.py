"""Fair shares of one resource: deficit round robin over tokens (Shreedhar & Varghese, SIGCOMM 1995).

There, a packet's length is known before it is sent. Here the tokens of a piece of work are known once it is done, so
that names with credit left are served, may owe tokens afterwards, and wait until the rounds have paid for them.
"""

import math
import threading
from collections.abc import Collection, Mapping

from mesh import UserError

_SMOOTHING = 0.25  # weight of the newest cost in the mean cost of a name


class FairShare:
    """Turns of all that have work, in which tokens divide by weight. Thread-safe.

    A round gives each name `quantum * weight` tokens of credit; names that have credit are served in turn. What
    is chosen and not charged yet counts by the mean cost of its name: several workers at once do not serve one name
    alone. A name without work keeps no credit, and rounds that pass without it pay what it owes.

    With one piece of work at a time, names a and b that both always have work, and costs of at most M tokens:
    |served_a / weight_a - served_b / weight_b| <= 2 * quantum + M / weight_a + M / weight_b, in every interval.

    >>> from rl.controller.fair_share import FairShare
    >>> share = FairShare({"a": 2.0}, quantum=1)
    >>> served = {"a": 0, "b": 0}
    >>> for _ in range(300):
    ...     name = share.choose(("a", "b"))
    ...     share.charge(name, tokens=10)
    ...     served[name] += 10
    >>> served
    {'a': 2000, 'b': 1000}
    """

    def __init__(self, weights: Mapping[str, float] | None = None, *, quantum: float = 256.0):
        """Begin with nobody; names come by themselves.

        Args:
            weights: shares of names, relative to each other; others have 1.
            quantum: tokens a round for a weight of 1: larger ones serve a name for longer before the next.
        """
        self._weights = dict(weights or {})
        for name, weight in self._weights.items():
            if not 0 < weight < math.inf:
                raise UserError(f"share of {name!r} is {weight:g}; expected a finite number above 0")
        if not 0 < quantum < math.inf:
            raise UserError(f"quantum={quantum:g}; expected tokens, a finite number above 0")
        self._quantum = quantum
        self._credit: dict[str, float] = {}  # names with work or debts, in the order in which they came
        self._cost: dict[str, float] = {}  # mean cost of a piece of work
        self._open: dict[str, tuple[int, float]] = {}  # chosen and not charged yet: how many, and their assumed tokens
        self._lock = threading.Lock()

    def choose(self, ready: Collection[str]) -> str:
        """Return who of `ready`, those that have work now, is served next; call `charge` when that is done."""
        if not ready:
            raise ValueError("nobody to choose from; expected at least one name with work")
        ready = frozenset(ready)
        with self._lock:
            self._settle_idle(ready)
            if all(self._credit[name] <= 0 for name in ready):
                self._give_rounds(ready)
            chosen = next(name for name in self._credit if name in ready and self._credit[name] > 0)
            assumed = self._cost.get(chosen, self._quantum)
            count, tokens = self._open.get(chosen, (0, 0.0))
            self._open[chosen] = (count + 1, tokens + assumed)
            self._credit[chosen] -= assumed
            return chosen

    def charge(self, name: str, tokens: float) -> None:
        """Record what a choice of this name has cost, 0 if it came to nothing; without a choice, what else it used."""
        with self._lock:
            count, assumed = self._open.pop(name, (0, 0.0))
            if count > 1:
                self._open[name] = (count - 1, assumed - assumed / count)
            if tokens > 0:
                known = self._cost.get(name, tokens)
                self._cost[name] = known + _SMOOTHING * (tokens - known)
            self._credit[name] = self._credit.get(name, 0.0) - tokens + assumed / max(count, 1)

    def forget(self, name: str) -> None:
        """Drop all that is known of a name that has gone for good, its debts included."""
        with self._lock:
            for known in (self._credit, self._cost, self._open):
                known.pop(name, None)

    def _settle_idle(self, ready: Collection[str]) -> None:
        """Line up who is new, and drop who has neither work nor debts."""
        for name in [name for name, credit in self._credit.items() if credit >= 0 and name not in ready]:
            del self._credit[name]
        for name in ready:
            self._credit.setdefault(name, 0.0)

    def _give_rounds(self, ready: Collection[str]) -> None:
        """Give as many rounds of credit as it takes until one of `ready` has some."""
        each = {name: self._quantum * self._weights.get(name, 1.0) for name in self._credit}
        rounds = min(math.floor(-self._credit[name] / each[name]) + 1 for name in ready)
        for name, credit in self._credit.items():
            paid = credit + rounds * each[name]
            self._credit[name] = paid if name in ready else min(paid, 0.0)
