"""Tasks: a weighted mixture of sources of problems, with questions that training never sees.

reasoning-gym repeats questions, also under different seeds, so seeds cannot separate training from
evaluation. Here the *text* decides: a question is held out if and only if a stable hash of it is 0
modulo `heldout_every`, unless a source has held-out rows of its own.
"""

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, text_lines
from mesh.errors import UserError
from rl.protocol.messages import Problem
from rl.tasks.admission import Admission
from rl.tasks.source import ProblemSource

_MAX_ID = 2**31  # ids enter random keys on the device as int32
_CYCLE = 4096  # longest exact cycle of the mixture's order


class FamilyTurn(NamedTuple):
    """A family's number in the mixture, and how many of its training problems come before."""

    family: int
    turn: int


class TaskMixture(Configurable):
    """Training problems 0, 1, 2, ... and held-out problems of several families (sources of problems).

    Training problem `i` is a pure function of (config, i), and of what `admission` leaves out. Families take turns in a
    fixed cycle made by smooth weighted round robin, so that each stretch of the sequence holds the families nearly in
    proportion to their weights. A problem's id encodes its family and its item, so any process that builds the same
    config rebuilds it by id.

    >>> from rl.tasks.family import TaskFamily
    >>> from rl.tasks.mixture import TaskMixture
    >>> tasks = TaskMixture.Config(families=(TaskFamily.Config(name="chain_sum"),), seed=0).build()
    >>> problem = tasks.train(0)
    >>> problem.question
    'State the final answer to the following arithmetic problem: 30 - 10 + 43 + 24 - 95 + 91 ='
    >>> tasks.score(problem, "83"), tasks.problem(problem.id) == problem
    (1.0, True)
    """

    class Config(ConfigBase["TaskMixture"]):
        families: tuple[ConfigBase[Any], ...] = REQUIRED  # configs of `ProblemSource`s: TaskFamily, TaskRows, ...
        seed: int = 0
        heldout_every: int = 8  # one question in `heldout_every` is held out

        @override
        def check_fields(self) -> None:
            self.require("heldout_every", self.heldout_every >= 2, "2 or more, or nothing is left to train on")
            known = all(isinstance(family, ProblemSource.Config) for family in self.families)
            self.require("families", known, "sources of problems: TaskFamily.Config, TaskRows.Config, ...")
            labels = [family.title for family in self.families if isinstance(family, ProblemSource.Config)]
            distinct = bool(labels) and len(set(labels)) == len(labels)
            self.require("families", distinct, "families of different labels (Config.label)")

        def environment(self) -> tuple[str, ...]:
            """Return the names of the environment variables that paths of the tasks name, as $NAME."""
            places = (".files", ".rows.", ".heldout.")
            texts = " ".join(text for path, text in text_lines(self).items() if any(place in path for place in places))
            return tuple(sorted(set(re.findall(r"\$\{?([A-Za-z_]\w*)", texts))))

    def __init__(self, cfg: Config):
        self.heldout_every = cfg.heldout_every
        self.admission = Admission()  # set it before the first problem
        self._families: list[ProblemSource] = [family.build(seed=cfg.seed) for family in cfg.families]
        for family in self._families:
            family.split(cfg.heldout_every)
        labels = [family.label for family in self._families]
        self.family_names: tuple[str, ...] = tuple(labels)
        self.weights = tuple(family.weight for family in self._families)
        self._cycle = _smooth_round_robin(_shares([family.weight for family in self._families], labels))
        counts = np.cumsum(np.equal.outer(self._cycle, np.arange(len(labels))), axis=0)
        self._rank = [
            int(counts[i, family]) - 1 for i, family in enumerate(self._cycle)
        ]  # turns of it before, in cycle
        self._turns = [int(n) for n in counts[-1]]
        self._heldout: list[list[Problem]] = [[] for _ in labels]

    def train(self, index: int) -> Problem:
        """Training problem `index`: the first usable one of its family, in constant time (UserError: next to none)."""
        return self.new(*self.place(index))

    def place(self, index: int) -> FamilyTurn:
        """Return whose turn training problem `index` is."""
        if index < 0:
            raise IndexError(f"training problem {index}: the index starts at 0")
        cycles, place = divmod(index, len(self._cycle))
        family = self._cycle[place]
        return FamilyTurn(family, cycles * self._turns[family] + self._rank[place])

    def new(self, family: int, turn: int) -> Problem:
        """Training problem `turn` of a family; see `train`."""
        source, unseen, tried = self._families[family], 0, 0
        for item in source.candidates(turn):
            tried += 1
            problem = self._admitted(family, item)
            if problem is None or source.is_heldout(problem, self.heldout_every):
                unseen += problem is not None
            elif self.admission.fits(problem):
                return problem
        raise UserError(
            f"task family {source.label!r}: of the {tried} items for training problem {turn}, {unseen} are held out "
            f"(heldout_every={self.heldout_every}), and the others cannot be made or are too long; "
            "it has too few distinct questions to train on"
        )

    def heldout(self, n_per_family: int) -> list[Problem]:
        """The first `n_per_family` distinct held-out questions of each family, family by family.

        A shorter list is a prefix of a longer one, family by family.

        Raises:
            ValueError: a family has fewer; says how many were found.
        """
        return [p for family in range(len(self._families)) for p in self._heldout_of(family, n_per_family)]

    def for_evaluation(self, most: int | None, default: int) -> list[Problem]:
        """Return held-out questions: `most` of each family; None: all of a table, `default` of an endless one."""
        found: list[Problem] = []
        for family, source in enumerate(self._families):
            size = source.heldout_size
            wanted = most or (default if size is None else size)
            found += self._heldout_of(family, wanted if size is None else min(wanted, size), least=size is None)
        return found

    def problem(self, problem_id: int) -> Problem:
        """The problem with this id, from either set (KeyError: no problem can have this id)."""
        if not 0 <= problem_id < _MAX_ID:
            raise KeyError(f"problem id {problem_id}: ids of a mixture are 0..{_MAX_ID - 1}")
        item, family = divmod(problem_id, len(self._families))
        return self._families[family].problem(item, problem_id)

    def canonical(self, problem_id: int) -> int:
        """Return the first of the ids that a problem has: the row of a table has another one in every epoch."""
        item, family = divmod(problem_id, len(self._families))
        return self._families[family].canonical(item) * len(self._families) + family

    def first_choice(self, family: int, turn: int) -> int:
        """Return the first of the ids of training problem `turn` of a family, unless that one cannot be used."""
        source = self._families[family]
        return source.canonical(next(iter(source.candidates(turn)))) * len(self._families) + family

    def check_disjoint(self, num_train: int, n_per_family: int) -> None:
        """Compare the first `num_train` training questions with the held-out ones (ValueError: quotes one in both)."""
        heldout = {p.question: p.id for p in self.heldout(n_per_family)}
        for index in range(num_train):
            problem = self.train(index)
            if problem.question in heldout:
                raise UserError(
                    f"training problem {index} (id {problem.id}) asks the held-out question "
                    f"{problem.question!r} (id {heldout[problem.question]})"
                )

    def score(self, problem: Problem, answer: str) -> float:
        """The family's own score of `answer`, here and now. `rl.verification` guards it."""
        return self._families[problem.id % len(self._families)].score(answer, problem.entry)

    def vote(self, problem: Problem, answer: str) -> str:
        """Return the part of an answer that answers must share to be one vote of a majority; "": it abstains."""
        return self._families[problem.id % len(self._families)].vote(answer)

    def form(self, problem: Problem, answer: str) -> str | None:
        """Return the form in which an answer gives what is scored, see `ProblemSource.form`."""
        return self._families[problem.id % len(self._families)].form(answer)

    def environment(self, problem_id: int) -> ConfigBase[Any] | None:
        """Return the environment of a problem; None: it is answered at once."""
        return self._families[problem_id % len(self._families)].environment

    def digests(self) -> dict[str, str]:
        """Return a checksum of the data of each family that reads any."""
        return {family.label: family.digest for family in self._families if family.digest}

    def without_answers(self) -> list[str]:
        """Return the names of families that are trained on and have no reference answers."""
        return [family.label for family in self._families if family.weight and not family.has_answers]

    def _admitted(self, family: int, item: int) -> Problem | None:
        """Return a problem, unless it cannot be made."""
        problem_id, source = item * len(self._families) + family, self._families[family]
        if problem_id >= _MAX_ID:
            raise IndexError(f"item {item} of {source.label!r}: problem ids end at {_MAX_ID - 1}")
        return self.admission.make(problem_id, source.label, lambda: source.problem(item, problem_id))

    def _heldout_of(self, family: int, n: int, *, least: bool = True) -> list[Problem]:
        """Return n held-out problems of a family; unless `least`, those that there are."""
        if len(self._heldout[family]) >= n:
            return self._heldout[family][:n]
        source = self._families[family]
        found: list[Problem] = []
        seen: set[str] = set()
        scanned = 0
        for item in source.heldout_candidates(n, self.heldout_every):
            if len(found) == n:
                break
            scanned += 1
            problem = self._admitted(family, item)
            if problem is None or not source.is_heldout(problem, self.heldout_every):
                continue
            if source.heldout_size is None and problem.question in seen:
                continue  # a generator repeats itself; each row of a table is asked, whatever others ask
            if self.admission.fits(problem):
                found.append(problem)
                seen.add(problem.question)
        if len(found) < n and (least or not found):
            cause = self.admission.too_few(source.label)
            advice = f"ask for at most {len(found)}, or {source.widen}" if found else source.widen
            advice = f"{cause}; set max_prompt_tokens higher" if cause else advice
            raise UserError(
                f"task family {source.label!r} has {len(found)} distinct held-out "
                f"questions in its first {scanned} items, {n} are wanted: {advice}"
            )
        self._heldout[family] = found
        return found


def _shares(weights: list[float], labels: list[str]) -> list[int]:
    """Number of turns of each family in a cycle: exact if 4096 turns suffice, else rounded to 1/4096."""
    exact = [Fraction(str(w)) for w in weights]
    total = sum(exact)
    if total == 0:
        raise UserError("the weights of all task families are 0: there is nothing to train on")
    fractions = [w / total for w in exact]
    cycle = math.lcm(*(f.denominator for f in fractions))
    if cycle <= _CYCLE:
        return [int(f * cycle) for f in fractions]
    shares = [round(f * _CYCLE) for f in fractions]
    for share, weight, label in zip(shares, weights, labels, strict=True):
        if weight and not share:
            raise UserError(f"task family {label!r}: weight={weight} is less than 1/{_CYCLE} of the mixture")
    return shares


def _smooth_round_robin(shares: list[int]) -> list[int]:
    """Order of families in a cycle: at each turn all gain their share; the largest credit goes and pays the total."""
    credit = [0] * len(shares)
    cycle = []
    for _ in range(sum(shares)):
        credit = [c + s for c, s in zip(credit, shares, strict=True)]
        chosen = credit.index(max(credit))
        credit[chosen] -= sum(shares)
        cycle.append(chosen)
    return cycle
