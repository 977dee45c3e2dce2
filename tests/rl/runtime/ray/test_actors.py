"""The actor of a role sets the variables of its process before anything reads them."""

import subprocess
import sys

from tests.rl.runtime.ray.command import ROOT

SCRIPT = """
import gc, sys
from rl.runtime.ray.actors import RoleHost
early = "jax" in sys.modules
try:
    RoleHost({"JAX_PLATFORMS": "nowhere"}, b"not a pickle")
except Exception as error:
    print(early, type(error).__name__)
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
import jax
print(jax.config.jax_platforms)
"""


def test_the_variables_of_a_role_are_set_before_jax_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False UnpicklingError", "True True", "nowhere"]
