"""A train state that the devices cannot hold is refused with the arithmetic, before there is a run directory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.config import with_mesh_rules
from axlearn_like.operations import memory
from experiments.registry import get
from mesh import UserError, make_mesh
from mesh.devices import device_name


def test_a_model_that_is_too_large_for_this_machine_is_refused_before_anything_is_written(tmp_path: Path):
    cfg = with_mesh_rules(get("llama2_70b"), device_name())
    with pytest.raises(
        UserError, match=r"does not fit: parameters .* = [\d.]+ GiB, and each of the \d+ devices \(cpu\)"
    ):
        cfg.build().run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bytes_are_those_of_one_device_in_its_own_memory():
    mesh = make_mesh({"fsdp": -1})

    def described(rows: int, spec: PartitionSpec, kind: str | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, 4), jnp.float32, sharding=NamedSharding(mesh, spec, memory_kind=kind))

    rows = mesh.size * 8
    arrays = [described(rows, PartitionSpec("fsdp")), described(rows, PartitionSpec())]
    assert memory.bytes_of_device(arrays) == (8 + rows) * 16
    assert memory.bytes_of_device([*arrays, described(rows, PartitionSpec(), "pinned_host")]) == (8 + rows) * 16


def test_the_refusal_counts_gradients_and_stops_where_memory_does(monkeypatch: pytest.MonkeyPatch):
    mesh = make_mesh({})
    one = jax.ShapeDtypeStruct((1 << 20,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    state = {"params": {"w": one}, "opt_state": {"mu": one, "nu": one}}
    monkeypatch.setattr(memory, "device_memory", lambda device: 4 * (4 << 20))
    memory.check_state_fits(state, mesh)
    monkeypatch.setattr(memory, "device_memory", lambda device: 4 * (4 << 20) - 1)
    with pytest.raises(UserError, match="expected more devices"):
        memory.check_state_fits(state, mesh)
    monkeypatch.setattr(memory, "device_memory", lambda device: 3 * (4 << 20))
    memory.check_state_fits(state, mesh, {"w"})  # frozen: without a gradient
    monkeypatch.setattr(memory, "device_memory", lambda device: None)
    memory.check_state_fits(state, mesh)


def test_policies_are_counted_together_with_one_base_and_one_gradient(monkeypatch: pytest.MonkeyPatch):
    mesh, mib = make_mesh({}), 1 << 20
    base, own = (
        jax.ShapeDtypeStruct((size // 4,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        for size in (64 * mib, mib)
    )
    state = {"params": {"w": base, "lora": own}, "opt_state": {"mu": {"lora": own}, "nu": {"lora": own}}}
    adapters = 64 + 3 * (1 + 2) + 1  # MiB: a base once
    cases = [(("w",), 0, adapters), (("w",), 2, adapters + 2 * 3), (("w",), 4, adapters + 4 * 3)]
    for names, stacked, size in [*cases, ((), 0, 3 * (65 + 2) + 65)]:  # the last: three whole models
        frozen = [names] * 3 if names else ()
        monkeypatch.setattr(memory, "device_memory", lambda device, size=size: size * mib)
        memory.check_states_fit([state] * 3, mesh, frozen, stacked=stacked)
        monkeypatch.setattr(memory, "device_memory", lambda device, size=size: size * mib - 1)
        with pytest.raises(UserError, match=r"of 3 policies do not fit: .* = [\d.]+ GiB, and each .* fewer of them"):
            memory.check_states_fit([state] * 3, mesh, frozen, stacked=stacked)


def test_the_memory_of_a_cpu_is_its_share_of_the_machines():
    shares = {memory.device_memory(device) for device in jax.devices()}
    assert len(shares) == 1 and (shares.pop() or 0) > 1 << 28
