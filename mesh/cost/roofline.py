"""Time of a step: a lower bound by each resource, and an estimate from the compiler's own schedule.

Nothing here was measured on a TPU by this project. `TRUST`, which is part of every report, says how far each figure can
be trusted.
"""

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from mesh.cost.bandwidth import group_bandwidth
from mesh.cost.collectives import Collective
from mesh.cost.hlo import HloModule
from mesh.cost.traffic import operations
from mesh.topology import Topology

# Matrix products reach about this part of the peak at best (XLA's on v5e, 8192 x 8192: 5.58 of 6.05 ms, by the times
# that jax's documentation prints); products within kernels, which are not seen, are taken to reach half of it.
MATRIX_EFFICIENCY = 0.92
KERNEL_EFFICIENCY = 0.5
# Part of the nominal bandwidth that a copy in HBM reaches: 1,360 of 1,638 GB/s on v6e (AI-Hypercomputer/tpu-recipes,
# microbenchmarks/README.md).
HBM_EFFICIENCY = 0.83

# A real step is expected between so many times the estimate.
EXPECTED = (0.9, 1.5)

TRUST = {
    "fits": "as on hardware: the compiler of the real thing decides it",
    "hbm": "exact plan of the compiler; the runtime's own memory and fragmentation are not in it (leave some per cent)",
    "flops_analytic": "exact arithmetic on the model's shapes; causal attention counts the half that is needed",
    "flops_executed": "exact for the traced matrix products, recomputation included; kernels by their own estimate; "
    "experts' products for as many rows as come if all experts are chosen equally often",
    "collectives": "kinds, counts and bytes exact as compiled, but for ragged all-to-alls: these count the rows that "
    "there are if all experts are chosen equally often, an assumption; 'overlapped' compares the compiler's cycle "
    "estimates with nominal link speeds and is coarse",
    "roofline_s": "lower bounds by makers' peak figures",
    "estimated_step_s": "compiler's cycle estimates for matrix products (within 5 per cent where this was checked, on "
    "v5e), bytes at the speed of a copy for the rest, plus communication that is not hidden; contention, dispatch, "
    f"stragglers and clock changes are not seen: expect a real step between {EXPECTED[0]} and {EXPECTED[1]} times this",
    "mfu_estimate": "flops_analytic over estimated_step_s and peak: with the same error, for ranking only",
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step on one device.

    Attributes:
        compute: all matrix products at peak.
        hbm: all traffic with HBM at full bandwidth.
        links: by axes, all bytes at nominal link speed.
        busy: matrix products as the compiler estimates them, kernels by their products or by their bytes, whichever
            takes longer, and everything else by its bytes.
        exposed: communication that overlaps no computation.
        hidden: seconds of each collective, the part that overlaps computation.
    """

    compute: float
    hbm: float
    links: dict[str, float]
    busy: float
    exposed: float
    hidden: tuple[float, ...]

    @property
    def step(self) -> float:
        """Seconds of the step: computation, and the communication that it does not hide."""
        return self.busy + self.exposed


def estimate(
    program: HloModule,
    mesh: Mesh,
    topology: Topology,
    found: Sequence[Collective],
    *,
    flops: float,
    kernel_flops: float = 0.0,
) -> Estimate:
    """Estimate the time of a step with these collectives.

    Args:
        program: as compiled.
        mesh: mesh that it was compiled for.
        topology: topology of the mesh's devices.
        found: `collectives(program, mesh)`.
        flops: FLOPs of matrix products outside of kernels, of all devices.
        kernel_flops: FLOPs of those within.
    """
    generation, devices = topology.generation, mesh.devices.size
    peak, bandwidth = generation.per_device(generation.flops), generation.per_device(generation.hbm_bandwidth)
    matrix = rest = moved = streamed = 0.0
    for one in operations(program):
        moved += one.times * one.bytes
        by_bytes = one.bytes / bandwidth / HBM_EFFICIENCY
        by_cycles = one.cycles / generation.clock
        if one.kernel:
            streamed += one.times * by_bytes
        elif one.matrix:
            matrix += one.times * max(by_bytes, by_cycles)
        else:
            rest += one.times * by_bytes
    links: dict[str, float] = {}
    exposed = 0.0
    hidden: list[float] = []
    for one in found:
        seconds = transfer_seconds(one, mesh, topology)
        part = min(1.0, one.beside / generation.clock / seconds) if seconds else 1.0
        hidden.append(part)
        links[one.axis] = links.get(one.axis, 0.0) + one.times * seconds
        exposed += one.times * seconds * (1 - part)
    products = max(matrix, flops / devices / peak / MATRIX_EFFICIENCY)
    kernels = max(streamed, kernel_flops / devices / peak / KERNEL_EFFICIENCY)  # kernels read beside their products
    return Estimate(
        compute=(flops + kernel_flops) / devices / peak,
        hbm=moved / bandwidth,
        links=dict(sorted(links.items())),
        busy=products + rest + kernels,
        exposed=exposed,
        hidden=tuple(hidden),
    )


def transfer_seconds(one: Collective, mesh: Mesh, topology: Topology) -> float:
    """Return the seconds of one such collective at nominal link speed.

    A permutation goes to one neighbour, and so over one link; in an all-to-all along a ring of n devices each byte
    travels n / 4 links on average.
    """
    speed = group_bandwidth(mesh, topology, one.axes, dcn=one.dcn)
    if one.kind == "collective-permute" and not one.dcn:
        return one.bytes / min(speed.rate, topology.generation.link)
    factor = max(1.0, speed.longest / 4) if one.kind == "all-to-all" else 1.0
    return one.bytes * factor / speed.rate
