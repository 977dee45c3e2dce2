"""A task family: one procedural dataset of reasoning-gym at one difficulty, addressed by item."""

import dataclasses
import hashlib
from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from mesh.errors import UserError, did_you_mean
from rl.tasks.reasoning_gym import import_reasoning_gym

__all__ = ["TaskFamily"]

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


class TaskFamily(Configurable):
    """Items 0, 1, 2, ... of a reasoning-gym dataset and its scorer.

    Item `i` is a pure function of (name, params, seed, i): any process that builds the same config
    sees the same item.
    """

    class Config(ConfigBase["TaskFamily"]):
        name: str = REQUIRED
        """A dataset of reasoning-gym, such as "chain_sum"."""
        params: dict[str, Any] = {}
        """Fields of that dataset's own config. `seed` and `size` belong to the mixture."""
        weight: float = 1.0
        """Share of the training problems, relative to the other families; 0: held-out only."""
        label: str | None = None
        """Name in metrics, `name` if None. Needed when a dataset occurs twice with other params."""

        @override
        def check_fields(self) -> None:
            self.require_least(0, "weight")

    def __init__(self, cfg: Config, *, seed: int):
        self.name = cfg.name
        self.label = cfg.label or cfg.name
        self.weight = cfg.weight
        _check_name(cfg.name)
        _check_params(cfg.name, cfg.params)
        digest = hashlib.blake2b(f"{seed}/{self.label}".encode(), digest_size=4).digest()
        params = dict(cfg.params, seed=int.from_bytes(digest, "big") >> 2)  # seed + i stays below 2**32 (numpy's limit)
        if cfg.name in _FINITE:
            params["size"] = _FINITE_SIZE
        try:
            self._dataset = import_reasoning_gym().create_dataset(cfg.name, **params)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(
                f"task family {self.label!r}: reasoning-gym refuses params {cfg.params}: {error}"
            ) from error
        self._finite = cfg.name in _FINITE

    def item(self, index: int) -> dict[str, Any]:
        """Item `index` >= 0 as reasoning-gym's own entry: {"question", "answer", "metadata"}."""
        return self._dataset[index % _FINITE_SIZE if self._finite else index]

    def score(self, answer: str, item: dict[str, Any]) -> float:
        """reasoning-gym's score of `answer`, in 0..1. May raise on what it cannot parse."""
        return self._dataset.score_answer(answer, item)


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
