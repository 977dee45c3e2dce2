"""Mixtures: the source of each example, and its position in that source."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input.source import IndexedSource, InputError, Source, indexed
from mesh.errors import did_you_mean


class Part(Configurable):
    """One source of a mixture."""

    class Config(ConfigBase["Part"]):
        name: str = REQUIRED
        source: ConfigBase = REQUIRED
        weight: float = 1.0  # any scale: only ratios matter

    def __init__(self, cfg: Config):
        self.source = build_source(cfg.source, cfg.name)


class Stage(Configurable):
    """Other weights for a while: until a number of examples has been drawn in total."""

    class Config(ConfigBase["Stage"]):
        until: int = REQUIRED  # examples of the whole mixture, counted from the beginning of training
        weights: dict[str, float] = REQUIRED  # name of the part -> weight; missing parts: 0

    def __init__(self, cfg: Config):
        self.until, self.weights = cfg.until, cfg.weights


class Drawn(NamedTuple):
    """How many examples were taken from each source: together with config and seed this determines the order."""

    ever: tuple[int, ...]
    in_stage: tuple[int, ...]  # examples since the current weights took effect

    @property
    def total(self) -> int:
        """Examples of all sources."""
        return sum(self.ever)


class Mixture(Configurable):
    """Several sources in one stream; weights are fractions of *examples* (whole documents), not of tokens.

    After every example, the number from each source since the current weights took effect differs from weight x total
    by less than one. The order is a Pfair schedule (Baruah et al., Algorithmica 15, 1996) by earliest deadline: example
    c of a source of weight w is due after ceil((c + 1) / w) draws and not before floor(c / w). Each source has its own
    epochs, each shuffled in its own order.
    """

    class Config(ConfigBase["Mixture"]):
        parts: tuple[Part.Config, ...] = REQUIRED
        stages: tuple[Stage.Config, ...] = ()  # weights by progress, in this order, followed by the parts' own weights

        @override
        def check_fields(self) -> None:
            names, ends = [part.name for part in self.parts], [stage.until for stage in self.stages]
            self.require("parts", bool(names) and len(set(names)) == len(names), "parts of different names")
            rising = all(a < b for a, b in zip([0, *ends], ends, strict=False))
            self.require("stages", rising, "rising values of `until`, above 0")

    def __init__(self, cfg: Config):
        self.names = tuple(part.name for part in cfg.parts)
        own = [part.weight for part in cfg.parts]
        stages = [self._stage(i, stage.build()) for i, stage in enumerate(cfg.stages)]
        self._ends = [0, *(until for until, _ in stages)]
        weights = [(f"stages.{i}.weights", values) for i, (_, values) in enumerate(stages)] + [("parts", own)]
        self._shares = [_shares(values, self.names, f"Mixture.Config.{where}") for where, values in weights]
        self.sources: list[IndexedSource] = [part.build().source for part in cfg.parts]  # last: slow

    def _stage(self, number: int, stage: Stage) -> tuple[int, list[float]]:
        for name in stage.weights:
            if name not in self.names:
                raise InputError(
                    f"Mixture.Config.stages.{number}.weights: no part is called {name!r}"
                    f"{did_you_mean(name, self.names)}"
                )
        return stage.until, [stage.weights.get(name, 0.0) for name in self.names]

    def begin(self) -> Drawn:
        """Return the position before the first example."""
        return Drawn((0,) * len(self.names), (0,) * len(self.names))

    def describe(self) -> str:
        """Return the weights as text: a resumed run must have the same."""
        return "; ".join(
            f"from {end}: " + ", ".join(f"{name} {share}" for name, share in zip(self.names, shares, strict=True))
            for end, shares in zip(self._ends, self._shares, strict=True)
        )

    def draw(self, drawn: Drawn, count: int) -> tuple[np.ndarray, np.ndarray, Drawn]:
        """Return the next `count` examples: their sources, their ordinals there (int64), and the next position."""
        sources, ordinals = np.empty(count, np.int64), np.empty(count, np.int64)
        done = 0
        while done < count:
            stage = max(i for i, end in enumerate(self._ends) if end <= drawn.total)
            if drawn.total - sum(drawn.in_stage) != self._ends[stage]:
                drawn = drawn._replace(in_stage=(0,) * len(self.names))
            left = self._ends[stage + 1] - drawn.total if stage + 1 < len(self._ends) else count
            n = min(count - done, left)
            sources[done : done + n] = self._turns(self._shares[stage], drawn.in_stage, n)
            added = np.bincount(sources[done : done + n], minlength=len(self.names)).tolist()
            for source, before in enumerate(drawn.ever):
                ordinals[done : done + n][sources[done : done + n] == source] = before + np.arange(added[source])
            drawn = Drawn(*(tuple(a + b for a, b in zip(old, added, strict=True)) for old in drawn))
            done += n
        return sources, ordinals, drawn

    @staticmethod
    def _turns(shares: tuple[int, ...], counts: Sequence[int], n: int) -> list[int]:
        """Return the sources of the next n examples, by earliest deadline, after `counts` of each."""
        whole = sum(shares)
        live = [i for i, share in enumerate(shares) if share]
        if len(live) == 1:
            return live * n
        count = list(counts)
        release = {i: count[i] * whole // shares[i] for i in live}
        deadline = {i: -(-(count[i] + 1) * whole // shares[i]) for i in live}
        turns, begin = [], sum(counts)
        for now in range(begin, begin + n):
            turn = min((i for i in live if release[i] <= now), key=deadline.__getitem__)
            turns.append(turn)
            count[turn] += 1
            release[turn] = count[turn] * whole // shares[turn]
            deadline[turn] = -(-(count[turn] + 1) * whole // shares[turn])
        return turns


def _shares(weights: Sequence[float], names: Sequence[str], where: str) -> tuple[int, ...]:
    """Return weights as whole numbers in the same ratios."""
    for name, weight in zip(names, weights, strict=True):
        if not 0 <= weight < float("inf"):
            raise InputError(f"{where}: the weight of {name!r} is {weight}; expected a finite number >= 0")
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact)
    if not total:
        raise InputError(f"{where}: the weights of all parts ({', '.join(names)}) are 0: there is nothing to draw")
    common = np.lcm.reduce([(weight / total).denominator for weight in exact], dtype=object)
    return tuple(int(weight / total * common) for weight in exact)


class Single:
    """One source with the interface of a `Mixture`."""

    def __init__(self, source: IndexedSource, name: str):
        self.sources, self.names = [source], (name,)

    def begin(self) -> Drawn:
        """Return the position before the first example."""
        return Drawn((0,), (0,))

    def describe(self) -> str:
        """Return the text that a resumed run must have kept."""
        return "one source"

    def draw(self, drawn: Drawn, count: int) -> tuple[np.ndarray, np.ndarray, Drawn]:
        """Return the next `count` examples, see `Mixture.draw`."""
        before, after = drawn.total, (drawn.total + count,)
        return np.zeros(count, np.int64), before + np.arange(count), Drawn(after, after)


def build_source(cfg: ConfigBase[Any], name: str) -> IndexedSource:
    """Build a source, with its index; InputError if it has no examples."""
    built: Source = cfg.build()
    if not hasattr(built, "__len__"):
        raise InputError(f"source {name}: {type(built).__name__} is not a source of examples (neither is a mixture)")
    if not len(built):
        raise InputError(f"source {name} has no examples")
    return indexed(built)
