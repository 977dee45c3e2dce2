"""Silent data corruption: a step is computed twice from the same state and batch, and the bits are compared.

A defective core does not raise; it computes a wrong number now and then (Dixit et al. 2021, arXiv 2102.11245). A
compiled program on sound hardware gives the same bits every time, so any difference is a defect.
"""

from collections.abc import Callable
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.checkpoint.manifest import checksum
from axlearn_like.config import ConfigBase, Configurable
from mesh.errors import UserError

Digests = dict[Any, np.ndarray]  # device of this process -> uint32[arrays]


class CorruptionError(UserError):
    """Two runs of the same computation gave different bits; `found` lists (array, devices)."""

    def __init__(self, step: int, found: list[tuple[str, list[str]]]):
        shown = "\n".join(f"  {name} on {', '.join(devices)}" for name, devices in found[:8])
        more = f"\n  ... and {len(found) - 8} more arrays" if len(found) > 8 else ""
        super().__init__(
            f"silent data corruption: step {step}, computed twice from the same state and batch, gave different bits "
            f"in\n{shown}{more}\nNothing was saved after it. Take these devices out and start again: the run goes on "
            "from the last checkpoint. If every device differs every time, the program is not deterministic "
            "(on GPUs: XLA_FLAGS=--xla_gpu_deterministic_ops=true)"
        )
        self.step, self.found = step, found


class SDCCheck(Configurable):
    """Repetition of every n-th step with the very program that trains: checked and unchecked runs are the same.

    During a check the state is held twice.
    """

    class Config(ConfigBase["SDCCheck"]):
        every: int = 1000  # steps between checks

        @override
        def check_fields(self) -> None:
            self.require_least(1, "every")

    def __init__(self, cfg: Config, *, mesh: Mesh):
        self._every, self._mesh = cfg.every, mesh
        self._programs: dict[Any, Any] = {}  # partitions of the arrays -> program

    def due(self, step: int) -> bool:
        """Return True if update number `step` is to be checked."""
        return step % self._every == 0

    def run(self, step_fn: Callable[[Any, Any], Any], step: int, state: Any, batch: Any) -> Any:
        """Compute `step_fn(state, batch)` twice and return the result. CorruptionError: the bits differ.

        `step_fn` may donate the state. Waits for both results.
        """
        copy = jax.device_put(state, jax.tree.map(lambda x: x.sharding, state), may_alias=False)
        first = step_fn(copy, batch)
        expected = self._digests(_named(first))
        jax.tree.map(lambda x: x.delete(), first)  # room for the second
        result = step_fn(state, batch)
        found = _differing(_named(result), expected, self._digests(_named(result)))
        if found:
            raise CorruptionError(step, found)
        return result

    def _digests(self, tree: Any) -> Digests:
        """Return a checksum of each array's part on each device: computed there, 4 bytes are read of each."""
        leaves = [_on_device(x) for x in jax.tree.leaves(tree)]
        specs = tuple(x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec() for x in leaves)
        if specs not in self._programs:

            def of_device(*parts: jax.Array) -> jax.Array:
                return jnp.stack([checksum(part) for part in parts])[:, None]

            everywhere = PartitionSpec(None, self._mesh.axis_names)
            mapped = jax.shard_map(of_device, mesh=self._mesh, in_specs=specs, out_specs=everywhere, check_vma=False)
            self._programs[specs] = jax.jit(mapped)
        digests = self._programs[specs](*leaves)
        return {shard.device: np.asarray(shard.data)[:, 0] for shard in digests.addressable_shards}


def _named(result: tuple[Any, Any]) -> dict[str, Any]:
    return {"state": result[0], "metrics": result[1]}


def _differing(tree: Any, before: Digests, after: Digests) -> list[tuple[str, list[str]]]:
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]
    found = []
    for index, name in enumerate(names):
        devices = [str(device) for device, digest in after.items() if digest[index] != before[device][index]]
        if devices:
            found.append((name, devices))
    return found


def _on_device(x: jax.Array) -> jax.Array:
    """Return the array in its devices' memory; it may be offloaded to the host's."""
    kind = next(iter(x.sharding.device_set)).default_memory().kind
    if x.sharding.memory_kind in (None, kind):
        return x
    return jax.device_put(x, x.sharding.with_memory_kind(kind))
