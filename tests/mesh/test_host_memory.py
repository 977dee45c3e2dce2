import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, jax, jax.numpy as jnp
from mesh.devices import keep_step_memory
keep_step_memory()
step = jax.jit(lambda x: jax.lax.optimization_barrier(x * 2).sum())
x = jnp.zeros(2**24)  # 64 MB
def run(): jax.block_until_ready(step(x))
for _ in range(8): run()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8): run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_the_memory_of_a_step_serves_the_next_one():
    """Given back to the kernel, 64 MB are 16,384 page faults in each of 8 steps."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < 2 * 16384
