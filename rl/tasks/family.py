"""A task family: one procedural dataset of reasoning-gym at one difficulty, addressed by item."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any, override

from axlearn_like.config import REQUIRED
from mesh.errors import UserError, did_you_mean
from rl.protocol.messages import Problem
from rl.tasks.heldout import is_heldout
from rl.tasks.reasoning_gym import import_reasoning_gym
from rl.tasks.safe_answers import readable
from rl.tasks.source import ProblemSource

# Measured with reasoning-gym 0.1.25: these draw from the order of sets, from hashes of strings or
# from the global random state, so their item i differs between two processes or two calls: the
# verifier would score against another problem than the one that was asked.
_NOT_REPRODUCIBLE = (
    "codeio",
    "intermediate_integration",
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
_NEEDS_DATASETS = ("composite",)  # a mixture itself
# These prepare `size` items when they are built; the others derive item i from seed + i alone.
_FINITE = ("acre", "gsm_symbolic")
_FINITE_SIZE = 5_000
_RESERVED = ("seed", "size")
# Measured with reasoning-gym 0.1.25: the entry's own answer is missing, or does not score 1.
_NO_ANSWERS = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
# Measured with reasoning-gym 0.1.25: its scorer gives 1 to any answer with a letter; here it must be the text.
_BY_TEXT = ("game_of_life_halting",)
_ATTEMPTS = 16  # items reserved for one training problem; the first that can be used is taken
_SPARE = 240  # further ones, anywhere, for the rare problem of which none can be
_SPARE_ITEMS = 2**20  # items among which these are
_SCAN = 64  # gives up on held-out problems after this many times the expected number of items ...
_MIN_SCAN = 20_000  # ... or this many, whichever is more


class TaskFamily(ProblemSource):
    """Items 0, 1, 2, ... of a reasoning-gym dataset and its scorer.

    Item `i` is a pure function of (name, params, seed, i): any process that builds the same config
    sees the same item.
    """

    class Config(ProblemSource.Config):
        # A dataset of reasoning-gym, such as "chain_sum". `label` is needed where one occurs twice.
        name: str = REQUIRED
        # Fields of that dataset's own config. `seed` and `size` belong to the mixture.
        params: dict[str, Any] = {}

        @property
        @override
        def title(self) -> str:
            return self.label or self.name

    def __init__(self, cfg: Config, *, seed: int):
        super().__init__(cfg)
        self.name = cfg.name
        _check_name(cfg.name)
        _check_params(cfg.name, cfg.params)
        digest = hashlib.blake2b(f"{seed}/{self.label}".encode(), digest_size=4).digest()
        params = dict(cfg.params, seed=int.from_bytes(digest, "big") >> 2)  # seed + i stays below 2**32 (numpy's limit)
        if cfg.name in _FINITE:
            params["size"] = _FINITE_SIZE
        try:
            self._dataset = _dataset(cfg.name, json.dumps(params, sort_keys=True, default=repr), params)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(
                f"task family {self.label!r}: reasoning-gym refuses params {cfg.params}: {error}"
            ) from error
        self._finite = cfg.name in _FINITE

    def item(self, index: int) -> dict[str, Any]:
        """Item `index` >= 0 as reasoning-gym's own entry: {"question", "answer", "metadata"}."""
        return self._dataset[index % _FINITE_SIZE if self._finite else index]

    @override
    def make(self, item: int, problem_id: int) -> Problem:
        entry = self.item(item)
        answer = str(entry["answer"]) if self.has_answers else ""
        return Problem(problem_id, self.label, question=entry["question"], answer=answer, entry=entry)

    @override
    def candidates(self, turn: int) -> Iterator[int]:
        yield from range(turn * _ATTEMPTS, (turn + 1) * _ATTEMPTS)
        for attempt in range(_SPARE):
            digest = hashlib.blake2b(f"{self.label}/{turn}/{attempt}".encode(), digest_size=8).digest()
            yield int.from_bytes(digest, "big") % _SPARE_ITEMS

    @override
    def heldout_candidates(self, wanted: int, heldout_every: int) -> Iterator[int]:
        return iter(range(max(_MIN_SCAN, _SCAN * wanted * heldout_every)))

    @override
    def is_heldout(self, problem: Problem, heldout_every: int) -> bool:
        return is_heldout(problem.question, heldout_every)

    @property
    @override
    def has_answers(self) -> bool:
        return self.name not in _NO_ANSWERS

    @override
    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """reasoning-gym's score of `answer`, in 0..1. May raise on what it cannot parse.

        An answer that its scorer would run as code is scored as one that it cannot read (`rl.tasks.safe_answers`).
        """
        if self.name in _BY_TEXT:
            return float(answer.strip() == str(entry["answer"]))
        return self._dataset.score_answer(readable(self.name, answer, entry), entry)


_MADE: dict[tuple[str, str], Any] = {}


def _dataset(name: str, key: str, params: dict[str, Any]) -> Any:
    """Return a dataset of these params; `key` is their text.

    Equal ones are one in a process: the controller, scorers and evaluations of a run have equal tasks, nothing changes
    a dataset, and to make one takes up to a second ("spell_backward" reads a book).
    """
    if (name, key) not in _MADE:
        _MADE[name, key] = import_reasoning_gym().create_dataset(name, **params)
    return _MADE[name, key]


def _check_name(name: str) -> None:
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    if name in _NOT_REPRODUCIBLE:
        raise UserError(
            f"task family {name!r}: reasoning-gym's items of this dataset differ from process to "
            "process, so answers could not be verified; the same holds for "
            f"{', '.join(n for n in _NOT_REPRODUCIBLE if n != name)}"
        )
    if name in _NEEDS_DATASETS:
        raise UserError(f"task family {name!r} is itself a mixture: name its parts in TaskMixture.Config.families")
    if name not in DATASETS:
        raise UserError(f"unknown task family {name!r}{did_you_mean(name, DATASETS, limit=len(DATASETS))}")


def _check_params(name: str, params: dict[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    accepted = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.init and f.name not in _RESERVED]
    for key in params:
        if key in _RESERVED:
            raise UserError(
                f"task family {name!r}: param {key!r} belongs to the mixture, which is endless and has its own seed"
            )
        if key not in accepted:
            hint = did_you_mean(key, accepted, limit=len(accepted))
            raise UserError(f"task family {name!r} has no param {key!r}{hint}")
