"""Parser of an optimised XLA program's text, as far as memory and communication need it."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from mesh.cost.expected import expected_turns

_BYTES = {
    "pred": 1, "token": 0, "opaque": 0, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
    **{f"{sign}{bits}": bits / 8 for sign in "su" for bits in (2, 4, 8, 16, 32, 64)},
}  # fmt: skip
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"\s+(ROOT )?%([^\s=]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%([^\s(]+) \(.*\{$")
_REFERENCE = re.compile(r"(calls|body|condition|to_apply|true_computation|false_computation)=%([^\s,}]+)")
_CALLS = ("call", "call-start")  # the second runs beside others, on a SparseCore
_NEGLIGIBLE = 1 << 60  # cycles from here on stand for "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """One array as the compiler lays it out."""

    dtype: str
    shape: tuple[int, ...]
    layout: str  # "1,0:T(8,128)(2,1)S(1)"

    @property
    def bytes(self) -> int:
        """Bytes of the elements, without padding."""
        width = _BYTES.get(self.dtype, 1 if self.dtype.startswith("f8") else 0.5)
        return math.ceil(math.prod(self.shape) * width)

    @property
    def padded(self) -> int:
        """Bytes with the padding of its tiles."""
        found = re.search(r"([\d,]*):T\(([\d,]+)\)", self.layout)
        if found is None or not self.shape or not math.prod(self.shape):
            return self.bytes
        order = [int(one) for one in found[1].split(",") if one]
        tile = [int(one) for one in found[2].split(",")]
        sizes = list(self.shape)
        for dimension, size in zip(order, reversed(tile), strict=False):  # the order begins with the minor-most
            sizes[dimension] = -(-sizes[dimension] // size) * size
        return self.bytes * math.prod(sizes) // math.prod(self.shape)

    @property
    def in_hbm(self) -> bool:
        """True unless it lies in another memory, such as VMEM or that of the host."""
        return "S(" not in self.layout

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line; `attributes` is what stands behind its operands."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # one, or the parts of a tuple
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @cached_property
    def called(self) -> dict[str, str]:
        """Role -> computation."""
        found = dict(_REFERENCE.findall(self.attributes))
        if branches := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
            found |= {f"branch {i}": name.strip().lstrip("%") for i, name in enumerate(branches[1].split(","))}
        return found

    @cached_property
    def cycles(self) -> int:
        """The compiler's estimate; 0 where it has none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        cycles = int(found[1]) if found else 0
        return 0 if cycles >= _NEGLIGIBLE else cycles

    @property
    def op_name(self) -> str:
        """The name of the jax operation that it comes from, with its scopes; "" for none."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def frame(self) -> int | None:
        """The number of the innermost stack frame in the module's table."""
        found = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Frame:
    """A line of the source that an instruction comes from."""

    file: str
    function: str
    line: int
    parent: int | None


