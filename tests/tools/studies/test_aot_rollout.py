"""The command of the study of rollout programs; what it compiles is tested in tests/rl/rollout/test_aot.py."""

import pytest
from click.testing import CliRunner

from mesh import UserError
from mesh.topology import compiler_version, find_compiler
from tests.elsewhere import elsewhere
from tools.studies.aot_rollout import main

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="the TPU compiler (libtpu) is not installed")


def refuse() -> list[str]:
    done = CliRunner().invoke(main, ["v9:2x2"])
    return [done.output, str(done.exception), type(done.exception).__name__]


@needs_compiler
def test_it_names_the_compiler_wherever_it_is_installed_and_refuses_an_unknown_topology():
    output, message, kind = elsewhere(refuse)
    assert f"libtpu {compiler_version()}," in output
    assert kind == UserError.__name__ and "no TPU generation 'v9'" in message
