"""Communication of a compiled program: over which mesh axes, how much, and overlapped with which computation.

Bytes are those that one device receives in one run of the program, by the usual algorithms, n being the size of a
group: (n - 1) / n of the result of an all-gather and of the operand of a reduce-scatter or all-to-all, twice that for
an all-reduce, and all of a permutation's. A ragged all-to-all sends the rows that there are, which is known only when
it runs: it counts as if its smaller side (what it reads, or the capacity that it may fill) were full of rows, evenly
distributed over the group.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mesh.cost.hlo import HloModule, Instruction

KINDS = {
    "all-gather": "all-gather",
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-permute",
}
# An all-reduce of which every device keeps a part, which the TPU compiler makes a fusion of this name.
_SCATTER = "all-reduce-scatter"
_MEGASCALE = {"ALL_REDUCE": "all-reduce", "ALL_GATHER": "all-gather", "REDUCE_SCATTER": "reduce-scatter"}
_DCN = " between slices"  # traffic of an axis over the data centre's network is listed separately


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of the program.

    Attributes:
        kind: all-gather, all-reduce, reduce-scatter, all-to-all or collective-permute.
        axes: axes of the mesh, in its order, along which the members of a group differ.
        group: devices in a group.
        bytes: bytes that one device receives each time.
        times: times that it is done in one run.
        beside: estimated cycles of the operations scheduled between its start and end, whether another core moves the
            data or not; 0 if not asynchronous.
        dcn: whether it goes between slices.
        op_name: name of the operation in jax that it belongs to.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    bytes: int
    times: float
    beside: int
    dcn: bool
    op_name: str

    @property
    def axis(self) -> str:
        """The name of its axes: "fsdp", "fsdp+tensor", "data between slices"."""
        return ("+".join(self.axes) or "none") + (_DCN if self.dcn else "")


def collectives(program: HloModule, mesh: Mesh) -> list[Collective]:
    """Return all collectives between two or more devices that the program runs.

    Args:
        program: compiled for the devices of `mesh`.
        mesh: its order of devices is that of the program's partitions; of several slices, each runs the program.
    """
    grid, elsewhere = _coordinates(mesh), _elsewhere(program)
    found: list[Collective] = []
    for name, times, fused in program.weighted():
        lines = program.computations[name]
        if fused and not name.startswith(_SCATTER):
            lines = [line for line in lines if line.opcode in KINDS]
        ends = _ends(lines)
        for at, line in enumerate(lines):
            kind = _kind(name, line)
            if kind is None:
                continue
            groups = list(_members(line, grid.partitions))
            size = max((len(group) for group in groups), default=1)
            if kind == "collective-permute":
                groups = [pair for pair in groups if pair[0] != pair[1]]
            if size < 2 or not groups:
                continue
            beside = sum(one.cycles for one in lines[at + 1 : ends[line.name]]) if line.name in ends else 0
            beside = elsewhere.get(name, beside)
            received = _ragged(line, lines, size) if "ragged" in line.opcode else _received(kind, line, size)
            found.append(Collective(kind, grid.axes(groups), size, received, times, beside, False, line.op_name))
        if not fused:
            found += _between_slices(lines, times, grid)
    return found


def by_axis(found: Iterable[Collective], hidden: Sequence[float]) -> dict[str, dict[str, dict[str, int]]]:
    """Return {axis: {kind: {count, bytes, overlapped}}} of one run, sorted; `hidden` is the overlapped part of each."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for one, part in zip(found, hidden, strict=True):
        row = table.setdefault(one.axis, {}).setdefault(one.kind, {"count": 0, "bytes": 0, "overlapped": 0})
        row["count"] += round(one.times)
        row["bytes"] += round(one.bytes * one.times)
        row["overlapped"] += round(one.bytes * one.times * part)
    return {axis: dict(sorted(kinds.items())) for axis, kinds in sorted(table.items())}


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The coordinates on the mesh of each partition of the program: int [partitions, axes]."""

    names: tuple[str, ...]
    places: np.ndarray
    between: tuple[str, ...]  # axes along which slices differ
    slices: int

    @property
    def partitions(self) -> int:
        return len(self.places)

    def axes(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        varied = np.zeros(len(self.names), bool)
        for group in groups:
            places = self.places[np.asarray(group)]
            varied |= (places != places[0]).any(axis=0)
        return tuple(name for name, differs in zip(self.names, varied, strict=True) if differs)


def _coordinates(mesh: Mesh) -> _Grid:
    names, sizes = tuple(mesh.axis_names), mesh.devices.shape
    places = np.stack(np.unravel_index(np.arange(mesh.devices.size), sizes), axis=1)
    slice_of = np.array([getattr(device, "slice_index", None) or 0 for device in mesh.devices.flat])
    first = places[slice_of == slice_of[0]]
    others = [places[slice_of == index] for index in np.unique(slice_of)]
    differ = np.zeros(len(names), bool)
    for other in others:
        differ |= (other != first).any(axis=0)
    between = tuple(name for name, differs in zip(names, differ, strict=True) if differs)
    return _Grid(names, first, between, len(others))


def _kind(computation: str, line: Instruction) -> str | None:
    kind = KINDS.get(line.opcode.removesuffix("-start"))
    return "reduce-scatter" if kind == "all-reduce" and computation.startswith(_SCATTER) else kind


def _ends(lines: Sequence[Instruction]) -> dict[str, int]:
    """Return the index of the line that waits for an asynchronous operation, by the name of its start."""
    return {
        line.operands[0]: at
        for at, line in enumerate(lines)
        if line.opcode.endswith("-done") and line.operands and not line.opcode.startswith("copy")
    }


def _elsewhere(program: HloModule) -> dict[str, int]:
    """Return the cycles of what is scheduled beside each computation that another core runs (a SparseCore), by name.

    It begins when it is given its operands (`call-update`). Cycles that several have beside them are shared.
    """
    found: dict[str, int] = {}
    for lines in program.computations.values():
        starts = {line.name: line.called["to_apply"] for line in lines if line.opcode == "call-start"}
        if not starts:
            continue
        begins = {line.name: (at, line.operands[0]) for at, line in enumerate(lines) if line.opcode == "call-update"}
        ends = {line.operands[0]: at for at, line in enumerate(lines) if line.opcode == "call-done"}
        spans = {starts[start]: range(at + 1, ends.get(update, len(lines))) for update, (at, start) in begins.items()}
        under_way = Counter(at for span in spans.values() for at in span)
        for name, span in spans.items():
            found[name] = round(sum(lines[at].cycles / under_way[at] for at in span))
    return found


def _received(kind: str, line: Instruction, size: int) -> int:
    arrays = [array for array in line.arrays if array.dtype != "token"]
    if line.opcode.endswith("-start"):  # (operands, results, ...)
        arrays = arrays[len(line.operands) :][: len(line.operands)] or arrays
    total = sum(array.bytes for array in arrays)
    share = (size - 1) / size
    if kind == "all-reduce":
        return round(2 * total * share)
    if kind == "reduce-scatter":  # result is a part; the compiler's all-reduce has the whole
        whole = total * size if line.opcode.startswith("reduce-scatter") else total
        return round(whole * share)
    return round(total * share) if kind != "collective-permute" else total


def _ragged(line: Instruction, lines: Sequence[Instruction], size: int) -> int:
    """Return the bytes that a ragged all-to-all receives at most.

    Its operands are the rows, the buffer for them, and the counts. No more can be received than there was to send, and
    a layer that reserves capacity for the worst case does not fill it.
    """
    rows, places = (next((one for one in lines if one.name == name), None) for name in line.operands[:2])
    whole = min(sum(array.bytes for array in one.arrays) for one in (rows, places) if one is not None)
    return round(whole * (size - 1) / size)


def _members(line: Instruction, partitions: int) -> Iterator[list[int]]:
    text = line.attributes
    if found := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        yield from ([int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1]))
    elif found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        yield from _iota(found[2], found[3]).reshape(_numbers(found[1])).tolist()
    elif found := re.search(r"replica_groups=@?mesh\[([^\]]*)\] *\{([^}]*)\}", text):
        yield from _along_mesh(found[1], found[2])
    elif found := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", text):
        groups = re.findall(r"\{([\d,]+)\}", found[1])
        yield from (_numbers(group) for group in groups or [",".join(map(str, range(partitions)))])
    else:
        yield list(range(partitions))


def _iota(sizes: str, order: str | None) -> np.ndarray:
    grid = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return grid.transpose(_numbers(order)) if order else grid


def _along_mesh(sizes_text: str, axes_text: str) -> list[list[int]]:
    """Parse groups like `mesh['a'=2,'b'=4] {'b'}` or `{'b':(2)2}`: the part of size 2 of axis b after the first 2."""
    names = re.findall(r"'([^']+)'=(\d+)", sizes_text)
    split: dict[str, list[int]] = {name: [int(size)] for name, size in names}
    chosen: list[tuple[str, int, int]] = []
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes_text):
        size = split[name][0] if len(split[name]) == 1 else math.prod(split[name])
        first, width = (int(before), int(part)) if part else (1, size)
        split[name] = [first, width, size // (first * width)]
        chosen.append((name, first, width))
    sizes = [size for name, _ in names for size in split[name]]
    labels = [(name, place) for name, _ in names for place in range(len(split[name]))]
    inner = [labels.index((name, 1)) for name, _, _ in chosen]
    outer = [index for index in range(len(sizes)) if index not in inner]
    width = math.prod(sizes[index] for index in inner)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(outer + inner).reshape(-1, width).tolist()


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def _between_slices(lines: Sequence[Instruction], times: float, grid: _Grid) -> Iterator[Collective]:
    """Yield the transfers that the host exchanges with other slices: one for each `send`."""
    done = {line.operands[0]: at for at, line in enumerate(lines) if line.opcode == "recv-done" and line.operands}
    waited = {_rendezvous(line): done[line.name] for line in lines if line.opcode == "recv" and line.name in done}
    for at, line in enumerate(lines):
        if line.opcode != "send" or "megascale" not in line.attributes:
            continue
        found: Any = re.search(r'_xla_megascale_transfer_type="(\w+)"', line.attributes)
        kind = _MEGASCALE.get(found[1], "collective-permute") if found else "collective-permute"
        end = waited.get(_rendezvous(line), at)
        beside = sum(one.cycles for one in lines[at + 1 : end])
        size = sum(array.bytes for array in line.arrays if array.dtype not in ("token", "u32"))
        factor = {"all-reduce": 2.0, "all-gather": float(grid.slices)}.get(kind, 1.0)
        received = round(size * factor * (1.0 if kind == "collective-permute" else (grid.slices - 1) / grid.slices))
        yield Collective(kind, grid.between, grid.slices, received, times, beside, True, line.op_name)


def _rendezvous(line: Instruction) -> str:
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', line.attributes)
    return found[1] if found else line.name
