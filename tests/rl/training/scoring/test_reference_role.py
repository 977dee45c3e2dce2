"""A reference on devices of its own: runs have the bits of those whose trainer scores by it, on a mesh of its shape."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.run.metrics import read_rows
from axlearn_like.training.alignment.reference import FrozenCopy, MovingAverage, WithoutAdapters
from experiments.modifiers import low_rank
from mesh import UserError
from mesh.distributed import ProcessGroup
from rl.experiment import RLExperiment
from rl.fleet.fleet import Fleet
from rl.objective import ReferencePenalty
from rl.objective.presets import grpo, reinforce_pp
from rl.rollout.sampling import RecordedSampler
from rl.runtime.run import RLRun
from rl.training.packing import Packing
from rl.training.scoring.reference_role import ReferenceRole, ReferenceScorer
from rl.training.scoring.reference_scores import PendingArrays
from rl.training.spec import FirstVersion
from rl.training.updates import Updates
from tests.elsewhere import elsewhere
from tests.rl.runtime.ray.experiments import metrics, parameters, run_here
from tests.rl.tiny import tiny_experiment, tiny_params
from tests.rl.training.test_replay import experiment as mixture
from tests.rl.training.test_teacher import taught
from tests.rl.training.test_trainer import put

KINDS = {
    "padded": {"objective": grpo(kl_coef=0.5)},
    "packed": {"objective": grpo(kl_coef=0.5).set(old_policy="recompute")},
    "penalty": {"objective": reinforce_pp(reward_kl=0.5)},
    "adapters": {"objective": grpo(kl_coef=0.5)},
    "reset": {"objective": grpo(kl_coef=0.5)},
}


def config(kind: str, path: Path, fleet: str | None = None) -> RLExperiment.Config:
    """Return two updates with a reference, of which the second has left it."""
    if kind == "teacher":
        cfg = taught(path)
    elif kind == "replayed":  # by the experts, and among the tokens, that the engine recorded; in the reward, too
        objective = grpo(kl_coef=0.5).set(reward_shaping=ReferencePenalty.Config(coef=0.3))
        sampler = RecordedSampler.Config(temperature=0.9, top_p=0.8, most=5)
        cfg = mixture(reference=FrozenCopy.Config()).set(objective=objective, sampler=sampler)
    else:
        cfg = tiny_experiment(**KINDS[kind])
        cfg.trainer.reference = FrozenCopy.Config()
    if kind == "packed":
        cfg.trainer.set(
            packing=Packing.Config(lengths=(12, 6), rows=2), updates=Updates.Config(minibatches=2, epochs=2)
        )
    if kind == "adapters":
        low_rank(cfg)
        cfg.trainer.reference = WithoutAdapters.Config()
    if kind == "reset":
        cfg.trainer.reference = FrozenCopy.Config(reset_every=2)
    cfg.fleet = Fleet.Config(reference=fleet)
    return cfg.set(num_steps=5 if kind == "reset" else 2, evaluation=None)


def both(path: str, kinds: list[str]) -> list[tuple[bool, bool, list[bool]]]:
    """Return of each kind: the parameters are the same, so are the figures, and which checkpoint has a copy."""
    jax.config.update("jax_num_cpu_devices", 2)
    found: list[tuple[bool, bool, list[bool]]] = []
    for kind in kinds:
        at = Path(path) / kind
        at.mkdir()
        runs = [run_here(at / str(fleet), config(kind, at, fleet)) for fleet in (None, "cpu:1")]
        rows = read_rows(runs[1] / "metrics.jsonl")
        same = metrics(runs[0]) == metrics(runs[1]) and all(row["reference_wait_seconds"] > 0 for row in rows)
        kept = [(max((run / "checkpoints" / "rl").iterdir()) / "constant").exists() for run in runs]
        found.append((parameters(runs[0]) == parameters(runs[1]), same, kept))
    return found


def test_a_role_scores_as_the_trainer_does_to_the_bit(tmp_path: Path):
    """The trainer's checkpoint has no copy then."""
    assert elsewhere(both, str(tmp_path), ["padded"]) == [[True, True, [True, False]]]


