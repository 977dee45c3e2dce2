"""Machines on which the sandbox has nothing to isolate code with."""

import pytest

from rl.verification.sandbox.sandbox import Sandbox, SandboxError


def skip_without_isolation(sandbox: Sandbox) -> None:
    """Start a sandbox, or skip where code cannot be isolated. Any other failure of it is a failure of the test."""
    try:
        assert sandbox.isolation in ("namespaces, seccomp", "landlock, seccomp")
    except SandboxError as error:
        if "cannot be isolated on this machine" not in str(error):
            raise
        pytest.skip(str(error))
