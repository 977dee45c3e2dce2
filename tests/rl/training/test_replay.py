"""Runs that replay the routing which the engine recorded, and those that cannot."""

import math
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.run.metrics import read_rows
from rl.experiment import RLExperiment
from rl.rollout.sampling import RecordedSampler
from rl.training.packing import Packing
from tests.bounds import within
from tests.rl.runtime.ray.experiments import run_here
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.numerics


def experiment(**fields: Any) -> RLExperiment.Config:
    """The tiny experiment with two of four experts for each token."""
    cfg = tiny_experiment(num_steps=2, evaluation=None)
    assert isinstance(cfg.policy, Decoder.Config) and isinstance(cfg.policy.block, Block.Config)
    router = SoftmaxRouter.Config(top_k=2)
    cfg.policy.block.feed_forward = MoE.Config(num_experts=4, router=router, experts=Experts.Config(hidden=16))
    cfg.trainer.set(replay_routing=True, **fields)
    return cfg


@pytest.mark.full
@pytest.mark.parametrize("packing", [None, Packing.Config()], ids=["padded", "packed"])
def test_a_run_counts_the_bytes_of_its_records_and_scores_as_the_engine_did(tmp_path: Path, packing: Any):
    path = run_here(tmp_path, experiment(packing=packing))
    rows = read_rows(path / "metrics.jsonl")
    assert [row["scoring_diff_max"] for row in rows] == [0.0, 0.0]
    assert all(within(row["logprob_diff_max"], 1e-5) for row in rows)
    drawn = [row for row in read_rows(path / "events.jsonl") if row["event"] == "generate"]
    assert sum(row["routing_bytes"] for row in drawn) == sum(row["routing_bytes"] for row in rows) > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="padded"),
        pytest.param({"packing": Packing.Config(), "chunks": 2}, id="packed"),
        pytest.param({"packing": Packing.Config(), "head_tile": 128}, id="tiles"),
    ],
)
def test_a_run_with_top_p_scores_among_the_tokens_that_the_engine_drew_from(tmp_path: Path, fields: Any):
    """The ratio is one though a part of the distribution was cut off, and the bytes of the records are counted."""
    sampler = RecordedSampler.Config(temperature=0.9, top_p=0.8, most=5)
    cfg = tiny_experiment(num_steps=2, evaluation=None, sampler=sampler)
    cfg.trainer.set(**fields)
    path = run_here(tmp_path, cfg)
    rows = read_rows(path / "metrics.jsonl")
    assert [row["scoring_diff_max"] for row in rows] == [0.0, 0.0]
    assert all(within(row["logprob_diff_max"], 1e-5) and row["ratio_max"] == 1 for row in rows)
    assert all(0 < row["entropy"] < math.log(5) for row in rows)
    assert all(0 < row["candidate_tokens_bytes"] <= 5 * 2 * row["gen_tokens"] for row in rows)


def test_the_engine_records_if_the_trainer_replays():
    made = experiment().build()
    resolved: Any = made.resolved()
    engine, trainer = resolved.engine.model, resolved.trainer.model
    assert engine.block.feed_forward.record_routing and not trainer.block.feed_forward.record_routing
    replayed = made.trainer_cfg.replay_layout()
    assert replayed is not None and (replayed.shape, replayed.recorded) == ((1, 2), False)


def test_a_policy_without_experts_is_refused():
    cfg = tiny_experiment()
    cfg.trainer.replay_routing = True
    with pytest.raises(ConfigError, match=r"trainer\.replay_routing: .* has no MoE") as refused:
        cfg.build()
    assert refused.value.path.endswith("trainer.replay_routing")
