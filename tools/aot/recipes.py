"""A recipe's programs, compiled."""

import functools
from collections.abc import Iterator
from typing import Any

from axlearn_like.tokenizers.bytes import ByteTokenizer
from experiments.qwen_rl import qwen25_0_5b_rl
from experiments.recipes.apply import apply_fit
from experiments.recipes.composed import recipe_experiment
from experiments.recipes.fit import Fit
from experiments.recipes.recipes import Recipe
from mesh.topology import parse_topology, topology_devices
from rl.fleet.memory import program_memory
from tools.aot.run import find_program

# O1 takes a fifth of the time, and plans up to 5 % less memory (docs/reference/recipes.md): where it leaves less room
# than `_MARGIN` of what it needs, the program is compiled as it will run.
_FAST = {"optimization_level": "O1"}
_MARGIN = 0.1


def compiled_memory(recipe: Recipe, found: Fit) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each program's name and what the compiler says: fits, needed and available bytes, level; kept on disk.

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
    for step, place in places.items():
        topology = parse_topology(place)
        program = find_program(cfg, step, topology_devices(topology))
        compiled = functools.partial(program_memory, program, topology, timed=False)
        memory, level = compiled(_FAST), "O1"
        if memory.refusal is not None or (1 + _MARGIN) * memory.needed + beside[step] > memory.available:
            memory, level = compiled(), "full"
        needed = memory.needed + beside[step]
        fits = memory.refusal is None and needed <= memory.available
        yield step, {"fits": fits, "needed": needed, "available": memory.available, "level": level}