@pytest.mark.full
def test_so_it_does_of_every_kind(tmp_path: Path):
    found = elsewhere(
        both, str(tmp_path), ["packed", "penalty", "adapters", "teacher", "reset", "replayed"], timeout=600
    )
    assert [one[:2] for one in found] == [[True, True]] * 6
    assert sorted(path.name for path in (tmp_path / "reset" / "cpu:1" / "reference").iterdir()) == ["2", "4"]


def rows_over_devices(rows: int, packed: bool) -> list[list[float]]:
    """Return the scores of some rows by one device, and by two, of which each takes two packed rows at a time."""
    jax.config.update("jax_num_cpu_devices", 2)
    cfg = config("packed" if packed else "penalty", Path())
    trainer: Any = cfg.build().trainer_cfg
    initial = tiny_params(cfg.policy)  # pyright: ignore
    rng = np.random.default_rng(0)
    if packed:
        batch: dict[str, Any] = {
            name: np.zeros((rows, length), np.int32)
            for length, names in ((22, ("prefix", "prefix_segments", "prefix_positions")), (12, ("starts",)))
            for name in names
        }
        batch |= {name: rng.integers(0, 256, (rows, 12), dtype=np.int32) for name in ("inputs", "targets")}
        batch |= {
            "segments": np.ones((rows, 12), np.int32),
            "positions": np.tile(np.arange(12, dtype=np.int32), (rows, 1)),
        }
    else:
        batch = {name: rng.integers(0, 256, (rows, 32), dtype=np.int32) for name in ("tokens", "targets")}
    devices, kind = jax.devices(), "rows" if packed else "rollouts"
    scorers = [
        ReferenceScorer(trainer, first=FirstVersion(lambda like: put(initial, like)), devices=devices[:count])
        for count in (1, 2)
    ]
    return [found.ravel().tolist() for scorer in scorers if (found := scorer.score(kind, batch, 0)) is not None]


@pytest.mark.numerics
@pytest.mark.full
@pytest.mark.parametrize(("rows", "packed"), [(3, False), (3, True), (9, True)])
def test_rows_that_do_not_divide_over_the_devices_are_scored_all_the_same(rows: int, packed: bool):
    one, two = elsewhere(rows_over_devices, rows, packed)
    assert len(one) == rows * (12 if packed else 32) and np.std(one) > 0.1
    np.testing.assert_allclose(one, two, rtol=2e-6)


def test_batches_are_complete_when_they_are_read_and_the_first_one_at_once():
    read: list[int] = []
    batches = PendingArrays([lambda n=n: read.append(n) or n for n in range(3)])
    assert read == [0] and len(batches) == 3
    assert list(batches) == [0, 1, 2] and read == [0, 0, 1, 2]
    assert batches[1:] == [1, 2] and PendingArrays([])[:] == []


def test_rows_of_an_answered_request_are_refused():
    role = ReferenceRole(None, ProcessGroup(), None)  # pyright: ignore
    with pytest.raises(RuntimeError, match="request 3 of the reference is over; 0 is being answered"):
        role.part(3, [0])


def test_a_role_without_a_reference_and_one_that_follows_the_updates_are_refused_with_the_way_out():
    def refused(**changes: Any) -> str:
        cfg = config("padded", Path(), "cpu:1")
        cfg.trainer.set(**changes)
        with pytest.raises(UserError) as error:
            RLRun(cfg.build()).check("inprocess")
        return str(error.value)

    plain = tiny_experiment(fleet=Fleet.Config(reference="cpu:1"))
    with pytest.raises(UserError, match=r"fleet\.reference: expected None, .*; or set trainer\.reference=FrozenCopy"):
        plain.check("inprocess")
    assert "None with trainer.reference=MovingAverage, for it is made of all" in refused(
        reference=MovingAverage.Config()
    )
    saved = refused(reference=FrozenCopy.Config(reset_every=3))
    assert "checkpoint.save_every: expected a divisor of trainer.reference.reset_every=3" in saved
    assert "fleet.reference: expected some of the" in refused()  # this process has one device
