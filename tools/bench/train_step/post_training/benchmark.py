"""`axl bench sft_step`, `axl bench dpo_step`: CPU seconds of one step of our trainer beside TRL's, in one run.

Both begin with the same parameters and see the same tokens, and their losses are compared step by step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.environments import Peer
from tools.bench.harness.interleave import OURS, Measured, Say, errors_of, measure, peer_commands, ratio_over_rounds
from tools.bench.harness.processes import Command, our_command
from tools.bench.harness.protocol import TRAIN_FIELDS
from tools.bench.train_step.post_training.job import JOBS

Kind = Literal["sft", "dpo"]
EXPERIMENTS = "tools.bench.train_step.post_training.ours"
LENGTHS = ("gsm8k", "equal")
PACKAGES = ("axlearn-like", "jax", "jaxlib", "flax", "optax", "numpy")


def run(kind: Kind, peers: Sequence[Peer], steps: int, say: Say, *, quick: bool = False) -> dict[str, Any]:
    """Return everything that `--json` prints; systems that cannot be run are listed under `errors`."""
    from tools.bench.train_step.post_training.ours import MODEL, write_model

    where, names = machine(), ("quick",) if quick else LENGTHS  # before we load it ourselves
    with tempfile.TemporaryDirectory(prefix="axl-bench-") as folder:
        model = Path(folder) / MODEL
        write_model(JOBS[names[0]], model)
        systems, errors = commands(kind, peers, model, say)
        # A step of each system with each kind of lengths makes one round.
        each = {f"{name} {lengths}": with_lengths(systems[name], lengths) for lengths in names for name in systems}
        results = measure(each, steps, say, TRAIN_FIELDS)
    unmade = {f"{name} {lengths}": Measured(error=error) for name, error in errors.items() for lengths in names}
    result = summarise(kind, results | unmade, steps, names)
    return result | {"quick": quick, "machine": where, **circumstances(PACKAGES)}


def commands(kind: Kind, peers: Sequence[Peer], model: Path, say: Say) -> tuple[dict[str, Command], dict[str, str]]:
    """Return each system's command, in the order of turns, and why some peers have none; `{}` is for the lengths."""
    start = ("--set", f"start_from.path={model}")
    ours = our_command("tools.cli", "train", "--quiet", *start, f"{EXPERIMENTS}:{kind}_{{}}")
    found, errors = peer_commands(f"{kind}_step", peers, say)
    found = {name: Command((*one.argv, kind, str(model), "{}"), one.environ) for name, one in found.items()}
    return {OURS: ours, **found}, errors


def with_lengths(command: Command, lengths: str) -> Command:
    """Return the command of the same system with examples of these lengths."""
    *argv, last = command.argv
    return Command((*argv, last.format(lengths)), command.environ)


def summarise(
    kind: Kind, results: Mapping[str, Measured], steps: int, names: Sequence[str] = LENGTHS
) -> dict[str, Any]:
    """Return the figures of results by "system lengths". At the top level are those of the first kind of lengths."""
    first, *others = names
    done = {name: result for name, result in results.items() if result.error is None}
    return {
        "bench": f"{kind}_step",
        "lengths": first,
        **_of_lengths(done, first),
        **{name: _of_lengths(done, name) for name in others},
        "steps": steps,
        "parameters": {name: result.ready["parameters"] for name, result in done.items()},
        "first_step_s": {name: result.ready["first_step_s"] for name, result in done.items()},
        "idle_cpu_s": {name: result.median("idle_cpu_s") for name, result in done.items()},
        "cpu_s_by_round": {name: [round(s["cpu_s"], 4) for s in result.steps] for name, result in done.items()},
        "errors": errors_of(results),
    }


def _of_lengths(done: Mapping[str, Measured], lengths: str) -> dict[str, Any]:
    """Return medians of each system, and the ratio, which is None without both sides.

    The best peer is the one with the lowest median CPU seconds a step; the ratio is the median over rounds of our CPU
    seconds by the best peer's in the same round.
    """
    of = {name.partition(" ")[0]: result for name, result in done.items() if name.endswith(f" {lengths}")}
    ours, peers = of.get(OURS), {name: result for name, result in of.items() if name != OURS}
    best = min(peers, key=lambda name: peers[name].median("cpu_s"), default=None)
    losses: dict[str, Any] = {name: result.steps[-1]["losses"] for name, result in of.items()}
    return {
        "ours_cpu_s_per_step": ours and ours.median("cpu_s"),
        "ours_wall_s_per_step": ours and ours.median("wall_s"),
        "peers": {
            name: {
                "cpu_s_per_step": one.median("cpu_s"),
                "wall_s_per_step": one.median("wall_s"),
                "version": one.ready["version"],
            }
            for name, one in peers.items()
        },
        "best_peer": best,
        "ratio_to_best_peer": ratio_over_rounds(ours, peers.get(best or ""), lambda step: step["cpu_s"]),
        "loss_difference": loss_difference(losses),
        "losses": {name: [round(loss, 6) for loss in each] for name, each in losses.items()},
    }


def loss_difference(losses: Mapping[str, Sequence[float]]) -> float | None:
    """Return the largest difference of a peer's loss from ours at any step that both report; None without both."""
    ours = losses.get(OURS, ())
    each = [abs(a - b) for name, one in losses.items() if name != OURS for a, b in zip(ours, one, strict=False)]
    return max(each, default=None)
