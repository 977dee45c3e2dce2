"""Updates by parts of a batch, in one process, against the trainer's own step over whole batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import replace
from axlearn_like.elastic.elastic import Elastic
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.run.metrics import read_rows
from tests.axlearn_like.tiny import tiny_trainer

pytestmark = pytest.mark.numerics

STEPS = 5


def rows_of(folder: Path, *, experts: bool, **changes: Any) -> list[dict[str, Any]]:
    cfg = tiny_trainer(STEPS, evaluators=(), **changes)
    if experts:
        # No loss of the router's: it is a mean over the rows of a part, so it depends on the parts, as on microbatches.
        router = SoftmaxRouter.Config(top_k=2, load_balance=0.0)
        mixture = MoE.Config(num_experts=4, router=router, experts=Experts.Config(hidden=24))
        replace(cfg, SwiGLU.Config, lambda _: mixture)
    cfg.build().run(folder, progress=False)
    return read_rows(folder / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.full)])
def test_parts_give_the_curve_of_whole_batches(tmp_path: Path, experts: bool):
    expected = rows_of(tmp_path / "whole", experts=experts)
    assert len(expected) == STEPS
    for parts in (4,) if experts else (8, 2):
        found = rows_of(tmp_path / str(parts), experts=experts, elastic=Elastic.Config(parts=parts))
        for name in ("loss", "grad_norm", "accuracy", "tokens"):
            values = [[row[name] for row in rows] for rows in (found, expected)]
            np.testing.assert_allclose(*values, rtol=1e-4 if experts else 1e-5, err_msg=name)
