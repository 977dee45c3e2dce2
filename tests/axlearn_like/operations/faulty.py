"""A step on eight devices, one of which computes a wrong bit, under the bit check."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.operations.recompilation import CompiledStep
from axlearn_like.operations.sdc import CorruptionError, SDCCheck
from mesh import make_mesh


def flipped(x: jax.Array, device: int) -> jax.Array:
    """`x` with one bit of its part on a device turned."""
    parts = []
    for shard in x.addressable_shards:
        part = np.array(shard.data)
        if shard.device.id == device:
            part.view(np.uint32).reshape(-1)[0] ^= 1 << 3
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def report() -> dict[str, Any]:
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})

    def put(x: Any, *spec: Any) -> jax.Array:
        return jax.device_put(jnp.asarray(x), NamedSharding(mesh, PartitionSpec(*spec)))

    def state() -> dict[str, Any]:
        w = np.arange(32, dtype=np.float32).reshape(4, 8) / 7
        return {"params": {"w": put(w, "fsdp", "tensor"), "scale": put(np.ones(8, np.float32))}, "step": put(0)}

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(batch @ p["w"] * p["scale"])))(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "step": state["step"] + 1}, {"loss": jnp.sum(params["scale"])}

    batch = put(np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4), ("data",))
    program = CompiledStep(jax.jit(step, donate_argnums=0))
    told: dict[str, Any] = {}
    with jax.set_mesh(mesh):
        check = SDCCheck.Config(every=3).build(mesh=mesh)
        told["due"] = [step for step in range(1, 8) if check.due(step)]
        plain, checked = program(state(), batch), check.run(program, 3, state(), batch)
        told["same"] = jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), plain, checked))
        told["compiled"] = program.compiled
        for name, device in (("w", 5), ("scale", 2)):
            calls: list[int] = []

            def faulty(state: Any, batch: Any, name: str = name, device: int = device, calls: Any = calls) -> Any:
                new, metrics = program(state, batch)
                calls.append(1)
                if len(calls) == 2:
                    new["params"][name] = flipped(new["params"][name], device)
                return new, metrics

            try:
                check.run(faulty, 6, state(), batch)
            except CorruptionError as error:
                told[name] = [error.step, error.found, str(error)]
    return told
