"""A worker that cheats, or errs, is found, and the run has the bits of one without it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from mesh import make_mesh
from rl.experiment import RLExperiment
from rl.parameter_server.client import connect_local
from rl.parameter_server.pull.prefetcher import Prefetcher
from rl.protocol.messages import Group, Rollout, Score
from rl.rollout.sampling import Sampler
from rl.rollout.worker import RolloutWorker
from rl.rollout.worker_policy import WorkerServices
from rl.training.spec import TrainerServices
from tests.rl.runtime.ray.experiments import events, metrics, parameters, run_here
from tests.rl.tiny import tiny_experiment

WORKERS = ("worker-0", "worker-1", "worker-2")
Groups = tuple[Group, ...]


class Cheat(Protocol):
    """Injected into a worker: `params` before they are placed, `groups` before they are submitted."""

    def __call__(self, groups: Groups) -> Groups: ...


def of_first(change: Callable[[Rollout], Rollout]) -> Cheat:
    """Change one rollout of each lease."""

    def cheat(groups: Groups) -> Groups:
        first, *others = groups[0].rollouts
        return dataclasses.replace(groups[0], rollouts=(change(first), *others)), *groups[1:]

    return cheat


def set_at(name: str, position: int, value: Callable[[Any], Any]) -> Cheat:
    def change(rollout: Rollout) -> Rollout:
        array = getattr(rollout, name).copy()
        array[position] = value(array[position])
        return dataclasses.replace(rollout, **{name: array})

    return of_first(change)


def cut(rollout: Rollout) -> Rollout:
    names = ("tokens", "logprobs", "versions", "action_mask")
    return dataclasses.replace(rollout, **{name: getattr(rollout, name)[:-1] for name in names})


def better_reward(groups: Groups) -> Groups:
    return tuple(dataclasses.replace(g, scores=tuple(Score(s.reward + 0.125) for s in g.scores)) for g in groups)


def copied(groups: Groups) -> Groups:
    """Give the answer of the first sample for all."""
    return tuple(
        dataclasses.replace(
            group,
            rollouts=tuple(dataclasses.replace(group.rollouts[0], sample_id=r.sample_id) for r in group.rollouts),
        )
        for group in groups
    )


def exchanged(groups: Groups) -> Groups:
    """Give the answers to one prompt for another one."""
    one, *others = groups
    wrong = tuple(dataclasses.replace(r, prompt_id=one.prompt.id) for r in groups[-1].rollouts)
    return dataclasses.replace(one, rollouts=wrong), *others


def picked(groups: Groups) -> Groups:
    """Put the best answers of a prompt where the first ones are: selection by reward."""
    return tuple(
        dataclasses.replace(
            group,
            rollouts=tuple(
                dataclasses.replace(group.rollouts[n], sample_id=place)
                for place, n in enumerate(np.argsort([-s.reward for s in group.scores], kind="stable"))
            ),
            scores=tuple(sorted(group.scores, key=lambda score: -score.reward)),
        )
        for group in groups
    )


def to_int8(params: Any) -> Any:
    """Round matrices to 255 levels: a cheaper model."""

    def rounded(x: Any) -> Any:
        x = np.asarray(x)
        scale = np.abs(x).max() / 127 or 1.0
        return jax.numpy.asarray(np.round(x / scale) * scale if x.ndim > 1 else x, x.dtype)

    return jax.tree.map(rounded, params)


def flipped_bit(params: Any) -> Any:
    """Flip one bit of one weight, as memory that errs does."""
    leaves, tree = jax.tree.flatten(params)
    index = next(n for n, leaf in enumerate(leaves) if np.ndim(leaf) > 1)
    wrong = np.array(leaves[index])
    wrong.reshape(-1).view(np.uint32)[5] ^= 1 << 22
    return jax.tree.unflatten(tree, [*leaves[:index], jax.numpy.asarray(wrong), *leaves[index + 1 :]])


# Cheating of a worker: with its groups, its weights, its seed, or its engine.
CHEATS: dict[str, dict[str, Any]] = {
    "stale weights": {"stale": True},
    "another seed": {"seed": 1},
    "a cheaper model": {"params": to_int8},
    "a flipped bit of a weight": {"params": flipped_bit},
    "another temperature": {"sampler": Sampler.Config(temperature=0.9)},
    "a token": {"groups": set_at("tokens", 2, lambda token: (token + 1) % 200)},
    "a log-probability by one ulp": {"groups": set_at("logprobs", 1, lambda x: np.nextafter(x, np.float32(-9)))},
    "a log-probability that is none": {"groups": set_at("logprobs", 0, lambda x: np.nan)},
    "a version": {"groups": set_at("versions", 0, lambda version: version + 1)},
    "an end cut off": {"groups": of_first(cut)},
    "better rewards": {"groups": better_reward},
    "one answer for all samples": {"groups": copied},
    "answers to another prompt": {"groups": exchanged},
    "the best answers first": {"groups": picked},
    "a sample left out": {"groups": lambda groups: (dataclasses.replace(groups[0], rollouts=()), *groups[1:])},
    "hardware of another class": {
        "params": to_int8,
        "groups": lambda groups: tuple(dataclasses.replace(g, hardware="cpu of tomorrow") for g in groups),
    },
}
EVERY_RUN = ("stale weights", "a log-probability by one ulp", "better rewards", "a sample left out")


class BadController:
    """The controller, for a worker that changes what it submits."""

    def __init__(self, controller: Any, groups: Callable[[Groups], Groups]):
        self._controller, self._groups = controller, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def submit(self, lease: int, groups: Groups) -> bool:
        return self._controller.submit(lease, self._groups(groups))


class StaleWeights:
    """A worker's source of weights that gives those of the version before."""

    def __init__(self):
        self._last: Any = None

    def of(self, params: Any) -> Any:
        before = params if self._last is None else self._last
        self._last = params
        return before


