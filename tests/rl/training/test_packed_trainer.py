"""A run of the trainer by packed rows: the same to the bit after a crash, as many programs as there are lengths."""

from pathlib import Path

import pytest

from axlearn_like.operations.recompilation import RecompilationError
from axlearn_like.operations.sdc import SDCCheck
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.experiment import RLExperiment
from rl.rollout.sampling import Sampler
from rl.training.packing import Packing
from tests.bounds import within
from tests.rl.tiny import tiny_params
from tests.rl.training.test_trainer import STEPS, Roles, config, host

pytestmark = pytest.mark.slow

LENGTHS = (12, 6)


def packed(**trainer: object) -> RLExperiment.Config:
    cfg = config()
    cfg.trainer.set(packing=Packing.Config(lengths=LENGTHS, rows=2), **trainer)
    return cfg


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Roles:
    roles = Roles.make(tmp_path_factory.mktemp("run") / "r", packed())
    roles.advance(STEPS)
    roles.trainer.close()
    return roles


@pytest.mark.numerics
def test_trainer_and_sampler_agree_and_the_wasted_tokens_are_reported(uninterrupted: Roles):
    rows = uninterrupted.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert within(row["logprob_diff_max"], 4e-6)
        assert within(row["scoring_diff_max"], 4e-6)
        assert 0 < row["wasted_tokens"] < 1
        assert within(row["drift_max"], 4e-6) and row["grad_norm"] > 0


def test_there_are_no_more_programs_than_lengths(uninterrupted: Roles):
    step = uninterrupted.trainer._loop.step_fn.step  # pyright: ignore
    assert 1 <= step.accumulate.compiled <= len(LENGTHS) and step.update.compiled == 1  # pyright: ignore
    compiled = [row for row in read_rows(uninterrupted.run.events_path) if row["event"] == "compile"]
    assert len(compiled) == step.accumulate.compiled + 1  # pyright: ignore


def test_a_killed_run_goes_on_as_if_nothing_had_been(uninterrupted: Roles, tmp_path: Path):
    killed = Roles.make(tmp_path / "r", packed())
    killed.advance(3)
    killed.crash()
    resumed = Roles.make(tmp_path / "r", packed())
    assert resumed.trainer.step == 2
    resumed.advance(STEPS)
    resumed.trainer.close()
    assert host(resumed.trainer.state) == host(uninterrupted.trainer.state)
    assert resumed.rows() == uninterrupted.rows()


def test_a_length_too_many_is_refused_and_a_step_can_be_repeated(tmp_path: Path):
    """Silent corruption is looked for by a second step: microbatches are not given away by the first."""
    roles = Roles.make(tmp_path / "r", packed(max_compilations=1, sdc_check=SDCCheck.Config(every=1)))
    roles.submit(rewards=[1.0, 0.0, 0.5, 0.2], lengths=[6, 6, 6, 6])  # 8 rows of 12 tokens
    assert roles.trainer.run_once()
    roles.trainer.settle()
    roles.submit(rewards=[1.0, 0.0, 0.5, 0.2], lengths=[1, 1, 1, 1])
    with pytest.raises(RecompilationError, match=r"max_compilations=1(?s:.*)batch/rows/action_mask: shape \(2, 12\)"):
        roles.trainer.run_once()


def test_what_is_for_padded_rows_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"microbatches: expected 1 with packing: .*, got 2"):
        Roles.make(tmp_path / "r", packed(microbatches=2))


@pytest.mark.numerics
@pytest.mark.full
def test_by_trees_trainer_and_sampler_agree_where_rollouts_begin_alike(tmp_path: Path):
    """Samples at a low temperature: half of their tokens are shared, and have the engine's log-probabilities."""
    cfg = packed().set(sampler=Sampler.Config(temperature=0.1))
    assert cfg.trainer.packing is not None
    cfg.trainer.packing.tree = True
    roles = Roles.make(tmp_path / "r", cfg, initial=tiny_params(cfg.policy))  # pyright: ignore
    roles.advance(2)
    roles.trainer.close()
    rows = roles.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["shared_tokens"] for row in rows) > 0.2
    for row in rows:
        assert within([row["logprob_diff_max"], row["scoring_diff_max"]], 4e-5)  # logits are ten times as large


def test_trees_are_refused_where_each_rollout_has_a_record(tmp_path: Path):
    cfg = packed(candidate_tokens=4)
    assert cfg.trainer.packing is not None
    cfg.trainer.packing.tree = True
    with pytest.raises(
        UserError, match=r"[Pp]acking.tree: expected False, for rollouts that share a token have a record"
    ):
        cfg.trainer.build_packing()
