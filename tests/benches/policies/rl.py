"""Eight policies by RL on one fleet, beside the same eight one after the other: bits, CPU seconds, bytes of weights."""

import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from mesh.errors import UserError
from rl.experiment import RLExperiment
from rl.runtime.inprocess import run_inprocess
from rl.runtime.policies.runs import open_policy_runs

_WARM = 2  # updates of each policy that compile and are not counted
# Job whose draws are bound by reading the base: 16 M parameters, two answers a policy and step.
_SIZES = {"prompts": 1, "group": 2, "prompt_tokens": 16, "new_tokens": 32}
_BASE = {"layers": 6, "dim": 512, "ffn": 1536, "heads": 8, "kv_heads": 2, "head_dim": 64}


def commands(quick: bool) -> dict[str, Any]:
    """Return CPU seconds of eight `axl rl` one after the other beside those of one `axl rl sweep`: starts and all.

    A run before them fills the cache of compiled programs for both.
    """
    count, updates = (2, 3) if quick else (8, 6)
    job = ("grpo_bench", "--apply", "low_rank", "--runtime", "inprocess", "--quiet", "--set", "prompts_per_step=2")
    job += ("--set", "samples_per_prompt=4", "--set", f"num_steps={updates}")
    with TemporaryDirectory() as folder:
        seeds = list(map(str, range(count)))
        for warm in (True, False):
            sweep = _command("rl", "sweep", *job, "--over", f"seed={','.join(seeds)}", "--run-dir", f"{folder}/{warm}")
            one = [
                _command("rl", *job, "--set", f"seed={seed}", "--run-dir", f"{folder}/{warm}-{seed}")
                for seed in (seeds[:1] if warm else seeds)
            ]
    return {"commands_cpu_s": sum(one), "sweep_cpu_s": sweep, "commands_ratio": sum(one) / sweep}


def _command(*arguments: str) -> float:
    """Run `axl` in a process of its own; returns its CPU seconds, with those of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "axlearn_like", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rl(quick: bool) -> dict[str, Any]:
    """Return the figures of eight policies together against each alone, in this process."""
    count, updates = (2, 3) if quick else (8, 4)
    sizes = _SIZES if quick else _SIZES | _BASE
    policies = {f"seed={seed}": {"seed": seed} for seed in range(count)}
    with TemporaryDirectory() as folder:
        root = Path(folder)
        job = _experiment(sizes, count, updates)
        alone = {name: _run(root / name, job, {name: edits}) for name, edits in policies.items()}
        together = _run(root / "together", job, policies)
        same = [_same(root / name / "policies" / name, root / "together" / "policies" / name) for name in policies]
        pushes = [row for row in _events(root / "together" / "policies" / "seed=0") if row["event"] == "push"]
    return {
        "policies": count,
        "identical": all(same),
        "throughput_ratio": sum(alone.values()) / together,
        "sync_bytes_ratio": _whole_bytes(sizes) / max(row["nbytes"] for row in pushes),
    }


def _experiment(sizes: dict[str, int], policies: int, updates: int) -> RLExperiment.Config:
    """Return a small GRPO job with LoRA of rank 1, enough for RL (Schulman et al. 2025, LoRA Without Regret).

    The engine has room for the rows of all policies; with those of one, it computes as few as one of its own would.
    """
    cfg = grpo_bench(**sizes, num_steps=updates)
    cfg.engine.max_num_seqs *= policies
    low_rank(cfg)
    replace(cfg, LoRA.Config, lambda layer: layer.set(rank=1))
    cfg.trainer.checkpoint.set(save_every=updates)
    return cfg


def _run(path: Path, job: RLExperiment.Config, policies: dict[str, dict[str, Any]]) -> float:
    """Run; returns the CPU seconds after the first updates of each policy."""
    cfg, warm = job.clone(policies=policies), 0.0

    def on_step(step: int) -> None:
        nonlocal warm
        if not warm and step >= _WARM * len(policies):
            warm = time.process_time()

    experiment = cfg.build()
    with RunDirectory.open(path, to_text(cfg)) as run, open_policy_runs(experiment, run):
        run_inprocess(experiment, run, lambda: False, on_step)
    return time.process_time() - warm


def _same(one: Path, other: Path) -> bool:
    """Return True if both runs have the same checkpoint to the bit, and the same figures of every update."""
    return _outcome(one) == _outcome(other)


def _outcome(path: Path) -> tuple[str, list[dict[str, Any]]]:
    folder = path / "checkpoints" / "rl"
    checksums = (folder / str(list_steps(folder)[-1]) / "manifest" / "metadata").read_text()
    return checksums, [without_clock(row) for row in read_rows(path / "metrics.jsonl")]


def _events(path: Path) -> list[dict[str, Any]]:
    return read_rows(path / "events.jsonl")


def _whole_bytes(sizes: dict[str, int]) -> int:
    """Return the bytes of the model's own weights."""
    leaves = jax.tree.leaves(split(build_abstract(grpo_bench(**sizes).policy))[1])
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
