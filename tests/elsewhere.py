"""Functions of test modules in processes of their own: what jax has fixed when it starts cannot be changed in ours."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mesh.distributed import free_address

ROOT = Path(__file__).parents[1]


def elsewhere(
    function: Callable[..., Any], *args: Any, timeout: float = 200, environ: Mapping[str, str] | None = None
) -> Any:
    """Return what a module's function returns in another process, with these environment variables and JAX on the CPU.

    Arguments and result travel as JSON.
    """
    module, name = function.__module__, function.__name__
    code = f"import json, sys, {module} as m; print(json.dumps(m.{name}(*json.loads(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(args)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def in_two_processes(function: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
    """Return what `function(address, index, *args)` returns in each of two processes; they meet at `address`."""
    address = free_address()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(elsewhere, function, address, index, *args, timeout=timeout) for index in (0, 1)]
        return [call.result() for call in calls]
