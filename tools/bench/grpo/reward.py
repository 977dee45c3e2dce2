"""`axl bench grpo_reward`: steps to a reward on the small GRPO job, ours and peers', from the same initial weights.

Each system trains alone, one after the other; nothing is timed. All read the same file of weights, random ones of the
seed, in Hugging Face's form.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh.imports import many_imports
from tools.bench.grpo.job import GrpoJob
from tools.bench.harness.circumstances import circumstances
from tools.bench.harness.environments import Peer
from tools.bench.harness.interleave import OURS, READY_TIMEOUT_S, STEP_TIMEOUT_S, Say, peer_commands
from tools.bench.harness.processes import Command, our_command
from tools.bench.harness.worker import StepWorker, WorkerError

BENCHMARK = "grpo_reward"
SMOOTH = 5  # steps whose mean is compared: rewards of one step, of 64 rollouts, differ by chance
LEVELS = (0.5, 0.95)  # of the reward, which is 1 at most; what a peer ends with is close to that, where all are slow

Curves = Mapping[str, Sequence[float]]  # mean reward of each step, by system


def run(peers: Sequence[Peer], steps: int, seeds: int, say: Say) -> dict[str, Any]:
    """Return everything that `--json` prints; systems that failed are under `errors`."""
    curves: list[dict[str, list[float]]] = []
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="axl-bench-") as name:
        for seed in range(seeds):
            folder = Path(name) / f"seed{seed}"
            weights = write_weights(folder, seed)
            arguments = ("--seed", str(seed), "--weights", str(weights))
            commands, missing = peer_commands("grpo_step", peers, say, *arguments)
            errors |= missing
            commands = {OURS: our_command("tools.bench.grpo.ours", *arguments), **commands}
            found, failed = _curves(commands, steps, folder, lambda line, seed=seed: say(f"seed {seed}, {line}"))
            errors |= {f"{system}, seed {seed}": why for system, why in failed.items()}
            curves.append(found)
    return {"bench": BENCHMARK, "steps": steps, **summarise(curves), "errors": errors, **circumstances()}


def summarise(curves: Sequence[Curves]) -> dict[str, Any]:
    """Return the figures of the curves, one entry of `curves` a seed.

    `steps_to` are the steps after which a system first has a mean of `SMOOTH` rewards of at least that, None where it
    never has. For `steps_to_level` the level is the last mean that the peer has.
    """
    versus: dict[str, list[dict[str, float | None]]] = {}
    for by_system in curves:
        for peer in by_system.keys() - {OURS} if OURS in by_system else ():
            level = _means(by_system[peer])[-1]
            steps = {"ours": _first(by_system[OURS], level), "peer": _first(by_system[peer], level)}
            versus.setdefault(peer, []).append({"level": level, **steps})
    systems = sorted({system for by_system in curves for system in by_system})
    last = {system: [_means(one[system])[-1] for one in curves if system in one] for system in systems}
    return {
        "reward_first": {name: [one[name][0] for one in curves if name in one] for name in systems},
        "reward_last": {system: statistics.mean(values) for system, values in last.items()},
        "steps_to": {
            str(level): {name: [_first(one[name], level) for one in curves if name in one] for name in systems}
            for level in LEVELS
        },
        "steps_to_level": {peer: versus[peer] for peer in sorted(versus)},
        "no_more_steps": {peer: all(map(_no_later, found)) for peer, found in sorted(versus.items())},
        "curves": [{system: [round(value, 4) for value in one[system]] for system in sorted(one)} for one in curves],
    }


def write_weights(folder: Path, seed: int) -> Path:
    """Write the job's policy with random weights in Hugging Face's form, and return its folder."""
    with many_imports():
        import jax
        import numpy as np
        from flax import nnx

        from axlearn_like.checkpoint.arrays import SavedParams
        from axlearn_like.checkpoint.checkpointer import Checkpointer
        from axlearn_like.layers.base import split
        from axlearn_like.layers.decoder import Decoder
        from models.huggingface.checkpoints.exporting import export_checkpoint
        from models.huggingface.checkpoints.merged import MergedParams
        from tools.bench.grpo.ours import experiment_config

    policy = experiment_config(GrpoJob(seed=seed)).policy
    assert isinstance(policy, Decoder.Config)
    _, params = jax.jit(lambda: split(policy.build(rngs=nnx.Rngs(seed))))()
    saver = Checkpointer.Config(asynchronous=False).build(directory=folder / "checkpoint")
    saver.save(0, {"params": params, "step": np.int32(0)}, {})
    saver.close()
    export_checkpoint(MergedParams(SavedParams(folder / "checkpoint"), policy), policy, folder / "weights")
    return folder / "weights"


def _curves(
    commands: Mapping[str, Command], steps: int, folder: Path, say: Say
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the rewards of each system's steps, and why some have none."""
    found: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, command in commands.items():
        work = folder / name
        work.mkdir()
        try:
            with StepWorker(name, command, work / "log", work) as worker:
                rewards = [worker.wait_ready(READY_TIMEOUT_S)["reward"]]
                for _ in range(steps - 1):
                    rewards.append(worker.step(STEP_TIMEOUT_S, ("reward",))["reward"])
        except WorkerError as error:
            failed[name] = str(error)
            say(f"left out: {error}")
            continue
        found[name] = rewards
        say(f"{name}: reward {rewards[0]:.3f} at first, {_means(rewards)[-1]:.3f} in the last {SMOOTH} steps")
    return found, failed


def _means(rewards: Sequence[float]) -> list[float]:
    """Return the mean of the last `SMOOTH` rewards after each step from the fifth on."""
    return [statistics.mean(rewards[end - SMOOTH : end]) for end in range(SMOOTH, len(rewards) + 1)]


def _first(rewards: Sequence[float], level: float) -> int | None:
    return next((step for step, mean in enumerate(_means(rewards), SMOOTH) if mean >= level), None)


def _no_later(found: Mapping[str, float | None]) -> bool:
    ours, peer = found["ours"], found["peer"]
    return ours is not None and peer is not None and ours <= peer
