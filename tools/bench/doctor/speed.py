"""Measured speed of the devices: bandwidth of their memory and matrix products, beside their makers' figures."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.operations.utilisation import peak_bandwidth, peak_flops
from tools.bench.doctor.checks import Finding

Options = Mapping[str, Any]
_SECONDS = 0.3  # time of a measurement, after a first run
_SLOW = (
    "another process may use the device (nvidia-smi), or its clocks are held down (nvidia-smi -q -d PERFORMANCE); "
    "a part of a GPU has a part of these figures"
)


def accelerated() -> bool:
    """Return True unless the devices are CPUs, for which sizes are small."""
    return jax.default_backend() != "cpu"


def _seconds(function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any) -> float:
    """Return the seconds of a function of an array [devices, ...], one part on each device, run on its own results."""
    own = jax.local_devices()
    rows = NamedSharding(Mesh(own, ("all",)), PartitionSpec("all"))
    program = jax.jit(function, out_shardings=rows, donate_argnums=0)
    x = jax.block_until_ready(program(jnp.full((len(own), *shape), 1e-3, dtype, device=rows)))
    times, spent = 1, 0.0
    while spent < _SECONDS:
        times *= min(8, 1 + int(_SECONDS / spent)) if spent else 1
        began = time.monotonic()
        for _ in range(times):
            x = program(x)
        jax.block_until_ready(x)
        spent = time.monotonic() - began
    return spent / times


@functools.cache
def memory_speed() -> float:
    """Return the bytes/s that a device reads and writes."""
    size = (1 << 28) if accelerated() else (1 << 24)
    return 2 * 4 * size / _seconds(lambda x: x * 1.0001 + 1e-6, (size,), jnp.float32)


@functools.cache
def matrix_speed(dtype: str) -> float:
    """Return the FLOP/s of large products of a device in this type, with XLA's default precision."""
    size = (8192 if dtype == "bfloat16" else 4096) if accelerated() else 768

    def product(x: jax.Array) -> jax.Array:
        return (jnp.einsum("dij,djk->dik", x, x, preferred_element_type=jnp.float32) / size).astype(x.dtype)

    return 2 * size**3 / _seconds(product, (size, size), dtype)


def bandwidth(options: Options) -> Finding:
    """Measure how fast each device reads and writes its memory, all at once."""
    found = memory_speed()
    return _beside(f"{found / 1e9:,.1f} GB/s a device", found, peak_bandwidth(jax.devices()), 0.5)


def matrix(options: Options) -> Finding:
    """Measure products in bfloat16 and float32 of each device, all at once."""
    found = {dtype: matrix_speed(dtype) for dtype in ("bfloat16", "float32")}
    value = ", ".join(f"{dtype} {speed / 1e12:.3g} TFLOP/s" for dtype, speed in found.items()) + " a device"
    return _beside(value, found["bfloat16"], peak_flops(jax.devices()), 0.4)


def _beside(value: str, found: float, peak: float | None, least: float) -> Finding:
    """Return a finding: below the share `least` of the published peak something is wrong."""
    if peak is None:
        return Finding("ok", value, "", {"measured": found})
    value, slow = f"{value}, {found / peak:.0%} of the published {peak / 1e12:g}e12", found < least * peak
    return Finding("warn" if slow else "ok", value, _SLOW * slow, {"measured": found, "published": peak})
