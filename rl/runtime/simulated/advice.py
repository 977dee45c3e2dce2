"""Other plans than a user's: what one change would bring, and which of several fleets is the fastest or cheapest."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axlearn_like.checkpoint.interval import SAVE_EVERY, best_seconds
from mesh import UserError
from rl.runtime.simulated.result import simulated
from rl.runtime.simulated.simulation import SimulationPlan

_ON_DEMAND = "hosts on demand, none of which fails"


def variants(plan: SimulationPlan, trainer_rate: float = 0.0) -> dict[str, SimulationPlan]:
    """Return plans with one change each, by what to say of it.

    `trainer_rate`: deaths of the trainer, or of what takes it down, an hour: a checkpoint interval follows from it.
    """
    cfg = plan.cfg
    found = {"one more worker": plan.cfg.clone(workers=cfg.workers + 1)}
    if cfg.workers > 1:
        found["one worker less"] = cfg.clone(workers=cfg.workers - 1)
    for staleness in {cfg.staleness + 1, cfg.staleness - 1} - {-1}:
        changed = cfg.clone(staleness=staleness)
        changed.parameter_server.set(keep=max(changed.parameter_server.keep, staleness + 2))
        found[f"staleness={staleness}"] = changed
    if trainer_rate > 0:
        save, every = max(plan.durations.save, 0.1), cfg.trainer.checkpoint.save_every or SAVE_EVERY
        update = plan.durations.update + plan.durations.update_rest
        best = max(1, round(best_seconds(save, 3600 / trainer_rate) / max(update, 1e-6)))
        if best != every:
            found[f"trainer.checkpoint.save_every={best}"] = changed = cfg.clone()
            changed.trainer.checkpoint.set(save_every=best)
    if cfg.workers > 1:  # more than one to pass weights on to each other
        passes = not cfg.parameter_server.peer_to_peer
        found[f"parameter_server.peer_to_peer={passes}"] = changed = cfg.clone()
        changed.parameter_server.set(peer_to_peer=passes)
    plans = {name: dataclasses.replace(plan, cfg=one) for name, one in found.items() if _stands(one, plan)}
    return plans | ({_ON_DEMAND: dataclasses.replace(plan, failures=())} if plan.failures else {})


def _stands(cfg: Any, plan: SimulationPlan) -> bool:
    """Return False for a config that its parts refuse, or to which the trace does not fit."""
    try:
        cfg.check()
        dataclasses.replace(plan, cfg=cfg).check()
    except UserError:
        return False
    return True


def advise(plan: SimulationPlan, found: dict[str, Any], trainer_rate: float = 0.0) -> list[dict[str, Any]]:
    """Simulate each variant; returns what each brings, the best first."""
    rows = []
    for name, variant in variants(plan, trainer_rate).items():
        there = simulated(variant)
        gain = there["updates_per_hour"] / found["updates_per_hour"] - 1 if found["updates_per_hour"] else 0.0
        rows.append(
            {
                "change": name,
                "updates_per_hour": there["updates_per_hour"],
                "gain": gain,
                "cost_per_update": there["cost_per_update"],
            }
        )
    return sorted(rows, key=lambda row: -row["gain"])


def ranked(plans: Mapping[str, SimulationPlan], objective: str) -> list[dict[str, Any]]:
    """Simulate plans by their names; returns the figures of each, the best first: by cost of an update, or by time."""
    rows = [{"fleet": name, **simulated(plan)} for name, plan in plans.items()]
    key = "cost_per_update" if objective == "cost" else "updates_per_hour"
    return sorted(rows, key=lambda row: row[key] * (1 if objective == "cost" else -1))


def of_sizes(name: str, plan: SimulationPlan, counts: Iterable[int]) -> dict[str, SimulationPlan]:
    """Return a plan with each number of workers, by the fleet's name and that number."""
    sized = {count: dataclasses.replace(plan, cfg=plan.cfg.clone(workers=count)) for count in counts}
    named = {f"{name}, {count} worker{'s' * (count > 1)}": one for count, one in sized.items()}
    return {text.removeprefix(", "): one for text, one in named.items()}


def worker_counts(text: str, most: int = 9) -> Sequence[int]:
    """Return the fleets of `workers=16..128`: at most nine, spaced by equal factors (UserError: of another form)."""
    name, _, span = text.partition("=")
    first, dots, last = span.partition("..")
    if name != "workers" or not dots or not first.isdigit() or not last.isdigit() or not 0 < int(first) <= int(last):
        raise UserError(f"--search {text!r}: expected workers=FIRST..LAST, such as workers=16..128")
    low, high = int(first), int(last)
    count = min(most, high - low + 1)
    steps = [low * (high / low) ** (n / max(count - 1, 1)) for n in range(count)]
    return sorted({round(step) for step in steps})
