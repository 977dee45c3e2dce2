"""Lossless deltas through the parameter server, on real updates: the demo's policy under GRPO at a rate of 1e-6.

The worker requests bfloat16, as inference does; the trainer has float32. Bytes are those transferred for each version
against the previous one, without requests; received arrays are compared to the bit. See
`tools.bench.weights.delta_curve`, which makes these runs, for other learning rates and for gaps between versions.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesh import enable_compilation_cache
from rl.parameter_server.client import connect
from rl.parameter_server.server import ParameterServer
from tools.bench.weights.delta_curve import BF16, BURN_IN, Version, cpu_seconds, fine_tune, train

RATE = 1e-6
PAIRS = 8


def measure(*, quick: bool, warm_start: Path | None = None) -> dict[str, Any]:
    """Measure `delta_bytes_ratio`, `delta_cpu_s_per_gb` and `delta`. `warm_start`: where the fine-tuned policy is."""
    versions = _pretended() if quick else _trained(warm_start)
    ratios = through_the_server(versions)
    costs = cpu_seconds([{path: array.astype(BF16) for path, array in version.items()} for version in versions])
    per_gb = {what: costs[f"{what}_cpu_s_per_gb"] for what in ("encode", "decode")}
    return {
        "delta_bytes_ratio": statistics.median(ratios),
        "delta_cpu_s_per_gb": per_gb,
        "delta": {
            "lr": RATE,
            "ratio_by_version": ratios,
            "parameters": sum(array.size for array in versions[0].values()),
            "measured_on_bytes": costs["nbytes"],
        },
    }


def through_the_server(versions: Sequence[Version]) -> list[float]:
    """Return bfloat16 bytes divided by bytes transferred, for each version but the first, which has no base."""
    server = ParameterServer.Config(codec="delta", shared_memory=False, keep=2).build()
    access = connect(server.cfg, [server.listen])
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {path: jax.ShapeDtypeStruct(array.shape, BF16, sharding=here) for path, array in versions[0].items()}
    publisher, receiver = access.publisher(), access.receiver(like)
    ratios = []
    for number, version in enumerate(versions):
        publisher.publish_async({path: jnp.asarray(array) for path, array in version.items()}, number).wait()
        pulled = receiver.pull(number)
        for path, array in version.items():
            if not np.array_equal(np.asarray(pulled[path]).view(np.uint16), array.astype(BF16).view(np.uint16)):
                raise AssertionError(f"version {number}: {path} came otherwise")
        ratios.append(receiver.stats.needed / receiver.stats.network)
    server.close()
    return ratios[1:]


def _trained(warm_start: Path | None) -> list[Version]:
    enable_compilation_cache()  # nothing here measures a cold start
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions = train(folder, fine_tune(warm_start or folder / "warm_start"), RATE, BURN_IN + PAIRS)
    return versions[BURN_IN:]


def _pretended() -> list[Version]:
    """Return made-up versions, in which one entry in a hundred changes."""
    first = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    second = first.copy()
    second.reshape(-1)[::100] *= np.float32(1.01)
    return [{"w": first}, {"w": second}]
