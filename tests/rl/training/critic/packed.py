"""Runs of a critic by padded and by packed rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl.experiment import RLExperiment
from rl.training.packing import Packing
from tests.rl.tiny import tiny_params
from tests.rl.training.test_trainer import Roles


def assert_packed_rows_learn_the_same(config: Callable[[], RLExperiment.Config], path: Path) -> None:
    """Assert that two updates have the same metrics by packed rows as by padded ones, but for the order of sums."""
    runs: list[list[dict[str, Any]]] = []
    for name, packing in (("padded", None), ("packed", Packing.Config(lengths=(12, 6), rows=2))):
        cfg = config()
        cfg.trainer.set(packing=packing)
        roles = Roles.make(path / name, cfg, initial=tiny_params(cfg.policy))  # pyright: ignore
        roles.advance(2)
        runs.append(roles.rows())
        roles.trainer.close()
    for padded, packed in zip(*runs, strict=True):
        for key in ("value_loss", "advantage_std", "critic_grad_norm", "grad_norm", "reward"):
            assert packed[key] == pytest.approx(padded[key], rel=1e-3), key
