"""Updates made again from a run's directory: the same bits, none written there, and what another circumstance gives."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import to_text
from axlearn_like.layers.parameter_names import path_name
from axlearn_like.run.directory import RunDirectory
from mesh.errors import UserError
from rl.objective.presets import maxrl
from rl.protocol.messages import Score
from rl.runtime.replay.record import RunRecord
from rl.runtime.replay.update import Changes, replay
from tests.benches.recovery.injected_faults.faults import changed_groups, score_change
from tests.rl.runtime.ray.experiments import run_here, run_in_parts, slow, warmed
from tests.rl.runtime.ray.test_runtime import run_with_ray
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.slow


def five(**changes: Any) -> Any:
    """Five updates with rollouts of the version before, and a checkpoint after the second and the fourth."""
    cfg = tiny_experiment(num_steps=5, staleness=1, evaluation=None, **changes)
    cfg.trainer.checkpoint.set(keep=9)
    return cfg


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped and resumed."""
    return run_in_parts(tmp_path_factory.mktemp("replay") / "run", five(), stop_after=3)


def content(path: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of every file."""
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(f): (hashlib.sha256(f.read_bytes()).hexdigest(), f.stat().st_mtime_ns) for f in files}


def weights(path: Path) -> dict[str, np.ndarray]:
    """The newest checkpoint's parameters by path."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(restore_params(path / "checkpoints" / "rl"))
    return {f"weights/{path_name(key)}": np.asarray(leaf) for key, leaf in leaves}


def scratches() -> list[Path]:
    """Return the scratch folders of this process; others may replay beside it."""
    return [*Path(tempfile.gettempdir()).glob(f"axl-replay-{os.getpid()}-*")]


@pytest.mark.parametrize(("update", "start"), [(2, 0), (5, 4)])
def test_an_update_is_made_again_to_the_bit_and_nothing_is_written(run: Path, update: int, start: int) -> None:
    before, left = content(run), scratches()
    done = replay(RunRecord(run), update)
    assert (done.start, done.unequal) == (start, None)
    assert done.versions[update] == RunRecord(run).versions[update]["checksum"]
    if update == 5:
        saved = weights(run)
        assert all(np.array_equal(done.trace.arrays[name], array) for name, array in saved.items()) and saved
    assert content(run) == before and scratches() == left


def edited(run: Path, path: Path, name: str, edit: Any) -> RunRecord:
    """A copy of a run, without checkpoints, with another row."""
    path.mkdir()
    for file in run.glob("*.*"):
        shutil.copy(file, path / file.name)
    (path / "checkpoints").symlink_to(run / "checkpoints")
    rows = [json.loads(line) for line in (path / name).read_text().splitlines()]
    for row in rows:
        edit(row)
    (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunRecord(path)


def test_what_a_record_has_that_the_update_does_not_give_is_named(run: Path, tmp_path: Path) -> None:
    def entropy(row: dict[str, Any]) -> None:
        if row["step"] == 5:
            row["entropy"] += 1e-6

    def arrays(row: dict[str, Any]) -> None:
        if row["event"] == "push" and row["version"] == 5:
            row |= {"checksum": "0" * 32, "arrays": row["arrays"][:16] + "0" * 8 + row["arrays"][24:]}

    def rewards(row: dict[str, Any]) -> None:
        if row["event"] == "update" and row["step"] == 4:
            row["rewards"] = row["rewards"][:-8] + "0" * 8

    for name, edit, part, what in (
        ("metrics.jsonl", entropy, "metrics", ("entropy",)),
        ("events.jsonl", arrays, "weights", (2,)),
        ("events.jsonl", rewards, "rewards", (3,)),
    ):
        done = replay(edited(run, tmp_path / part, name, edit), 5)
        assert done.unequal is not None
        number, [found] = done.unequal
        assert (number, found.part, found.what) == (5, part, what)


def test_another_reward_gives_the_update_of_a_run_in_which_it_was_given(run: Path, tmp_path: Path) -> None:
    with changed_groups(score_change(2, Score(1.0)))(5), changed_groups(score_change(3, Score(0.0, "error")))(5):
        right = run_here(tmp_path / "right", five())
    groups = [done[0] for done in (replay(RunRecord(run), 5).trace.samples[i : i + 4] for i in range(0, 16, 4))]
    second = [groups[1][0], groups[3][0]]  # place 1 of each lease
    changes = Changes(rewards=dict.fromkeys([(p, 2) for p in second], 1.0), dropped=frozenset((p, 3) for p in second))
    done = replay(RunRecord(run), 5, changes)
    assert done.unequal is None and done.changed is not None
    assert all(np.array_equal(done.changed.arrays[name], array) for name, array in weights(right).items())
    moved = done.movement()
    one, other = (
        np.concatenate([(trace.arrays[f"weights/{n}"].astype(float) - x).ravel() for n, x in trace.before.items()])
        for trace in (done.trace, done.changed)
    )
    sizes = np.linalg.norm(one), np.linalg.norm(other)
    assert moved["norm"] == pytest.approx(sizes[0], rel=1e-9) and moved["changed_norm"] == pytest.approx(sizes[1])
    assert moved["cosine"] == pytest.approx(one @ other / sizes[0] / sizes[1]) and 0 < moved["cosine"] < 1


@pytest.mark.full
def test_another_objective_gives_the_update_of_a_run_that_is_forced_to_it(run: Path, tmp_path: Path) -> None:
    cfg = five(objective=maxrl().set(old_policy="current", zero_variance="drop"))
    other = tmp_path / "other"
    RunDirectory.open(other, to_text(cfg)).close()
    shutil.copytree(run / "checkpoints" / "rl" / "4", other / "checkpoints" / "rl" / "4")
    run_here(other, cfg)
    done = replay(RunRecord(run), 5, Changes(edit=lambda made: made.set(objective=cfg.objective)))
    assert done.changed is not None
    assert all(np.array_equal(done.changed.arrays[name], array) for name, array in weights(other).items())
    assert done.movement()["cosine"] < 1 - 1e-9


@pytest.mark.parametrize(
    ("update", "changes", "expected"),
    [
        (6, Changes(), "update 6 is not recorded; expected 1 to 5"),
        (5, Changes(dropped=frozenset({(1 << 40, 0)})), "this update has no such prompt; expected one of "),
        (5, Changes(edit=lambda cfg: cfg.set(max_new_tokens=5)), "--set max_new_tokens: the rollouts .* depend on it"),
        (5, Changes(edit=lambda cfg: cfg.sampler.set(temperature=0.5)), "--set sampler.temperature: "),
    ],
)
def test_what_cannot_be_is_refused(run: Path, update: int, changes: Changes, expected: str) -> None:
    left = scratches()
    with pytest.raises(UserError, match=expected):
        replay(RunRecord(run), update, changes)
    assert scratches() == left


def test_runs_that_are_not_repeatable_or_of_several_policies_are_refused(run: Path, tmp_path: Path) -> None:
    for name in ("newest", "policies"):
        shutil.copytree(run, tmp_path / name)
    text = (run / "config.txt").read_text()
    (tmp_path / "newest" / "config.txt").write_text(text.replace("weights: 'pinned'", "weights: 'newest'"))
    with pytest.raises(UserError, match=r"controller.weights='newest' with staleness=1: .* expected a run with"):
        replay(RunRecord(tmp_path / "newest"), 5)
    shutil.copytree(run, tmp_path / "policies" / "policies" / "lr=1")
    with pytest.raises(UserError, match=r"is a run of 1 policy \(lr=1\); expected one of them, such as .*/lr=1"):
        replay(RunRecord(tmp_path / "policies"), 5)
    with pytest.raises(UserError, match="it has no config.txt; expected a run of axl rl"):
        RunRecord(tmp_path)


@pytest.mark.full
def test_updates_after_a_warm_start_are_made_again_from_its_weights(tmp_path: Path) -> None:
    from rl.runtime.run import RLRun

    RLRun(warmed().build(), say=lambda line: None).run(tmp_path / "run", runtime="inprocess", progress=False)
    assert replay(RunRecord(tmp_path / "run"), 1).unequal is None


@pytest.mark.full
def test_a_run_under_ray_whose_worker_was_killed_is_made_again(tmp_path: Path) -> None:
    path, _ = run_with_ray(tmp_path, slow(num_steps=6, workers=1), kill_at=3)
    for update in (1, 4, 6):
        assert replay(RunRecord(path), update).unequal is None
