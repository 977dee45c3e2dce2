"""What to change where a step does not fit, the most promising first."""

from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.training.trainer import Trainer
from rl.experiment import RLExperiment
from tools.aot.memory import argument_bytes, remat_presets
from tools.aot.run import Outcome


def advice(cfg: ConfigBase[Any], outcome: Outcome) -> list[str]:
    """Edits to try, as --set takes them where they are edits; empty if it fits."""
    shortage = outcome.compiled.shortage
    if shortage is None:
        return []
    if outcome.step.name.startswith(("prefill", "decode")):
        return [
            "fewer pages or sequences: --set engine.pages=... or --set engine.max_num_seqs=...",
            "tensor parallelism over more devices: a larger --topology",
        ]
    root = "trainer." if isinstance(cfg, RLExperiment.Config) else ""
    model = "policy" if isinstance(cfg, RLExperiment.Config) else "model"
    state = argument_bytes(outcome.compiled.jaxpr)
    held = getattr(getattr(cfg, model), "remat", None)
    presets = remat_presets()
    stronger = presets[presets.index(held) + 1 :] if held in presets else []
    found: list[tuple[int, str]] = []
    if outcome.step.name == "train":
        found += [(1, f"more recomputation: --set {model}.remat={name}") for name in stronger[::-1][:2]]
        microbatches = cfg.trainer.microbatches if isinstance(cfg, RLExperiment.Config) else cfg_microbatches(cfg)
        found.append((2, f"more, smaller microbatches: --set {root}microbatches={2 * microbatches}"))
    if isinstance(cfg, Trainer.Config) and cfg.loss.chunks == 1:
        found.append((3, "the head's logits in parts: --set loss.chunks=8"))
    mesh = dict(outcome.compiled.mesh.shape)
    if mesh["data"] > 1:
        wider = {n: s for n, s in {**mesh, "fsdp": mesh["fsdp"] * mesh["data"], "data": 1}.items() if s > 1}
        first = 0 if state > shortage.available // 2 else 4
        found.append((first, f'parameters over more devices: --set "{root}mesh={wider}"'))
    first = 0 if state > shortage.available else 5
    found.append((first, "more devices: a larger --topology, with a larger fsdp axis"))
    return [text for _, text in sorted(found, key=lambda one: one[0])]


def cfg_microbatches(cfg: ConfigBase[Any]) -> int:
    return int(getattr(cfg, "microbatches", 1))
