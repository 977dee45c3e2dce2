"""Recipes of RL with engines of their own, run by the control plane on a virtual clock: `axl simulate`, kept.

    python -m tests.golden.simulated            # those that are missing; Ctrl-C keeps what is done

Trainer and engines each take the seconds that the recipe predicts for a step. What leases, publication and staleness
add is what the simulation is for; of four updates the first batch, drawn before them, is a quarter more.
"""

import json
import logging
from typing import Any

from axlearn_like.run.scratch import scratch
from axlearn_like.tokenizers.bytes import ByteTokenizer
from experiments.qwen_rl import qwen25_0_5b_rl
from experiments.recipes.apply import apply_fit
from experiments.recipes.composed import recipe_experiment
from experiments.recipes.fit import Fit
from experiments.recipes.recipes import Recipe, recipes
from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.lengths import read_lengths
from rl.runtime.simulated.result import summarise
from rl.runtime.simulated.simulation import SimulationPlan, simulate
from tests.golden.compiles import DIRECTORY

RECORD = DIRECTORY / "simulated.json"
UPDATES = 4


def stored() -> dict[str, dict[str, Any]]:
    """Return what was simulated, by "RECIPE MACHINE"."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def simulated(recipe: Recipe, found: Fit) -> dict[str, Any]:
    """Return the simulated seconds of an update, the age of its rollouts, and the predicted seconds."""
    cfg: Any = recipe_experiment(recipe.name)()
    apply_fit(found, cfg)
    engines, seconds = found.engines, found.seconds
    assert engines is not None and seconds is not None
    cfg.set(tokenizer=ByteTokenizer.Config(), tasks=qwen25_0_5b_rl().tasks, evaluation=None, num_steps=UPDATES)
    cfg.set(workers=engines.workers, fleet=cfg.fleet.edited(found.fleet or ""))
    rounds = -(-found.rows // (engines.workers * engines.sequences))
    durations = Durations(update=seconds, decode_step=seconds / (rounds * recipe.answer))
    lengths = read_lengths(f"fixed:{recipe.answer}", cfg.max_new_tokens, cfg.seed, 0.0)
    with scratch("simulated") as folder:
        told = summarise(simulate(SimulationPlan(cfg, durations, lengths), folder / "run"))
    assert told["updates"] == UPDATES and told["finished"], told
    return {"seconds": round(3600 / told["updates_per_hour"], 2), "predicted": round(seconds, 2),
            "age": told["staleness_mean"], "bound": told["staleness_bound"]}  # fmt: skip


def main() -> None:
    """Simulate what is not stored yet."""
    logging.disable(logging.INFO)
    done = stored()
    for recipe in recipes().values():
        for machine in recipe.machines if recipe.job == "rl" else ():
            found = None if machine.startswith("cpu") or f"{recipe.name} {machine}" in done else recipe.fit(machine)
            if found is None or found.engines is None or found.engines.devices == "trainer":
                continue
            done[f"{recipe.name} {machine}"] = row = simulated(recipe, found)
            print(recipe.name, machine, row, flush=True)
            RECORD.write_text(
                "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in done.items()) + "\n}\n"
            )


if __name__ == "__main__":
    main()
