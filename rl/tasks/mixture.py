"""Tasks: a weighted mixture of reasoning-gym families, with questions that training never sees.

reasoning-gym repeats questions, also under different seeds, so seeds cannot separate training from
evaluation. Here the *text* decides: a question is held out if and only if a stable hash of it is 0
modulo `heldout_every`.
"""

import hashlib
import math
from fractions import Fraction
from typing import override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.tokenizers.chat import encode_chat
from axlearn_like.tokenizers.protocol import Tokenizer, begin
from mesh.errors import UserError
from rl.roles.messages import Problem
from rl.tasks.family import TaskFamily

__all__ = ["TaskFamily", "TaskMixture", "encode_prompt", "is_heldout"]

_SEPARATOR = "\n"  # between question and answer: one token, and no question needs an escape
_ATTEMPTS = 16  # dataset items reserved for one training problem; the first that is not held out is taken
_MAX_ID = 2**31  # ids enter random keys on the device as int32
_CYCLE = 4096  # longest exact cycle of the mixture's order
_SCAN = 64  # gives up on held-out problems after this many times the expected number of items ...
_MIN_SCAN = 20_000  # ... or this many, whichever is more


def is_heldout(question: str, heldout_every: int) -> bool:
    """Return True if a question is held out: a function of its text alone, the same in every process."""
    digest = hashlib.blake2b(question.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % heldout_every == 0


def encode_prompt(question: str, tokenizer: Tokenizer) -> np.ndarray:
    """Encode a question, int32; the same for SFT and RL.

    As what a user says and the opening of the answer, if the tokenizer has a chat template; else as bos, its text and a
    newline.
    """
    if tokenizer.chat_template is not None:
        ids = encode_chat(tokenizer, [{"role": "user", "content": question}], add_generation_prompt=True)
    else:
        ids = [*begin(tokenizer), *tokenizer.encode(question + _SEPARATOR)]
    return np.asarray(ids, dtype=np.int32)


class TaskMixture(Configurable):
    """Training problems 0, 1, 2, ... and held-out problems of several families.

    Training problem `i` is a pure function of (config, i). Families take turns in a fixed cycle
    made by smooth weighted round robin, so that each stretch of the sequence holds the families
    nearly in proportion to their weights. A problem's id encodes its family and its item, so any
    process that builds the same config rebuilds it by id.
    """

    class Config(ConfigBase["TaskMixture"]):
        families: tuple[TaskFamily.Config, ...] = REQUIRED
        seed: int = 0
        heldout_every: int = 8
        """One question in `heldout_every` is held out."""

        @override
        def check_fields(self) -> None:
            self.require("heldout_every", self.heldout_every >= 2, "2 or more, or nothing is left to train on")
            labels = [family.label or family.name for family in self.families]
            distinct = bool(labels) and len(set(labels)) == len(labels)
            self.require("families", distinct, "families of different labels (TaskFamily.Config.label)")

    def __init__(self, cfg: Config):
        self.heldout_every = cfg.heldout_every
        self._families = [family.build(seed=cfg.seed) for family in cfg.families]
        labels = [family.label for family in self._families]
        self.family_names: tuple[str, ...] = tuple(labels)
        self._cycle = _smooth_round_robin(_shares([family.weight for family in self._families], labels))
        counts = np.cumsum(np.equal.outer(self._cycle, np.arange(len(labels))), axis=0)
        self._rank = [
            int(counts[i, family]) - 1 for i, family in enumerate(self._cycle)
        ]  # turns of it before, in cycle
        self._turns = [int(n) for n in counts[-1]]
        self._heldout: list[list[Problem]] = [[] for _ in labels]
        self._scanned = [0] * len(labels)

    def train(self, index: int) -> Problem:
        """Training problem `index` >= 0. Constant time.

        Raises:
            ValueError: the family has next to no questions outside the held-out set.
        """
        if index < 0:
            raise IndexError(f"training problem {index}: the index starts at 0")
        cycles, place = divmod(index, len(self._cycle))
        family = self._cycle[place]
        first = (cycles * self._turns[family] + self._rank[place]) * _ATTEMPTS
        for item in range(first, first + _ATTEMPTS):
            problem = self._make(family, item)
            if not is_heldout(problem.question, self.heldout_every):
                return problem
        raise UserError(
            f"task family {self.family_names[family]!r}: items {first}..{first + _ATTEMPTS - 1} "
            "are all held out, so it has too few distinct questions to train on with "
            f"heldout_every={self.heldout_every}; widen its params"
        )

    def heldout(self, n_per_family: int) -> list[Problem]:
        """The first `n_per_family` distinct held-out questions of each family, family by family.

        A shorter list is a prefix of a longer one, family by family.

        Raises:
            ValueError: a family has fewer; says how many were found.
        """
        return [p for family in range(len(self._families)) for p in self._heldout_of(family, n_per_family)]

    def problem(self, problem_id: int) -> Problem:
        """The problem with this id, from either set.

        Raises:
            KeyError: no problem can have this id.
        """
        if not 0 <= problem_id < _MAX_ID:
            raise KeyError(f"problem id {problem_id}: ids of a mixture are 0..{_MAX_ID - 1}")
        item, family = divmod(problem_id, len(self._families))
        return self._make(family, item)

    def check_disjoint(self, num_train: int, n_per_family: int) -> None:
        """Compare the texts of the first `num_train` training problems with the held-out ones.

        Raises:
            ValueError: a question is in both sets; quotes it.
        """
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

    def _make(self, family: int, item: int) -> Problem:
        problem_id = item * len(self._families) + family
        if problem_id >= _MAX_ID:
            raise IndexError(f"item {item} of {self.family_names[family]!r}: problem ids end at {_MAX_ID - 1}")
        entry = self._families[family].item(item)
        return Problem(
            id=problem_id,
            family=self.family_names[family],
            question=entry["question"],
            answer=str(entry["answer"]),
            entry=entry,
        )

    def _heldout_of(self, family: int, n: int) -> list[Problem]:
        found = self._heldout[family]
        seen = {p.question for p in found}
        limit = max(_MIN_SCAN, _SCAN * n * self.heldout_every)
        while len(found) < n and self._scanned[family] < limit:
            problem = self._make(family, self._scanned[family])
            self._scanned[family] += 1
            if problem.question not in seen and is_heldout(problem.question, self.heldout_every):
                found.append(problem)
                seen.add(problem.question)
        if len(found) < n:
            raise UserError(
                f"task family {self.family_names[family]!r} has {len(found)} distinct held-out "
                f"questions in its first {self._scanned[family]} items, {n} are wanted: "
                f"ask for at most {len(found)}, or widen its params"
            )
        return found[:n]


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
