import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.operations.recompilation import CompiledStep, RecompilationError, differences, signature
from tests.elsewhere import ROOT


@jax.jit
def step(state, batch):
    return {"w": state["w"] + jnp.sum(batch["x"], dtype=jnp.float32)}, {"n": jnp.sum(batch["y"])}


def state():
    return {"w": jnp.zeros(3)}


def batch(rows=4, dtype=jnp.float32):
    return {"x": jnp.ones((rows, 2), dtype), "y": jnp.ones(rows, jnp.int32)}


@pytest.fixture(scope="module")
def once():
    program = CompiledStep(step)
    program(state(), batch())
    return program


def test_calls_that_fit_are_computed_by_one_program(once):
    new, metrics = once(state(), batch())
    expected, _ = step(state(), batch())
    np.testing.assert_array_equal(new["w"], expected["w"])
    assert int(metrics["n"]) == 4 and once.compiled == 1


def test_a_change_is_refused_before_it_is_compiled_and_named(once):
    with pytest.raises(RecompilationError) as error:
        once(state(), batch(rows=6))
    told = str(error.value).splitlines()
    assert told[1:3] == ["  batch/x: shape (4, 2) -> (6, 2)", "  batch/y: shape (4,) -> (6,)"]
    assert "max_compilations" in told[-1]
    with pytest.raises(RecompilationError, match="batch/x: dtype float32 -> bfloat16\n"):
        once(state(), batch(dtype=jnp.bfloat16))
    with pytest.raises(RecompilationError, match="batch/y: missing\n"):
        once(state(), {"x": jnp.ones((4, 2))})
    with pytest.raises(RecompilationError, match="state/w: shape .* batch/z: no such array before|batch/z: no such"):
        once({"w": jnp.zeros(5)}, {**batch(), "z": jnp.zeros(1)})
    assert once.compiled == 1
    once(state(), batch())  # and it goes on


def test_so_many_shapes_as_are_allowed_are_compiled_once_each():
    told = []

    @contextlib.contextmanager
    def around():
        fields = {}
        yield fields
        told.append(fields)

    program = CompiledStep(step, allowed=2, around=around)
    for rows in (4, 6, 4, 6, 6):
        _, metrics = program(state(), batch(rows))
        assert int(metrics["n"]) == rows
    assert program.compiled == 2
    assert [fields["arguments"] > 0 for fields in told] == [True, True]
    with pytest.raises(RecompilationError, match=r"batch/x: shape \(\d, 2\) -> \(8, 2\)"):
        program(state(), batch(8))


def test_an_error_of_the_step_itself_stays_what_it_is():
    program = CompiledStep(jax.jit(lambda state, batch: state["nothing"]))
    with pytest.raises(KeyError, match="nothing"):
        program(state(), batch())


def test_weak_types_and_shardings_are_told():
    device = jax.devices()[0]
    first, second = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in (None, "pinned_host"))
    x = jax.device_put(np.ones(4, np.float32), first)
    before = signature(x, jnp.float32(2.0))
    assert differences(before, signature(x, jnp.asarray(2.0))) == []  # a weak type alone compiles nothing
    [sharding, weak] = differences(before, signature(jax.device_put(x, second), jnp.asarray(2.0)))
    assert sharding.startswith("state: sharding SingleDeviceSharding(") and "pinned_host" in sharding
    assert weak == "batch: weak_type False -> True"


SPREAD = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from axlearn_like.operations.recompilation import RecompilationError, CompiledStep
mesh = jax.make_mesh((2,), ("data",))
put = lambda *spec: jax.device_put(jnp.ones(4), NamedSharding(mesh, P(*spec)))
program = CompiledStep(jax.jit(lambda state, batch: state * batch))
program(put(), put("data"))
program(put(None), put("data"))  # another way to say the same
try:
    program(put(), put())
except RecompilationError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_batch_that_is_spread_another_way_is_named():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    words = [sys.executable, "-c", SPREAD]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **flags}, capture_output=True, text=True, check=True)
    assert "\n  batch: sharding P('data',) -> P()\n" in done.stdout.replace("PartitionSpec", "P")
