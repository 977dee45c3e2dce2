"""The largest arrays of a traced program, for a program that could not be compiled.

Shapes are those of one device, as explicit sharding states them; arrays whose sharding is left to the compiler (within
a gather from a sharded table, say) are not listed. Nothing is fused yet: some
of these arrays never exist, and so a program may need less. What a loop stacks up over its iterations always exists: it
comes first.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AxisType

from mesh.cost.arithmetic import parts
from mesh.cost.buffers import Buffer, phase, place
from mesh.cost.hlo import Frame


def largest_traced(jaxpr: ClosedJaxpr | Jaxpr, count: int = 10) -> list[Buffer]:
    """Return the largest arrays that operations make; of equal sizes, those stacked over a loop come first."""
    found: dict[tuple[str, ...], Buffer] = {}
    for buffer in _walk(jaxpr):
        found.setdefault((buffer.array, buffer.what, buffer.path, buffer.source), buffer)
    ordered = sorted(found.values(), key=lambda one: (-one.bytes, one.operation != "scan", one.path, one.source))
    return ordered[:count]


def kept_for_backward(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Return the bytes of one device that the largest loop stacks up over its iterations: what remat decides about."""
    most = 0
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in inner.eqns:
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"].jaxpr.outvars
            pairs = zip(equation.outvars, body, strict=True)
            stacked = [out.aval for out, turn in pairs if len(_whole(out.aval)) > len(_whole(turn.aval))]
            most = max(most, sum(map(_bytes, stacked)))
        most = max([most, *(kept_for_backward(part) for part in parts(equation.params))])
    return most


def _walk(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[Buffer]:
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in inner.eqns:
        below = parts(equation.params)
        for part in below:
            yield from _walk(part)
        if below and equation.primitive.name != "scan":
            continue  # results are those of the operations inside
        path, source = place(_frames(equation.source_info.traceback))
        what = phase(str(equation.source_info.name_stack))
        for out in equation.outvars:
            size = _bytes(out.aval)
            if size and not _left_to_the_compiler(out.aval):
                yield Buffer(size, _array(out.aval), what, path, source, equation.primitive.name)


def _whole(aval: Any) -> tuple[int, ...]:
    return getattr(aval, "shape", ())


def _shape(aval: Any) -> tuple[int, ...]:
    """Return the shape of one device's part. Inside a shard_map shapes are local in the axes that it maps over."""
    shape, sharding = _whole(aval), getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return tuple(shape)
    sizes = sharding.mesh.shape

    def ways(entry: Any) -> int:
        names = (entry,) if isinstance(entry, str) else entry or ()
        return math.prod(sizes[name] for name in names)

    entries = itertools.zip_longest(shape, sharding.spec[: len(shape)])
    return tuple(size // ways(entry) for size, entry in entries)


def _left_to_the_compiler(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return False
    mesh = sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind == AxisType.Auto and mesh.shape[name] > 1 for name, kind in kinds)


def _bytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    return math.prod(_shape(aval)) * getattr(dtype, "itemsize", 0)


def _array(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, _shape(aval)))}]"


def _frames(traceback: Any) -> list[Frame]:
    """Return the frames, the outermost first."""
    frames: list[Any] = [] if traceback is None else list(traceback.frames)
    return [Frame(one.file_name, one.function_name, one.line_num, None) for one in reversed(frames)]
