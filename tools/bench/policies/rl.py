"""Eight policies by RL on one fleet, beside the same eight one after the other: bits, CPU seconds, bytes of weights."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np

from axlearn_like.checkpoint.reader import list_steps
from axlearn_like.config import replace, to_text
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from experiments.grpo_bench import grpo_bench
from experiments.modifiers import low_rank
from rl.experiment import RLExperiment
from rl.runtime.inprocess import run_inprocess
from rl.runtime.policies.runs import open_policy_runs

_WARM = 2  # updates of each policy that compile and are not counted


class Measured(NamedTuple):
    """One run: CPU seconds after the first updates of each policy, and all of them."""

    warm: float
    whole: float


def rl(quick: bool) -> dict[str, Any]:
    """Return the figures of eight policies together against each alone, in this process."""
    count, updates = (2, 3) if quick else (8, 6)
    policies = {f"seed={seed}": {"seed": seed} for seed in range(count)}
    with TemporaryDirectory() as folder:
        root = Path(folder)
        alone = {name: _run(root / name, {name: edits}, updates) for name, edits in policies.items()}
        together = _run(root / "together", policies, updates)
        same = [_same(root / name / "policies" / name, root / "together" / "policies" / name) for name in policies]
        pushes = [row for row in _events(root / "together" / "policies" / "seed=0") if row["event"] == "push"]
    return {
        "policies": count,
        "identical": all(same),
        "throughput_ratio": sum(one.warm for one in alone.values()) / together.warm,
        "throughput_ratio_cold": sum(one.whole for one in alone.values()) / together.whole,
        "sync_bytes_ratio": _whole_bytes() / max(row["nbytes"] for row in pushes),
    }


def _experiment(policies: dict[str, dict[str, Any]], updates: int) -> RLExperiment.Config:
    """Return a small GRPO job with LoRA of rank 1, enough for RL (Schulman et al. 2025, LoRA Without Regret)."""
    cfg = grpo_bench(prompts=2, group=4, num_steps=updates)
    low_rank(cfg)
    replace(cfg, LoRA.Config, lambda layer: layer.set(rank=1))
    cfg.trainer.checkpoint.set(save_every=updates)
    return cfg.set(policies=policies)


def _run(path: Path, policies: dict[str, dict[str, Any]], updates: int) -> Measured:
    cfg, began, warm = _experiment(policies, updates), time.process_time(), 0.0

    def on_step(step: int) -> None:
        nonlocal warm
        if not warm and step >= _WARM * len(policies):
            warm = time.process_time()

    experiment = cfg.build()
    with RunDirectory.open(path, to_text(cfg)) as run, open_policy_runs(experiment, run):
        run_inprocess(experiment, run, lambda: False, on_step)
    end = time.process_time()
    return Measured(end - warm, end - began)


def _same(one: Path, other: Path) -> bool:
    """Return True if both runs have the same checkpoint to the bit, and the same figures of every update."""
    return _outcome(one) == _outcome(other)


def _outcome(path: Path) -> tuple[str, list[dict[str, Any]]]:
    folder = path / "checkpoints" / "rl"
    checksums = (folder / str(list_steps(folder)[-1]) / "manifest" / "metadata").read_text()
    return checksums, [without_clock(row) for row in read_rows(path / "metrics.jsonl")]


def _events(path: Path) -> list[dict[str, Any]]:
    return read_rows(path / "events.jsonl")


def _whole_bytes() -> int:
    """Return the bytes of the model's own weights."""
    leaves = jax.tree.leaves(split(build_abstract(grpo_bench().policy))[1])
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
