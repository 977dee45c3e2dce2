"""Decoding of LDPC codes as a workload of `axl bench kernels`, and its bit errors beside those of the sum-product."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.benches.kernels.ldpc.codes import make_code
from tests.benches.kernels.ldpc.decode import MinSum, decode_numpy, decode_pallas, decode_xla, sum_product
from tests.benches.kernels.registry import DEVICE, HOST, SIMULATED, Implementation, KernelWorkload

DECIBELS = 2.0  # Eb/N0 of the code words
_TARGET = 5e-3  # bit errors at which decoders are compared
# Words of 24 groups of 128 bits, rate 1/2.
CODE, RULE = make_code(128), MinSum()


def noisy_words(words: int, decibels: float = DECIBELS, seed: int = 0) -> tuple[Any, Any]:
    """Return code words [24, words, 128], and log-likelihood ratios after a Gaussian channel, float64."""
    rng = np.random.default_rng(seed)
    sent = CODE.encode(rng.integers(0, 2, (CODE.columns - len(CODE.shifts), words, CODE.lift)))
    variance = 1 / 10 ** (decibels / 10)  # half the rate, twice the noise: Eb/N0 = Es/N0 * 2
    return sent, 2 * (1 - 2.0 * sent + rng.normal(size=sent.shape) * variance**0.5) / variance


LDPC = KernelWorkload(
    lambda words: (noisy_words(words)[1],),
    lambda inputs: (RULE.quantise(inputs[0]),),
    lambda channel: decode_numpy(CODE, RULE, channel),
    0.0,
    (8, 64, 256),
    {
        "numpy": Implementation(HOST, functools.partial(decode_numpy, CODE, RULE)),
        "xla": Implementation(DEVICE, functools.partial(decode_xla, CODE, RULE)),
        "pallas": Implementation(SIMULATED, functools.partial(decode_pallas, CODE, RULE, interpret=True)),
    },
    lambda sums: np.asarray(sums) < 0,
)


def bit_errors(words: int) -> dict[str, Any]:
    """Return bit errors by Eb/N0 in decibels, and how many decibels min-sum in fixed point is from the sum-product."""
    curve: dict[str, dict[str, float]] = {}
    for decibels in (1.25, 1.5, 1.75):
        sent, ratios = noisy_words(words, decibels, seed=1)
        decided = {
            "min_sum": np.asarray(decode_xla(CODE, RULE, RULE.quantise(ratios))) < 0,
            "sum_product": sum_product(CODE, ratios, RULE.passes) < 0,
            "undecoded": ratios < 0,
        }
        curve[str(decibels)] = {name: float((bits != sent).mean()) for name, bits in decided.items()}
    at = {name: _decibels(curve, name) for name in ("min_sum", "sum_product")}
    return {"bit_errors": curve, "ldpc_gap_db": at["min_sum"] - at["sum_product"], "ldpc_words": words}


def _decibels(curve: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Return the Eb/N0 at the target, between the measured ones in the logarithm of errors."""
    levels = np.log([max(row[name], 1e-7) for row in curve.values()])
    return float(np.interp(-np.log(_TARGET), -levels, [float(level) for level in curve]))
