"""Normalised min-sum decoding (Chen and Fossorier, 2002), layered (Hocevar, 2004) or flooding, in fixed point or float.

One program serves numpy, XLA and Pallas: it reads and writes groups of bits in a list or in a reference by number, and
all that is added is added in one order, so that decisions are the same to the bit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.benches.kernels.ldpc.codes import Array, QuasiCyclicCode

MESSAGE = 127  # limit of a message in fixed point: int8
POSTERIOR = 2047  # limit of a sum
SCALE = 8.0  # steps of fixed point for 1 of a log-likelihood ratio
BATCH = 8  # code words of a block of the Pallas kernel: sublanes


@dataclasses.dataclass(frozen=True)
class MinSum:
    """A way to decode.

    Attributes:
        layered: a check sees what earlier checks of the same pass have changed.
        fixed: messages are whole numbers of eight bits, in units of 1 / SCALE; else float32.
        passes: passes over all checks.
    """

    layered: bool = True
    fixed: bool = True
    passes: int = 20

    @property
    def dtype(self) -> Any:
        """Return the type of the numbers between two operations; TPUs, which have no rolls of 16 bits, widen it."""
        return np.int16 if self.fixed else np.float32

    def quantise(self, ratios: Array) -> Array:
        """Return channel values as the decoder takes them, from log-likelihood ratios log p(0) / p(1)."""
        if not self.fixed:
            return ratios.astype(np.float32)
        return np.clip(np.rint(ratios * SCALE), -MESSAGE, MESSAGE).astype(np.int16)

    def weakened(self, smallest: Any) -> Any:
        """Return 7/8 of magnitudes, in fixed point rounded down."""
        return (smallest * 7) >> 3 if self.fixed else smallest * np.float32(0.875)


def run_pass(code: QuasiCyclicCode, rule: MinSum, bits: tuple[Any, Any], messages: Any, xp: Any, roll: Any) -> None:
    """Update messages and sums by all checks once.

    Args:
        code: the graph.
        rule: how.
        bits: sums that checks read, and those that they write, by column; the same for layered decoding.
        messages: what checks said last, by edge.
        xp: numpy or jax.numpy.
        roll: `roll(x, shift)` along the last axis.
    """
    source, target = bits
    bound = functools.partial(xp.clip, min=-POSTERIOR, max=POSTERIOR) if rule.fixed else lambda x: x
    for row in code.rows:
        said = [roll(source[c], -s) - messages[e] for e, c, s in row]
        heard = [xp.clip(x, -MESSAGE, MESSAGE) for x in said] if rule.fixed else said
        sizes = [xp.abs(x) for x in heard]
        least, second = xp.minimum(sizes[0], sizes[1]), xp.maximum(sizes[0], sizes[1])
        for size in sizes[2:]:
            second = xp.minimum(second, xp.maximum(least, size))
            least = xp.minimum(least, size)
        negative = functools.reduce(xp.logical_xor, [x < 0 for x in heard])
        least, second = rule.weakened(least), rule.weakened(second)
        smallest = functools.reduce(xp.minimum, sizes)
        for (edge, column, shift), whole, x, size in zip(row, said, heard, sizes, strict=True):
            strength = xp.where(size == smallest, second, least)
            message = xp.where(xp.logical_xor(negative, x < 0), -strength, strength)
            messages[edge] = message
            if rule.layered:
                target[column] = roll(bound(whole + message), shift)
            else:
                target[column] = bound(target[column] + roll(message, shift))


def decode_numpy(code: QuasiCyclicCode, rule: MinSum, channel: Array) -> Array:
    """Return sums [columns, batch, lift] whose signs are the decisions (negative: 1), of channel values alike."""
    bits = list(channel.astype(rule.dtype))
    messages = [np.zeros_like(bits[0]) for _ in range(code.edges)]
    for _ in range(rule.passes):
        target = bits if rule.layered else list(channel.astype(rule.dtype))
        run_pass(code, rule, (bits, target), messages, np, functools.partial(np.roll, axis=-1))
        bits = target
    return np.stack(bits)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode_xla(code: QuasiCyclicCode, rule: MinSum, channel: Any) -> Any:
    def one(_: Any, state: Any) -> Any:
        bits, messages = list(state[0]), list(state[1])
        target = bits if rule.layered else list(channel)
        run_pass(code, rule, (bits, target), messages, jnp, functools.partial(jnp.roll, axis=-1))
        return tuple(target), tuple(messages)

    nothing = tuple(jnp.zeros_like(channel[0]) for _ in range(code.edges))
    return jnp.stack(jax.lax.fori_loop(0, rule.passes, one, (tuple(channel), nothing))[0])


def decode_xla(code: QuasiCyclicCode, rule: MinSum, channel: Array) -> Any:
    """Return the same by XLA."""
    return _decode_xla(code, rule, jnp.asarray(channel, rule.dtype))


def _kernel(code: QuasiCyclicCode, rule: MinSum, roll: Callable[..., Any], refs: tuple[Any, ...]) -> None:
    channel, bits, other, messages = refs
    bits[...] = channel[...]
    messages[...] = jnp.zeros_like(messages)

    def one(_: Any, carry: Any) -> Any:
        if not rule.layered:
            other[...] = channel[...]
        run_pass(code, rule, (bits, bits if rule.layered else other), messages, jnp, roll)
        if not rule.layered:
            bits[...] = other[...]
        return carry

    jax.lax.fori_loop(0, rule.passes, one, 0)


def decode_pallas(code: QuasiCyclicCode, rule: MinSum, channel: Any, *, interpret: bool = False) -> Any:
    """Return the same by a Pallas kernel for TPUs, which keeps the sums and messages of eight words in vector memory.

    The lift is a multiple of 128 there: a group of bits fills the lanes. `interpret`: simulate it.
    """
    columns, batch, lift = channel.shape
    dtype = np.int32 if rule.fixed else np.float32

    def roll(x: Any, shift: int) -> Any:
        return x if shift % lift == 0 else pltpu.roll(x, shift % lift, 1)

    block = pl.BlockSpec((columns, BATCH, lift), lambda i: (0, i, 0))
    scratch = [pltpu.VMEM((count, BATCH, lift), dtype) for count in (columns, code.edges)]
    return pl.pallas_call(
        lambda *refs: _kernel(code, rule, roll, refs),
        grid=(batch // BATCH,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(channel.shape, dtype),
        scratch_shapes=scratch,
        interpret=interpret,
    )(jnp.asarray(channel, dtype))


def sum_product(code: QuasiCyclicCode, ratios: Array, passes: int) -> Array:
    """Return the sums of layered sum-product decoding in float64 (Gallager, 1962): the yardstick of min-sum."""
    bits = ratios.astype(np.float64).copy()
    messages = np.zeros((code.edges, *bits.shape[1:]))
    for _ in range(passes):
        for row in code.rows:
            heard = np.stack([np.roll(bits[c], -s, axis=-1) - messages[e] for e, c, s in row])
            tanh = np.tanh(np.clip(heard, -30, 30) / 2)
            tanh = np.where(np.abs(tanh) < 1e-12, 1e-12, tanh)
            others = np.clip(np.prod(tanh, axis=0) / tanh, -1 + 1e-12, 1 - 1e-12)
            for (edge, column, shift), x, said in zip(row, heard, 2 * np.arctanh(others), strict=True):
                messages[edge] = said
                bits[column] = np.roll(x + said, shift, axis=-1)
    return bits
