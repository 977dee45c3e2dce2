"""Floating-point operations of the matrix products of a traced program, recomputation included.

They are counted in jax's own form of the program (the jaxpr), where shapes are those of all devices together, loops
have lengths, and nothing is hidden in a compiler's fusion. An optimised program does the same products. A ragged
product counts as many rows as its layer expects, a kernel the work or the points of its grid that it visits, and a loop
of unknown length its expected iterations, where the layer says so (`mesh.cost.expected`).
"""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]

from mesh.cost.expected import expected_turns, filled_share, kernel_cost, visited_points


class Products(NamedTuple):
    """FLOPs (a multiplication and an addition count two) of one run, on all devices together."""

    xla: float
    kernels: float  # FLOPs in Pallas kernels, by their own cost estimate if they have one

    @property
    def total(self) -> float:
        """FLOPs of both together."""
        return self.xla + self.kernels


def products(jaxpr: ClosedJaxpr | Jaxpr, scope: str = "") -> Products:
    """Count the matrix products that a program computes.

    A while loop counts as often as its layer expects, else once; of the branches of a conditional the most expensive.

    Args:
        jaxpr: jaxpr of the program.
        scope: name stack of what calls it.
    """
    xla = kernels = 0.0
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in inner.eqns:
        name, params = equation.primitive.name, equation.params
        within = f"{scope}/{equation.source_info.name_stack}"
        if name == "dot_general":
            xla += _dot(equation)
        elif name == "ragged_dot_general" or name == "ragged_dot":
            xla += _ragged(equation) * filled_share(within)
        elif name == "conv_general_dilated":
            kernel = _shape(equation.invars[1])
            per_output: float = math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
            xla += 2.0 * math.prod(_shape(equation.outvars[0])) * per_output
        elif name == "pallas_call":
            kernels += _kernel(params, within)
        elif name == "cond":
            counts = [products(branch, within) for branch in params["branches"]]
            best = max(counts, key=lambda one: one.total)
            xla, kernels = xla + best.xla, kernels + best.kernels
        else:
            times = _times(name, params, within)
            for part in parts(params):
                count = products(part, within)
                xla, kernels = xla + times * count.xla, kernels + times * count.kernels
    return Products(xla, kernels)


def _times(name: str, params: dict[str, Any], within: str) -> float:
    if name == "scan":
        return params["length"]
    if name == "shard_map":  # body has the shapes of one device
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    turns = expected_turns(within) if name == "while" else 1
    return 1 if turns is None else turns


def parts(params: dict[str, Any]) -> list[Any]:
    """Return the programs within an operation: of a call, of a loop's body."""
    found: list[Any] = []
    for name, value in params.items():
        if name in ("cond_jaxpr", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"):
            continue
        values: Any = value if isinstance(value, (tuple, list)) else (value,)
        found += [one for one in values if isinstance(one, (ClosedJaxpr, Jaxpr))]
    return found


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    depth = math.prod(left[axis] for axis in contracted)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * depth


def _ragged(equation: Any) -> float:
    """Count a ragged product: every row is multiplied with the matrix of one expert."""
    left, right = (variable.aval.shape for variable in equation.invars[:2])
    out = equation.outvars[0].aval.shape
    if len(out) == len(left):  # rows x expert's matrix -> rows
        groups = right[0] if len(right) == 3 else 1
        return 2.0 * math.prod(left) * math.prod(right) / groups / left[-1]
    return 2.0 * math.prod(left) * right[-1]  # rows x rows -> a matrix for each expert


def _kernel(params: dict[str, Any], within: str) -> float:
    stated = kernel_cost(within) or params.get("cost_estimate")
    if stated is not None:
        return float(stated.flops)
    points = visited_points(within)
    if points is None:
        points = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    return products(params["jaxpr"]).total * points
