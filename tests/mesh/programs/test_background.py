"""Work in the background: its result, its error, and the end of a process beside a compilation."""

import os
import subprocess
import sys
import time
from contextvars import ContextVar

import pytest

from mesh.programs.background import in_background

_NAME: ContextVar[str] = ContextVar("name", default="none")

COMPILES = """
import sys
import jax, jax.numpy as jnp
from mesh.programs.background import in_background, leave

def long(x):
    for number in range(60):
        x = (jnp.sin(x @ x + number) / (1 + jnp.abs(x))).at[number].set(number)
    return x

in_background(lambda: jax.jit(long).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile())
while len(sys._current_frames()) < 2:
    pass
"""
SLEEPS = (
    "from mesh.programs.background import in_background, leave\nimport time\nin_background(lambda: time.sleep(600))\n"
)


def ended(code: str) -> int:
    environ = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}  # else nothing is left to compile
    return subprocess.run([sys.executable, "-c", code], env=environ, timeout=120, check=False).returncode


def test_the_result_or_the_error_is_waited_for_within_the_context_of_the_caller():
    token = _NAME.set("caller")
    wait = in_background(lambda: (time.sleep(0.05), _NAME.get()))
    _NAME.reset(token)
    assert wait() == (None, "caller") and wait() == (None, "caller")
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0)()


def test_a_process_leaves_at_once_with_its_status_where_work_goes_on():
    assert ended(SLEEPS + "print('x')\nleave(7)") == 7
    assert ended("from mesh.programs.background import in_background, leave\nin_background(int)()\nleave(7)") == 0


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_an_interpreter_that_ends_beside_a_compilation_does_not_crash(seconds: float):
    assert ended(COMPILES + f"import time\ntime.sleep({seconds})") == 0