@dataclasses.dataclass(frozen=True)
class HloModule:
    """All computations of a compiled program, those that are called before those that call them."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    partitions: int
    frames: Mapping[int, Frame]

    def weighted(self) -> Iterator[tuple[str, float, bool]]:
        """Yield (computation, runs in one run of the program, whether it is fused) for each computation that runs.

        A loop's body counts as often as it iterates, and every branch counts as taken. A loop whose end cannot be read
        from its condition, and of which no layer says it, counts once: see `unknown_loops`.
        """
        weights: dict[str, float] = {self.entry: 1.0}
        fused: dict[str, bool] = {self.entry: False}
        for name in self._callers_first():
            for instruction in self.computations[name]:
                turns = self.turns(name, instruction) if instruction.opcode == "while" else None
                for role, called in instruction.called.items():
                    if role == "to_apply" and instruction.opcode not in _CALLS:
                        continue  # the addition of a reduction
                    times = 1 if turns is None or role != "body" else turns
                    weights[called] = weights.get(called, 0.0) + weights[name] * times
                    fused[called] = fused[name] or instruction.opcode == "fusion"
        return ((name, weights[name], fused[name]) for name in self._callers_first())

    def elsewhere(self) -> set[str]:
        """Return the computations that another core runs beside this one, such as a SparseCore."""
        lines = (line for lines in self.computations.values() for line in lines)
        return {line.called["to_apply"] for line in lines if line.opcode == "call-start"}

    def unknown_loops(self) -> int:
        """Return the number of loops whose iterations cannot be read from the program."""
        whiles = [(name, i) for name, lines in self.computations.items() for i in lines if i.opcode == "while"]
        return sum(self.turns(name, i) is None for name, i in whiles)

    def turns(self, computation: str, loop: Instruction) -> int | None:
        """Return the iterations of a loop; None if neither compiler nor condition nor layer (`turns`) says them."""
        if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(found[1])
        counted = self._counted(computation, loop)
        return expected_turns(loop.op_name) if counted is None else counted

    def _counted(self, computation: str, loop: Instruction) -> int | None:
        """Return the iterations of a loop by a condition `counter < constant`; else None."""
        lines = {i.name: i for i in self.computations[loop.called["condition"]]}
        compares = [i for i in lines.values() if i.opcode == "compare"]
        if len(compares) != 1 or "direction=LT" not in compares[0].attributes:
            return None
        counter, limit = (lines.get(name) for name in compares[0].operands)
        if counter is None or limit is None or counter.opcode != "get-tuple-element" or limit.opcode != "constant":
            return None
        index = re.search(r"index=(\d+)", counter.attributes)
        begin = self._constant(computation, loop.operands[0], int(index[1])) if index else None
        end = re.match(r"-?\d+$", limit.operands[0]) if limit.operands else None
        return None if begin is None or end is None else int(end[0]) - begin

    def _constant(self, computation: str, name: str, index: int) -> int | None:
        """Return the integer at a place of a tuple, if it is a constant."""
        lines = {i.name: i for i in self.computations[computation]}
        line = lines.get(name)
        if line is None or line.opcode != "tuple":
            return None
        line = lines.get(line.operands[index])
        while line is not None and line.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            line = lines.get(line.operands[0])
        if line is None or line.opcode != "constant" or not line.operands or not line.operands[0].isdecimal():
            return None
        return int(line.operands[0])

    def _callers_first(self) -> list[str]:
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            if name in seen or name not in self.computations:
                return
            seen.add(name)
            for instruction in self.computations[name]:
                for role, called in instruction.called.items():
                    if role != "to_apply" or instruction.opcode in _CALLS:
                        visit(called)
            order.append(name)

        visit(self.entry)
        return order[::-1]

    def trace(self, frame: int | None) -> list[Frame]:
        """Return the frames of a line, the outermost first."""
        frames: list[Frame] = []
        while frame is not None and frame in self.frames and len(frames) < 100:
            frames.append(self.frames[frame])
            frame = frames[-1].parent
        return frames[::-1]


def parse(text: str) -> HloModule:
    """Parse the text of `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    current: list[Instruction] | None = None
    tables: list[str] = []
    for line in _joined(text):
        if current is not None:
            if line.rstrip() == "}" or line.startswith("}, execution_thread"):
                current = None
            elif head := _HEAD.match(line):
                current.append(_instruction(line, head))
        elif found := _COMPUTATION.match(line):
            current = computations.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        else:
            tables.append(line)
    partitions = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
    return HloModule(computations, entry, int(partitions[1]) if partitions else 1, _frames(tables))


def _joined(text: str) -> Iterator[str]:
    """Yield lines, with an instruction that spans several (a kernel's configuration) joined to one."""
    whole = ""
    for line in text.splitlines():
        begins = not whole.startswith("  ") or _HEAD.match(line) or line == "}" or line.startswith("}, execution_")
        if begins and whole:
            yield whole
        whole = line if begins else whole + line
    yield whole


def _instruction(line: str, head: re.Match[str]) -> Instruction:
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    arrays = tuple(
        Array(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in _ARRAY.findall(line[start:end])
    )
    opening = line.index("(", end)
    closing = _closing(line, opening)
    inside = line[opening + 1 : closing]
    operands = tuple(re.findall(r"%([^\s,)]+)", inside)) or ((inside,) if inside else ())
    return Instruction(
        head[2], line[end:opening].strip(), arrays, operands, line[closing + 1 :].lstrip(", "), bool(head[1])
    )


def _closing(line: str, opening: int) -> int:
    depth = 0
    for at in range(opening, len(line)):
        depth += (line[at] == "(") - (line[at] == ")")
        if depth == 0:
            return at
    raise ValueError(f"no end to the parenthesis at {opening} of: {line[:200]}")


def _frames(lines: Sequence[str]) -> dict[int, Frame]:
    tables: dict[str, dict[int, str]] = {}
    rows: dict[int, str] = {}
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables.setdefault(line, {})
        elif found := re.match(r"(\d+) (.*)", line):
            rows[int(found[1])] = found[2]

    def fields(row: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}

    def name(table: str, index: int) -> str:
        return json.loads(tables[table][index])

    frames: dict[int, Frame] = {}
    for index, row in tables.get("StackFrames", {}).items():
        at = fields(row)
        place = fields(tables["FileLocations"][at["file_location_id"]])
        parent = at.get("parent_frame_id", 1) - 1  # counted from 1 here, and not where a line names its frame
        frames[index] = Frame(
            name("FileNames", place["file_name_id"]),
            name("FunctionNames", place["function_name_id"]),
            place["line"],
            parent or None,
        )
    return frames