def run_audited(path: Path, cfg: RLExperiment.Config, bad: str = "", **cheat: Any) -> Path:
    """Run in this process with three workers that take turns, of which the `bad` one does as `cheat` says."""
    with RunDirectory.open(path, to_text(cfg)) as run:
        experiment: RLExperiment = cfg.build()
        controller: Any = experiment.make_controller(run)
        client = connect_local(experiment.make_parameter_server())

        def worker(name: str, mine: dict[str, Any]) -> RolloutWorker:
            changes = {"sampler": mine["sampler"]} if "sampler" in mine else {}
            engine = experiment.make_engine(**changes)
            change = mine.get("params", lambda params: params)
            if mine.get("stale"):
                change = StaleWeights().of
            receiver = client.receiver(engine.runner.weights_like, worker=name)

            def place(params: Any) -> Any:
                placed = engine.place(params)
                return dataclasses.replace(placed, params=change(placed.params))

            weights = Prefetcher(receiver, place, newest=False, background=False)
            source: Any = BadController(controller, mine.get("groups", lambda groups: groups))
            services = WorkerServices(source, weights, verifier, EventLog(run.events_path))
            policy = experiment.worker_policy(services)
            own = {field: mine[field] for field in ("sampler", "seed") if field in mine}
            return RolloutWorker(name, engine, {"": dataclasses.replace(policy, **own)})

        with experiment.make_verifier() as verifier:
            trainer = experiment.make_trainer(run, TrainerServices(controller, client))
            workers = [worker(name, cheat if name == bad else {}) for name in WORKERS]
            with trainer, jax.set_mesh(make_mesh()):
                trainer.start()
                while not trainer.done():
                    for one in workers:
                        one.run_once()
                    if trainer.run_once():
                        trainer.settle()
                trainer.close()
    return path


def config(**changes: Any) -> RLExperiment.Config:
    cfg = tiny_experiment(num_steps=2, evaluation=None, **changes)
    cfg.controller.set(audit=1.0)
    return cfg


def learnt(path: Path) -> list[dict[str, Any]]:
    return [{name: x for name, x in row.items() if not name.startswith("audit")} for row in metrics(path)]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without audits, by the usual roles."""
    return run_here(tmp_path_factory.mktemp("honest"), tiny_experiment(num_steps=2, evaluation=None))


@pytest.mark.slow
def test_audits_of_honest_workers_change_nothing_and_find_nothing(honest: Path, tmp_path: Path) -> None:
    path = run_audited(tmp_path, config())
    assert learnt(path) == learnt(honest) and parameters(path) == parameters(honest)
    assert [(row["audited"], row["audit_failures"]) for row in metrics(path)] == [(16.0, 0.0)] * 2
    assert events(path, "audit") and not events(path, "audit_failed") + events(path, "quarantined")


def check_without(path: Path, honest: Path, bad: str) -> None:
    assert learnt(path) == learnt(honest) and parameters(path) == parameters(honest)
    rows = read_rows(path / "events.jsonl")
    assert [row["worker"] for row in rows if row["event"] == "quarantined"] == [bad]
    found = next(n for n, row in enumerate(rows) if row["event"] == "quarantined")
    assert any(row["role"] == bad and row["event"] in ("generate", "audit") for row in rows[:found])
    later = [row for row in rows[found + 1 :] if row["role"] == bad and row["event"] in ("generate", "audit", "pull")]
    assert not later, "it gets nothing more"
    named = [row for row in rows if row["event"] == "audit_failed"]
    assert all(row["worker"] == bad and {"prompt", "sample", "position", "differs"} <= row.keys() for row in named)
    assert sum(row["audit_failures"] for row in metrics(path)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.full] * (k not in EVERY_RUN)) for k in CHEATS])
def test_a_worker_that_cheats_is_quarantined_and_the_run_is_that_without_it(
    kind: str, honest: Path, tmp_path: Path
) -> None:
    """The first to ask draws first, and the two others find it out."""
    check_without(run_audited(tmp_path, config(), WORKERS[0], **CHEATS[kind]), honest, WORKERS[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a log-probability by one ulp", "a sample left out"])
def test_a_worker_that_accuses_an_honest_one_is_found_itself(kind: str, honest: Path, tmp_path: Path) -> None:
    """The second to ask draws again what the first one has drawn."""
    check_without(run_audited(tmp_path, config(), WORKERS[1], **CHEATS[kind]), honest, WORKERS[1])
