"""`axl bench kernels`: each kernel's error against float64, and what the TPU compiler plans for it beside plain XLA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mesh.topology import compiler_version
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.harness.processes import MeasurementFailed, our_command, run_command
from tools.bench.kernels.llo import dump_flags
from tools.bench.kernels.static_cycles import profile_flags
from tools.bench.kernels.values import errors

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")


def run(topologies: Sequence[str], say: Say) -> dict[str, Any]:
    """Return everything that `--json` prints.

    `worst_error` is relative, over all kernels. `head_temp_ratio`: the temporary bytes of the head's kernels, forward
    and backward, over those of whole logits, on the topology where it is worst. `sharded_head_temp_ratio`: those of
    each of four devices that share the words, by the scan over those of whole logits; with `kl`, with the divergence
    from a reference. `head_cycle_ratio`: the cycles that each word of the head adds, kernels over whole logits, by
    libtpu's simulation, which it finishes for some chips only. `low_rank_temp_ratio`: the bytes of the feed-forward
    network of factors over the same by XLA. `rank_space_temp_ratio`: those of a prompt's chunk over a cache in rank
    space.
    """
    where = machine()
    say("values: simulated on this CPU, against float64")
    found = errors()
    plans, cycles, fixed, failed = {}, {}, {}, {}
    for topology in topologies if compiler_version() is not None else ():
        say(f"{topology}: ahead of time")
        try:
            with TemporaryDirectory() as folder:
                command = our_command("tools.bench.kernels.compiled", topology, folder)
                plans[topology] = run_command(command, **dump_flags(Path(folder)))
                command = our_command("tools.bench.kernels.fixed_order", topology)
                fixed[topology] = run_command(command, **profile_flags(Path(folder)))
                command = our_command("tools.bench.kernels.static_cycles", topology)
                cycles[topology] = run_command(command, **profile_flags(Path(folder)))
        except MeasurementFailed as error:
            failed[topology] = str(error)
    if not plans and topologies and not failed:
        failed["aot"] = "the TPU compiler (libtpu) is not installed"

    def worst(kernel: str, other: str) -> float | None:
        return max((plan[kernel]["temp_bytes"] / plan[other]["temp_bytes"] for plan in plans.values()), default=None)

    each = [one["head_cycles_a_word"] for one in cycles.values()]
    return {
        "bench": "kernels",
        "worst_error": max(found.values()),
        "head_temp_ratio": worst("head_kernel", "head_whole"),
        "sharded_head_temp_ratio": worst("sharded_head_scan", "sharded_head_whole"),
        "sharded_head_kl_temp_ratio": worst("sharded_head_scan_kl", "sharded_head_whole_kl"),
        "head_cycle_ratio": max((one["kernel"] / one["whole"] for one in each), default=None),
        "low_rank_temp_ratio": worst("low_rank_ffn", "low_rank_ffn_by_xla"),
        "rank_space_temp_ratio": worst("rank_space_prefill", "rank_space_prefill_by_xla"),
        "values": found,
        "plans": plans,
        "fixed_order": fixed,
        "static_cycles": cycles,
        "libtpu": compiler_version(),
        "errors": failed,
        "machine": where,
        **circumstances(),
    }
