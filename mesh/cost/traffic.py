"""Bytes between memory (HBM) and the compute units, and the time of each operation of a compiled program."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from mesh.cost.collectives import KINDS
from mesh.cost.expected import filled_share, kernel_cost
from mesh.cost.hlo import Array, HloModule, Instruction

_FREE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "constant", "after-all", "call",
    "partition-id", "replica-id", "add-dependency", "optimization-barrier", "send", "send-done", "recv", "recv-done",
    "iota",
}  # fmt: skip
_MATRIX = ("convolution", "dot")
_BEGUN = re.compile(r"-(start|update|done)$")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that moves or computes something on one device.

    Attributes:
        times: in one run of the program.
        bytes: read from and written to HBM, each time.
        cycles: by the compiler's estimate, each time; 0: it has none.
        matrix: whether it contains a matrix product.
        kernel: whether it is a kernel, of which the compiler knows nothing.
    """

    times: float
    bytes: int
    cycles: int
    matrix: bool
    kernel: bool


def operations(program: HloModule) -> Iterator[Operation]:
    """Yield all operations but the collectives."""
    elsewhere = program.elsewhere()
    for name, times, fused in program.weighted():
        if fused or name in elsewhere:
            continue
        lines = program.computations[name]
        made = {line.name: line for line in lines}
        for line in lines:
            base = _BEGUN.sub("", line.opcode)
            if line.opcode in _FREE or base in KINDS or base == "async" or (base != line.opcode and not _counts(line)):
                continue
            if line.opcode == "call-done" and _is_collective(program, line, made):
                continue
            inside = program.computations.get(line.called.get("calls", ""), ())
            if line.opcode == "fusion" and line.called.get("calls", "").startswith("all-reduce-scatter"):
                continue
            matrix = line.opcode in _MATRIX or any(one.opcode in _MATRIX for one in inside)
            kernel = line.opcode == "custom-call" and "tpu_custom_call" in line.attributes
            stated = kernel_cost(line.op_name) if kernel else None
            moved = _moved(program, line, made, inside) if stated is None else stated.bytes
            if kernel:  # capacity without rows is neither read nor written
                moved = round(moved * filled_share(line.op_name))
            yield Operation(times, moved, line.cycles, matrix, kernel)


def _is_collective(program: HloModule, done: Instruction, made: dict[str, Instruction]) -> bool:
    """Return True if what another core has done, by the line that waits for it, is a collective."""
    start = made.get(done.operands[0])
    while start is not None and start.opcode == "call-update":
        start = made.get(start.operands[0])
    called = "" if start is None else start.called.get("to_apply", "")
    return any(one.opcode in KINDS for one in program.computations.get(called, ()))


def _counts(line: Instruction) -> bool:
    """Return True for the one line of an asynchronous transfer that counts: each counts once."""
    return line.opcode == "copy-start" or (line.opcode.endswith("-done") and line.opcode != "copy-done")


def _moved(program: HloModule, line: Instruction, made: dict[str, Instruction], inside: Sequence[Instruction]) -> int:
    """Return the bytes that an operation moves; a slice of a large array, read or written, counts as the slice."""
    if line.opcode.endswith("-done"):
        return _finished(line, made)
    if line.opcode.endswith("-start"):  # copies from memory to memory: (destination, source, ...)
        return sum(_hbm(array) for array in line.arrays[:2])
    if line.opcode in _SLICES:
        return 2 * sum(map(_hbm, line.arrays))
    if line.opcode == "dynamic-update-slice":
        return 2 * _size(made.get(line.operands[1]))
    if line.opcode == "custom-call" and "AllocateBuffer" in line.attributes:
        return 0
    read = 0
    parameters = _parameters(program, inside)
    for index, name in enumerate(line.operands):
        whole = _size(made.get(name))
        uses = parameters.get(index)
        read += whole if uses is None else min(whole, uses)
    return read + _written(line, inside)


def _finished(line: Instruction, made: dict[str, Instruction]) -> int:
    """Return the bytes of HBM of an asynchronous slice, gather or update of a slice; the other side may be the host's.

    An update returns the whole array that it was written into, such as the stack of all layers' offloaded activations.
    """
    start = made.get(line.operands[0])
    if line.opcode == "dynamic-update-slice-done" and start is not None:
        update = made.get(start.operands[1])
        written = sum(array.padded for array in update.arrays) if update is not None and _hbm(line.arrays[0]) else 0
        return _size(update) + written
    source = None if start is None else made.get(start.operands[0])
    reads = source is None or not start or start.opcode.startswith("call") or _size(source) > 0
    return sum(array.padded * reads + _hbm(array) for array in line.arrays)


def _parameters(program: HloModule, inside: Sequence[Instruction]) -> dict[int, int]:
    """Return the bytes that a fusion reads of those parameters that it reads in part only, by their number."""
    numbers = {line.name: int(line.operands[0]) for line in inside if line.opcode == "parameter"}
    parts = {number: _read_part(program, name, inside) for name, number in numbers.items()}
    return {number: part for number, part in parts.items() if part is not None}


def _read_part(program: HloModule, name: str, inside: Sequence[Instruction]) -> int | None:
    """Return the bytes that all users of an array read of it together; None if one reads the whole."""
    total = 0
    users = [line for line in inside if name in line.operands]
    for line in users:
        if _cuts(line, name):
            part = _part(line, inside)
        elif line.opcode == "bitcast" or _tiles_again(line):
            part = _read_part(program, line.name, inside)
        elif line.opcode == "fusion":  # fusions nest: a slice of a layer's matrix within its product
            nested = _parameters(program, program.computations[line.called["calls"]])
            parts = [nested.get(index) for index, operand in enumerate(line.operands) if operand == name]
            part = None if None in parts else sum(one for one in parts if one is not None)
        else:
            part = None
        if part is None:
            return None
        total += part
    return total if users else None


def _tiles_again(line: Instruction) -> bool:
    """Return True for a fusion in a fusion that is its operand in other tiles, in place: tpu7x has such stacks."""
    return line.opcode == "fusion" and len(line.operands) == 1 and "output_to_operand_aliasing" in line.attributes


def _cuts(line: Instruction, name: str) -> bool:
    return line.opcode in (*_SLICES, "dynamic-update-slice") and line.operands[0] == name


def _part(line: Instruction, inside: Sequence[Instruction]) -> int:
    if line.opcode != "dynamic-update-slice":
        return sum(array.padded for array in line.arrays)
    update = next((one for one in inside if one.name == line.operands[1]), None)
    return sum(array.padded for array in update.arrays) if update else 0


def _written(line: Instruction, inside: Sequence[Instruction]) -> int:
    root = next((one for one in inside if one.root), None)
    while root is not None and root.opcode == "bitcast":
        root = next((one for one in inside if one.name == root.operands[0]), None)
    if root is not None and root.opcode == "dynamic-update-slice":
        return _part(root, inside)
    return sum(map(_hbm, line.arrays))


def _size(line: Instruction | None) -> int:
    return sum(map(_hbm, line.arrays)) if line is not None and line.opcode != "constant" else 0


def _hbm(array: Array) -> int:
    return array.padded if array.in_hbm else 0
