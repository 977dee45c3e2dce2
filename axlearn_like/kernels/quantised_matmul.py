"""Matrices and matrix products of numbers of eight bits or fewer, by qwix.

Why qwix: one array type for int4, int8 and fp8, with scales by channel or by group of inputs, calibration and rounding,
kept up with jax by those who use it on TPUs. Of it, this uses the functional core: `quantize` and `QArray`. Its
interception of whole models replaces every product within a call and keeps state in modules, where layers here are
bound again in each step of a scan; and its products know no `out_sharding`, which explicit sharding needs.

A product rounds each row of activations and each column of weights to its own scale, so a row's result does not depend
on the others. Gradients go straight through the rounding (Bengio et al. 2013, arXiv 1308.3432) and are not rounded.
"""

import contextlib
import contextvars
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from mesh.devices import platform
from mesh.errors import UserError, install_hint

if TYPE_CHECKING:
    from qwix import QArray

Numbers = Literal["int8", "int4", "fp8"]
DTYPES: dict[str, Any] = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}
# The largest entry becomes the largest number. By default qwix puts it half a step beyond, where the last bit of the
# scale would say which of two numbers it becomes, and that may differ between two programs.
_CALIBRATION = {"int8": f"absmax,{127.5 / 127}", "int4": f"absmax,{7.5 / 7}", "fp8": "absmax"}

_products: contextvars.ContextVar[Numbers | None] = contextvars.ContextVar("products", default=None)


@contextlib.contextmanager
def quantised_products(numbers: Numbers | None) -> Generator[None]:
    """Within, `project` multiplies such numbers; None: those that it is given. For what is traced within."""
    token = _products.set(numbers)
    try:
        yield
    finally:
        _products.reset(token)


def product_numbers() -> Numbers | None:
    """Return the numbers that products are to be made of; None: those of the activations."""
    return _products.get()


def load_qwix() -> Any:
    """Return the package. UserError: it is not installed."""
    try:
        import qwix
    except ImportError:
        raise UserError(f"quantised layers need qwix: {install_hint('quantize')}") from None
    return qwix


def quantise(x: jax.Array, inputs: Sequence[int], numbers: Numbers, group: int | None = None) -> "QArray":
    """Return the nearest such numbers with float32 scales.

    Args:
        x: a matrix, or stacks of them.
        inputs: axes that a product contracts: they share a scale.
        group: entries of the last of these axes that share a scale; None: all.

    Raises:
        UserError: the group does not divide the axis.
    """
    inputs = [axis % x.ndim for axis in inputs]
    if group is not None and x.shape[inputs[-1]] % group:
        raise UserError(f"group={group} does not divide the {x.shape[inputs[-1]]} inputs of a matrix {tuple(x.shape)}")
    shared = inputs if group is None else inputs[-1:]
    tiled = {} if group is None else {inputs[-1]: group}
    kept = [axis for axis in range(x.ndim) if axis not in shared]
    axes: dict[str, Any] = {"channelwise_axes": kept, "tiled_axes": tiled}
    x = x.astype(jnp.float32)
    return load_qwix().quantize(x, DTYPES[numbers], calibration_method=_CALIBRATION[numbers], **axes)


def dequantise(x: "QArray", dtype: DTypeLike) -> jax.Array:
    """Return the numbers times their scales."""
    return load_qwix().dequantize(x).astype(dtype)


def has_columns(x: Any) -> TypeGuard["QArray"]:
    """Return True for matrices of int8 with one scale for each column, which kernels read as they are."""
    if not hasattr(x, "qvalue"):
        return False
    return x.qvalue.dtype == jnp.int8 and x.zero_point is None and x.scale.shape == (*x.shape[:-2], 1, x.shape[-1])


def keep_in_loop(x: jax.Array, params: Any) -> tuple[jax.Array, Any]:
    """Return activations and parameters such that `dequantise` stays where it is, in a loop over layers and tokens.

    XLA would else move what is the same for all tokens out of their loop: whole matrices in the type of x. On TPUs the
    scales alone are held back: numbers behind a barrier are copied out of their stack, before the product reads them.
    """
    if platform() != "tpu":
        return jax.lax.optimization_barrier((x, params))
    held = lambda leaf: hasattr(leaf, "qvalue")  # noqa: E731
    scales = [leaf.scale for leaf in jax.tree.leaves(params, is_leaf=held) if held(leaf)]
    x, scales = jax.lax.optimization_barrier((x, scales))
    later = iter(scales)
    return x, jax.tree.map(lambda leaf: leaf.replace(scale=next(later)) if held(leaf) else leaf, params, is_leaf=held)


def round_to(x: jax.Array, inputs: Sequence[int], numbers: Numbers, group: int | None = None) -> jax.Array:
    """Return x rounded as by `quantise`, in its own type; the gradient is that of x."""
    rounded = dequantise(quantise(jax.lax.stop_gradient(x), inputs, numbers, group), x.dtype)
    # Not x + stop_gradient(rounded - x), which is rounded once more.
    return rounded + (x - jax.lax.stop_gradient(x))


def quantised_dot(
    x: jax.Array, matrix: "jax.Array | QArray", numbers: Numbers, dtype: DTypeLike | None, spec: PartitionSpec | None
) -> jax.Array:
    """Return x [..., in] times matrix [in, out], both rounded to `numbers`; a `QArray` is, and has no gradient.

    Args:
        dtype: dtype of the result; None: that of x.
        spec: sharding of the result.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    if hasattr(matrix, "qvalue"):
        return _dot(quantise(x, [-1], numbers), cast("QArray", matrix), dtype, spec)
    return _trained(x, matrix, numbers, dtype, spec)


def _dot(x: "QArray", matrix: "QArray", dtype: Any, spec: PartitionSpec | None) -> jax.Array:
    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    sums = jnp.int32 if jnp.issubdtype(x.qvalue.dtype, jnp.integer) else jnp.float32
    y = jax.lax.dot_general(x.qvalue, matrix.qvalue, contracted, preferred_element_type=sums, out_sharding=spec)
    rows, columns = x.scale, matrix.scale
    if spec is not None:
        rows = jax.sharding.reshard(rows, PartitionSpec(*spec[:-1], None))
        columns = jax.sharding.reshard(columns, PartitionSpec(None, spec[-1]))
    return (y.astype(jnp.float32) * rows * columns).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _trained(x: jax.Array, matrix: jax.Array, numbers: Numbers, dtype: Any, spec: PartitionSpec | None) -> jax.Array:
    return _dot(quantise(x, [-1], numbers), quantise(matrix, [0], numbers), dtype, spec)


def _forward(x: jax.Array, matrix: jax.Array, numbers: Numbers, dtype: Any, spec: PartitionSpec | None) -> Any:
    rounded_x, rounded = quantise(x, [-1], numbers), quantise(matrix, [0], numbers)
    kept = rounded_x, rounded, jnp.zeros((), x.dtype), jnp.zeros((), matrix.dtype)
    return _dot(rounded_x, rounded, dtype, spec), kept


def _backward(numbers: Numbers, dtype: Any, spec: PartitionSpec | None, kept: Any, gradient: jax.Array) -> Any:
    x, matrix, of_x, of_matrix = kept
    product = partial(jnp.matmul, preferred_element_type=dtype, out_sharding=spec)
    _, transpose = jax.vjp(product, dequantise(x, of_x.dtype), dequantise(matrix, of_matrix.dtype))
    return transpose(gradient)


_trained.defvjp(_forward, _backward)
