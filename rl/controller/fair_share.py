"""Fair shares of one resource: deficit round robin over tokens (Shreedhar & Varghese, SIGCOMM 1995).

There, a packet's length is known before it is sent. Here the tokens of a piece of work are known once it is done, so
that names with credit left are served, may owe tokens afterwards, and wait until the rounds have paid for them.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from axlearn_like.config import ConfigError
from axlearn_like.run.clock import REAL
from mesh import UserError, did_you_mean

PAUSE = 0.02  # seconds until quotas that hold all back are looked at again
_SMOOTHING = 0.25  # weight of the newest cost in the mean cost of a name


@dataclasses.dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a name beside its weight; None: there is none."""

    tokens_per_second: float | None = None  # mean over any time that is long against a piece of work
    tokens_in_flight: float | None = None  # tokens of what is chosen and not charged yet; a single piece may have more

    def check(self, where: str) -> None:
        """Refuse limits that are none (UserError); `where` begins the message."""
        for field in dataclasses.fields(self):
            if (limit := getattr(self, field.name)) is not None and not _positive(limit):
                raise UserError(f"{where}.{field.name}: expected a finite number above 0, or None, got {limit!r}")

    def __str__(self) -> str:
        """Return the limits as text, such as `tokens_per_second=2000`."""
        return ", ".join(f"{name}={limit:g}" for name, limit in dataclasses.asdict(self).items() if limit is not None)


def read_quotas(
    where: str, given: Mapping[str, Mapping[str, Any]], names: Collection[str], kind: str
) -> dict[str, Quota]:
    """Return quotas, `{name: {limit: number}}` (ConfigError: another name or limit, or no number; names the field)."""
    found, known = dict[str, Quota](), [field.name for field in dataclasses.fields(Quota)]
    _check_names(where, given, names, kind)
    for name, limits in given.items():
        place = f"{where}[{name!r}]"
        for limit in limits:
            if limit not in known:
                said = f"there is no quota {limit!r}{did_you_mean(limit, known)}; expected some of {', '.join(known)}"
                raise ConfigError(f"{place}: {said}", place)
        found[name] = Quota(**limits)
        try:
            found[name].check(place)
        except UserError as error:
            raise ConfigError(str(error), place) from error
    return found


def check_shares(where: str, given: Mapping[str, Any], names: Collection[str], kind: str) -> None:
    """Refuse shares of other names than these, or that are no numbers above 0 (ConfigError); `where` is the field."""
    _check_names(where, given, names, kind)
    for name, share in given.items():
        if not _positive(share):
            place = f"{where}[{name!r}]"
            raise ConfigError(f"{place}: expected a finite number above 0, got {share!r}", place)


def _check_names(where: str, given: Mapping[str, Any], names: Collection[str], kind: str) -> None:
    for name in given:
        if name not in names:
            place = f"{where}[{name!r}]"
            raise ConfigError(f"{place}: there is no such {kind}{did_you_mean(name, names)}", place)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


class FairShare:
    """Turns of all that have work, in which tokens divide by weight. Thread-safe.

    A round gives each name `quantum * weight` tokens of credit; names that have credit are served in turn. What
    is chosen and not charged yet counts by the mean cost of its name: several workers at once do not serve one name
    alone. A name without work keeps no credit, and rounds that pass without it pay what it owes.

    With one piece of work at a time, names a and b that both always have work, and costs of at most M tokens:
    |served_a / weight_a - served_b / weight_b| <= 2 * quantum + M / weight_a + M / weight_b, in every interval.
    A name with a quota of r tokens a second then begins work of at most r * t + M tokens in any t seconds.

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

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        quantum: float = 256.0,
        quotas: Mapping[str, Quota] | None = None,
        clock: Callable[[], float] = REAL,
    ):
        """Begin with nobody; names come by themselves.

        Args:
            weights: shares of names, relative to each other; others have 1.
            quantum: tokens a round for a weight of 1: larger ones serve a name for longer before the next.
            quotas: limits of names; others have none.
            clock: seconds, for limits of tokens a second.
        """
        self._quotas, self._clock = dict(quotas or {}), clock
        for name, quota in self._quotas.items():
            quota.check(f"quota of {name!r}")
        self._paid = dict[str, float]()  # time at which the tokens a second have paid for what a name has begun
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
            self._pay(chosen, assumed)
            count, tokens = self._open.get(chosen, (0, 0.0))
            self._open[chosen] = (count + 1, tokens + assumed)
            self._credit[chosen] -= assumed
            return chosen

    def within(self, names: Collection[str]) -> list[str]:
        """Return those of these names whose quotas let them begin another piece of work now."""
        with self._lock:
            return [name for name in names if self._is_within(name)]

    def quota(self, name: str) -> str:
        """Return the limits of a name, as a message says them behind others; "": it has none."""
        return f" (the quota of {name!r}: {self._quotas[name]})" if name in self._quotas else ""

    def charge(self, name: str, tokens: float) -> None:
        """Record what a choice of this name has cost, 0 if it came to nothing; without a choice, what else it used."""
        with self._lock:
            count, assumed = self._open.pop(name, (0, 0.0))
            if count > 1:
                self._open[name] = (count - 1, assumed - assumed / count)
            if tokens > 0:
                known = self._cost.get(name, tokens)
                self._cost[name] = known + _SMOOTHING * (tokens - known)
            mean = assumed / max(count, 1)
            self._pay(name, tokens - mean)
            self._credit[name] = self._credit.get(name, 0.0) - tokens + mean

    def forget(self, name: str) -> None:
        """Drop all that is known of a name that has gone for good, its debts included."""
        with self._lock:
            for known in (self._credit, self._cost, self._open, self._paid):
                known.pop(name, None)

    def _is_within(self, name: str) -> bool:
        if (quota := self._quotas.get(name)) is None:
            return True
        if quota.tokens_per_second is not None and self._paid.get(name, -math.inf) > self._clock():
            return False
        _, tokens = self._open.get(name, (0, 0.0))
        most, assumed = quota.tokens_in_flight, self._cost.get(name, self._quantum)
        return most is None or not tokens or tokens + assumed <= most

    def _pay(self, name: str, tokens: float) -> None:
        """Put off a name by the seconds that these tokens take at its rate; less than none: bring it forward."""
        if (quota := self._quotas.get(name)) is not None and quota.tokens_per_second is not None:
            since = self._paid.get(name, -math.inf)
            since = max(since, self._clock()) if tokens > 0 else since
            self._paid[name] = since + tokens / quota.tokens_per_second

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
