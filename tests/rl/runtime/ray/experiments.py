"""Experiments for the tests of the runtimes, and the files of a run in a form to compare."""

import json
import os
import time
from pathlib import Path
from typing import Any, override

import jax
import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import list_steps, restore_params
from axlearn_like.config import to_text
from axlearn_like.input import SupervisedInput
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.training.early_stopping import EarlyStopping
from axlearn_like.training.trainer import Trainer
from rl.experiment import RLExperiment
from rl.protocol.messages import Score
from rl.runtime.inprocess import run_inprocess
from rl.tasks.supervised import SupervisedSource
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier
from tests.rl.tiny import PHRASES, ascii_share, tiny_experiment, tiny_tasks


def slow_share(problem_id: int, answer: str) -> float:
    """Return the tiny experiment's reward after a sleep: an update takes a third of a second and no CPU."""
    time.sleep(0.02)
    return ascii_share(problem_id, answer)


def slower_share(problem_id: int, answer: str) -> float:
    """Return the tiny experiment's reward after a longer sleep: an update takes about a second and no CPU."""
    time.sleep(0.06)
    return ascii_share(problem_id, answer)


def slow(reward: Any = slow_share, **changes: Any) -> RLExperiment.Config:
    """Return the tiny experiment without evaluation, slow enough to inject a fault in the middle."""
    verifier = Verifier.Config(scorer=FunctionScorer.Config(function=reward), processes=1)
    return tiny_experiment(num_steps=12, evaluation=None, verifier=verifier).set(**changes)


def fail_if_due() -> None:
    """Raise a RuntimeError as many times as the file AXL_TEST_FAILS has bytes."""
    left = Path(os.environ["AXL_TEST_FAILS"])
    if count := left.stat().st_size:
        os.truncate(left, count - 1)
        raise RuntimeError("a passing fault")


class FailingVerifier(InlineVerifier):
    """A verifier that raises so often by itself, for its caller to fail; what a scorer raises is a score."""

    class Config(InlineVerifier.Config):
        pass

    @override
    def score(self, *args: Any, **kwargs: Any) -> list[Score]:
        fail_if_due()
        return super().score(*args, **kwargs)


class FailingLearner(Learner):
    """A learner that raises a RuntimeError in the second trainer process, as many times as that file has bytes."""

    class Config(Learner.Config):
        pass

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        if jax.process_index() == 1:
            fail_if_due()


def short() -> RLExperiment.Config:
    """Return two updates with a checkpoint after each, without evaluation."""
    cfg = tiny_experiment(num_steps=2, evaluation=None)
    cfg.trainer.checkpoint.set(save_every=1)
    return cfg


def preempted() -> RLExperiment.Config:
    """Return `slow`, long enough for a trace of kills, with spares and a checkpoint now and then."""
    cfg = slow(num_steps=80, standby={"trainer": 1, "worker": 1})
    cfg.trainer.checkpoint.set(save_every=5)
    return cfg


def sharded() -> RLExperiment.Config:
    """Return `short` with the trainer over four devices."""
    cfg = short()
    cfg.trainer.mesh = {"fsdp": 4}
    return cfg


def warmed() -> RLExperiment.Config:
    """Return `short` with a supervised phase that is long enough to be interrupted."""
    cfg = short()
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    source = SupervisedSource.Config(mixture=tiny_tasks(), tokenizer=tokenizer, num_examples=512, start=1000)
    learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3))
    cfg.warm_start = Trainer.Config(
        model=cfg.policy,
        input=SupervisedInput.Config(source=source, seq_len=32, batch_size=4),
        learner=learner,
        checkpoint=Checkpointer.Config(save_every=100_000, keep=1),
        num_steps=200,
        log_every=1,
    )
    return cfg


def evaluated() -> RLExperiment.Config:
    """Return `warmed` with a short supervised phase, and evaluations."""
    cfg = warmed().set(evaluation=tiny_experiment().evaluation)
    assert cfg.warm_start is not None
    cfg.warm_start.set(num_steps=20, log_every=5)
    return cfg


def stopped_early() -> RLExperiment.Config:
    """Return `evaluated` with more updates, and early stopping after as many as that has."""
    cfg = evaluated().set(num_steps=20)
    cfg.trainer.early_stopping = EarlyStopping.Config(metric="completion_length", at_least=1.0, rows=1)
    return cfg


def run_here(path: Path, cfg: RLExperiment.Config) -> Path:
    """Run undisturbed, in this process."""
    with RunDirectory.open(path, to_text(cfg)) as run:
        assert run_inprocess(cfg.build(), run, lambda: False, lambda step: None) == cfg.num_steps
    return path


def run_in_parts(path: Path, cfg: RLExperiment.Config, *, stop_after: int) -> Path:
    """Run as `run_here` does, but stopped after so many updates and resumed."""
    seen: list[int] = []
    for last, stop in ((stop_after, lambda: stop_after in seen), (cfg.num_steps, lambda: False)):
        with RunDirectory.open(path, to_text(cfg)) as run:
            assert run_inprocess(cfg.build(), run, stop, seen.append) == last
    assert sorted(set(seen)) == [*range(cfg.num_steps + 1)]
    return path


def metrics(path: Path) -> list[dict[str, Any]]:
    """Return the RL rows of the metrics without timings."""
    rows = [row for row in read_rows(path / "metrics.jsonl") if row["phase"] == "rl"]
    return [without_clock(row) for row in rows]


def parameters(path: Path) -> dict[str, bytes]:
    """Return the bytes of the last checkpoint's parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(restore_params(path / "checkpoints" / "rl"))
    return {jax.tree_util.keystr(name): np.asarray(array).tobytes() for name, array in leaves}


def checksums(path: Path) -> dict[str, dict[str, Any]]:
    """Return shape, type and checksum of every array of the last checkpoint: parameters, optimizer state, RNG, step."""
    folder = path / "checkpoints" / "rl"
    last = folder / str(list_steps(folder)[-1])
    return json.loads((last / "manifest" / "metadata").read_text())


def events(path: Path, event: str, role: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of one event in the event log."""
    rows = read_rows(path / "events.jsonl")
    return [row for row in rows if row["event"] == event and role in (None, row["role"])]


def assert_same_outcome(path: Path, expected: Path) -> None:
    """Check that both made every update once and in order, with the same figures and trainer state to the bit."""
    assert metrics(path) == metrics(expected)
    assert [row["step"] for row in metrics(path)] == list(range(1, len(metrics(path)) + 1))
    assert parameters(path) == parameters(expected)
    assert checksums(path) == checksums(expected)
