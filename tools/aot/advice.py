"""Advice on what to change where a step does not fit, the most promising first."""

from typing import Any

from axlearn_like.config import ConfigBase
from tools.aot.memory import argument_bytes, remat_presets
from tools.aot.programs import tuning_of
from tools.aot.run import Outcome


def advice(cfg: ConfigBase[Any], outcome: Outcome) -> list[str]:
    """Return edits to try, as --set takes them where they are edits; empty if the step fits."""
    shortage = outcome.compiled.shortage
    if shortage is None:
        return []
    if outcome.program.name in ("prefill", "decode"):
        return [
            "fewer pages or sequences: --set engine.pages=... or --set engine.max_num_seqs=...",
            "tensor parallelism over more devices: a larger --topology",
        ]
    tuning = tuning_of(cfg)
    state = argument_bytes(outcome.compiled.jaxpr)
    held = getattr(tuning.model, "remat", None)
    presets = remat_presets()
    stronger = presets[presets.index(held) + 1 :] if held in presets else []
    found: list[tuple[int, str]] = []
    if outcome.program.name == "train":
        found += [(1, f"more recomputation: --set {tuning.model_field}.remat={name}") for name in stronger[::-1][:2]]
        more = f"--set {tuning.prefix}microbatches={2 * tuning.microbatches}"
        found.append((2, f"more, smaller microbatches: {more}"))
    if not tuning.chunked:
        found.append((3, "the head's logits in chunks: --set loss.chunks=8"))
    mesh = dict(outcome.compiled.mesh.shape)
    if mesh["data"] > 1:
        wider = {n: s for n, s in {**mesh, "fsdp": mesh["fsdp"] * mesh["data"], "data": 1}.items() if s > 1}
        first = 0 if state > shortage.available // 2 else 4
        found.append((first, f'parameters over more devices: --set "{tuning.prefix}mesh={wider}"'))
    first = 0 if state > shortage.available else 5
    found.append((first, "more devices: a larger --topology, with a larger fsdp axis"))
    return [text for _, text in sorted(found, key=lambda one: one[0])]
