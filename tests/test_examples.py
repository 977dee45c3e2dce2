"""Every file in examples/ runs: each experiment for a step or two, at the size that a test can afford."""

import gzip
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import from_text, to_text
from axlearn_like.layers.base import split
from experiments import registry
from rl.experiment import RLExperiment
from rl.runtime.run import RLRun

EXAMPLES = Path(__file__).parent.parent / "examples"


def config(name: str, function: str) -> Any:
    """Return an example's config, found as the command line finds it."""
    return registry.get(f"{EXAMPLES / name}.py:{function}")


def one_update(cfg: RLExperiment.Config, run_dir: Path) -> dict[str, object]:
    """Run one RL update of four rollouts from random weights, without evaluation."""
    cfg.set(warm_start=None, evaluation=None, num_steps=1, prompts_per_step=2, samples_per_prompt=2, groups_per_lease=2)
    report = RLRun(cfg.build()).run(run_dir, runtime="inprocess")
    assert report is not None
    return report


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "function"),
    [("custom_layer", "squared_relu"), ("custom_kernel", "one_head_at_a_time")],
)
def test_a_supervised_example_trains(name: str, function: str, tmp_path: Path) -> None:
    cfg = config(name, function)
    cfg.set(num_steps=2, evaluators=(), early_stopping=None)
    assert cfg.build().run(tmp_path / "run")["finished"]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("first_experiment", "mine"),
        pytest.param("custom_objective", "smooth_grpo", marks=pytest.mark.full),
        pytest.param("custom_verifier", "short_answers", marks=pytest.mark.full),
    ],
)
def test_an_rl_example_updates(name: str, function: str, tmp_path: Path) -> None:
    one_update(config(name, function), tmp_path / "run")


def test_a_reward_of_ones_own_names_what_it_pays_for() -> None:
    score = runpy.run_path(str(EXAMPLES / "own_reward.py"))["score"]
    reference = "He has <<600*2=1200>>1,200.\n#### 1,200"
    paid = {"It is <<1+1=2>>2.\n#### 1200": (1, 0.2, 0.1), "#### 7": (0, 0.2, 0), "1200": (0, 0, 0), "<<": (0, 0, 0.1)}
    for answer, terms in paid.items():
        assert tuple(score(answer, reference).values()) == terms


@pytest.mark.numerics
@pytest.mark.full
def test_rows_are_trained_on_with_a_reward_of_ones_own(tmp_path: Path, shared_data: Path) -> None:
    """Train from the weights of another run, on the first rows of GSM8K; the terms of the function are metrics."""
    lines = gzip.decompress((shared_data / "gsm8k" / "train.jsonl.gz").read_bytes()).splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines[:60]))
    cfg = config("own_reward", "own_reward")
    cfg.tasks.families[0].rows.set(files=str(tmp_path / "rows.jsonl"))
    params = jax.jit(lambda: split(cfg.policy.build(rngs=nnx.Rngs(0)))[1])()
    start = Checkpointer.Config().build(directory=tmp_path / "start" / "checkpoints")
    start.save(1, {"params": params, "step": jnp.int32(1)}, {})
    start.close()
    cfg.start_from.set(path=str(tmp_path / "start"))
    cfg.set(groups_per_lease=2, max_new_tokens=32)
    one_update(cfg, tmp_path / "run")
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    terms = [row[f"reward_term/{name}"] for name in ("right", "form", "steps")]
    assert row["reward"] == pytest.approx(sum(terms)) and row["verifier_failures"] == 0


@pytest.mark.full
@pytest.mark.numerics
def test_grpo_in_one_file_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """The mean reward of the last ten steps is well above that of the first ten; policy and engine agree."""
    text = (EXAMPLES / "grpo_in_one_file.py").read_text()
    assert len(text.splitlines()) <= 200
    rewards = runpy.run_path(str(EXAMPLES / "grpo_in_one_file.py"))["main"](steps=50)
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.06
    lines = capsys.readouterr().out.splitlines()
    assert all(float(re.findall(r"drift (\S+),", line)[0]) < 1e-4 for line in lines if line.startswith("step"))


@pytest.mark.full
def test_the_notebook_runs_cell_by_cell(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "notebook.py"))
    assert "'step': 2" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_notebooks_run_cell_by_cell_and_learn(tmp_path: Path, checkout: Path) -> None:
    """Each in a process of its own: the first asserts that the reward rises, the second that loss and reward move."""
    environment = {**os.environ, "AXL_NOTEBOOK_RUNS": str(tmp_path), "PYTHONPATH": str(checkout)}
    environment["AXL_NOTEBOOK_RUN"] = str(tmp_path / "first")
    for name in ("first_run", "your_own", "read_a_run"):
        if name == "read_a_run" and importlib.util.find_spec("pandas") is None:
            continue
        command = [sys.executable, str(EXAMPLES / "notebooks" / f"{name}.py")]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_notebook_plans_for_tpus(capsys: pytest.CaptureFixture[str]) -> None:
    """The cells that train are run with --full alone; this one must not wait for them."""
    text = (EXAMPLES / "notebooks" / "first_run.py").read_text()
    (cell,) = [cell.partition("# %% [markdown]")[0] for cell in text.split("# %%\n") if "plan_launch(" in cell]
    exec(compile(cell, "first_run.py", "exec"), {})
    printed = capsys.readouterr().out
    assert "mesh fsdp 4" in printed and "kind: JobSet" in printed


def test_the_first_notebook_is_short() -> None:
    lines = (EXAMPLES / "notebooks" / "first_run.py").read_text().splitlines()
    assert sum(bool(line.strip()) and not line.startswith("#") for line in lines) <= 80


@pytest.mark.parametrize(
    "name",
    [
        "custom_kernel:one_head_at_a_time",
        "custom_objective:smooth_grpo",
        "own_reward:own_reward",
    ],
)
def test_an_example_round_trips_through_text(name: str) -> None:
    cfg = config(*name.split(":"))
    assert to_text(from_text(to_text(cfg))) == to_text(cfg)


def test_every_example_is_tested() -> None:
    tested = {"complete_text"}  # by tests/experiments/test_small_llama.py, on a run
    tested |= {"custom_layer", "custom_kernel", "first_experiment", "custom_objective", "custom_verifier", "notebook"}
    tested |= {"own_reward", "grpo_in_one_file"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def test_the_gallery_names_every_example_and_application() -> None:
    page = (EXAMPLES.parent / "docs" / "tutorials" / "examples.md").read_text()
    files = [path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")]
    folders = [f"experiments/{path.parent.name}/" for path in EXAMPLES.parent.glob("experiments/*/README.md")]
    assert len(files) > 10 and len(folders) == 3
    assert [name for name in (*files, *folders) if f"| `{name}` |" not in page] == []
