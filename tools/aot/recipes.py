"""A recipe's programs, compiled."""

from typing import Any

from axlearn_like.tokenizers.bytes import ByteTokenizer
from experiments.qwen_rl import qwen25_0_5b_rl
from experiments.recipes.apply import apply_fit
from experiments.recipes.composed import recipe_experiment
from experiments.recipes.fit import Fit
from experiments.recipes.recipes import Recipe
from mesh.topology import parse_topology, topology_devices
from rl.fleet.memory import program_memory
from tools.aot.programs import find_program


def compiled_memory(recipe: Recipe, found: Fit) -> dict[str, dict[str, Any]]:
    """Return what the compiler says of each program: fits, needed and available bytes; kept on disk.

    No tokenizer is read: neither it nor the data change the programs.
    """
    cfg: Any = recipe_experiment(recipe.name)()
    apply_fit(found, cfg)
    places = {"train": found.trainer}
    beside = {"train": 0}
    if found.engines is not None:
        cfg.set(tokenizer=ByteTokenizer.Config(), tasks=qwen25_0_5b_rl().tasks)
        engine = found.trainer if found.engines.devices == "trainer" else found.engines.devices
        places |= {"score": found.trainer, "decode": engine}
        held = {name: size for name, size in found.engines.holds.items() if "pages" not in name and name != "weights"}
        beside = dict.fromkeys(("train", "score"), found.holds["moments"]) | {"decode": sum(held.values())}
    rows: dict[str, dict[str, Any]] = {}
    for step, place in places.items():
        topology = parse_topology(place)
        memory = program_memory(find_program(cfg, step, topology_devices(topology)), topology)
        needed = memory.needed + beside[step]
        fits = memory.refusal is None and needed <= memory.available
        rows[step] = {"fits": fits, "needed": needed, "available": memory.available}
    return rows
