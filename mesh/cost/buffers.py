"""The largest arrays of a compiled program, by the layer that makes them."""

import dataclasses
import re
from collections.abc import Iterable

from mesh.cost.hlo import Frame, HloModule, Instruction

# Operations whose results name memory that another line has taken.
_NO_MEMORY = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "constant", "copy-done", "send-done",
    "recv-done", "after-all", "partition-id", "add-dependency", "optimization-barrier", "call",
}  # fmt: skip
_METHODS = re.compile(r"([A-Z]\w*)\.(\w+)$")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory of one device, for one array.

    Attributes:
        bytes: with the padding of its tiles.
        array: type and shape on one device, "bf16[4,2048]".
        what: argument, forward, recomputed, backward or other (see `phase`).
        path: path of the argument in the state, or of the layers that compute it: "Decoder.hidden/Block/Attention".
        source: "attention.py:92", or empty.
        operation: operation of jax: "dot_general".
    """

    bytes: int
    array: str
    what: str
    path: str
    source: str
    operation: str


def largest_buffers(program: HloModule, count: int = 10) -> list[Buffer]:
    """Return the largest arrays in HBM, arguments included; arrays of one shape from one place are listed once.

    Not all of them exist at the same time: their sum is more than the program's peak.
    """
    found: dict[tuple[str, ...], Buffer] = {}
    for name, _, fused in program.weighted():
        if fused:
            continue
        for line in program.computations[name]:
            if name != program.entry and line.opcode == "parameter":
                continue
            for buffer in _buffers(program, line):
                key = (buffer.array, buffer.what, buffer.path, buffer.source)
                if key not in found or found[key].bytes < buffer.bytes:
                    found[key] = buffer
    ordered = sorted(found.values(), key=lambda one: (-one.bytes, one.path, one.array, one.source))
    return ordered[:count]


def _buffers(program: HloModule, line: Instruction) -> Iterable[Buffer]:
    argument = line.opcode == "parameter"
    if (line.opcode in _NO_MEMORY and not argument) or not line.op_name:
        return
    arrays = [array for array in line.arrays if array.in_hbm]
    if line.opcode.endswith("-start"):
        arrays = arrays[:1]
    frames = program.trace(line.frame)
    for array in arrays:
        if argument:
            yield Buffer(array.padded, str(array), "argument", argument_path(line.op_name), "", "")
        else:
            path, source = place(frames)
            operation = line.op_name.rsplit("/", 1)[-1]
            yield Buffer(array.padded, str(array), phase(line.op_name), path or line.op_name, source, operation)


def phase(op_name: str) -> str:
    """Return the pass that an operation belongs to: forward, recomputed, backward or other."""
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "other"


def place(frames: Iterable[Frame]) -> tuple[str, str]:
    """Return the path of the methods that were running, and the innermost line of the source among them."""
    names: list[str] = []
    source = innermost = ""
    for frame in frames:
        function = re.sub(r"\.<locals>.*", "", frame.function)
        if "/site-packages/" in frame.file or function == "<module>":
            continue
        if found := _METHODS.search(function):
            name = found[1] if found[2] == "__call__" else f"{found[1]}.{found[2]}"
            if name not in names:  # a scan, a checkpoint and their bodies each show the method that they stand in
                names.append(name)
        source = f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}"
        innermost = function
    if source and not names:
        names = [innermost]
    return "/".join(name for name in names if not any(n.startswith(f"{name}.") for n in names)), source


def argument_path(op_name: str) -> str:
    """`state['params']['layers'].mu[0]` -> `state.params.layers.mu.0`."""
    return re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", op_name)
