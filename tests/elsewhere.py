"""Functions of test modules in processes of their own: what jax has fixed when it starts cannot be changed in ours.

The processes are forked from one that has imported what they need and no backend of jax, since imports take longer than
most of these functions.
"""

import atexit
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh.distributed import free_address
from tests import bounds

ROOT = Path(__file__).parents[1]
# None of them starts a thread of Python or opens a device.
_IMPORTED = ["pytest", "hypothesis", "jax", "flax.nnx", "optax", "rl.experiment", "rl.training.trainer"]

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(_IMPORTED)


def elsewhere(
    function: Callable[..., Any], *args: Any, timeout: float = 280, environ: Mapping[str, str] | None = None
) -> Any:
    """Return what a module's function returns in another process, with these environment variables and JAX on the CPU.

    Arguments and result travel as JSON. Variables of JAX itself (`JAX_...`) have no effect: it has been imported.
    """
    assert not any(name.startswith("JAX_") for name in environ or {}), "read when jax is imported, before the fork"
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", **(environ or {})}
    if flags := " ".join(filter(None, (given.get("XLA_FLAGS") for given in (os.environ, environ or {})))):
        variables["XLA_FLAGS"] = flags  # those of `make test-isa` and those of the test
    reader, writer = _forks.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile() as said, reader:
        call = (function.__module__, function.__name__, json.dumps(args))
        process = _forks.Process(target=_answer, args=(writer, said.name, variables, *call))
        process.start()
        writer.close()
        try:
            answered = reader.poll(timeout)
            answer = reader.recv() if answered else None
        except EOFError:  # it ended without an answer
            answered, answer = True, None
        if not answered:
            process.kill()
        process.join(60)
        words = Path(said.name).read_text(errors="replace")[-3000:]
        assert answered, f"{function.__name__} took more than {timeout} s\n{words}"
        assert answer is not None, f"{function.__name__} ended with exit status {process.exitcode}\n{words}"
        result, shares = answer
        bounds.add(shares)
        return json.loads(result)


def to_host(array: jax.Array) -> np.ndarray:
    """Return the complete array on this host; all processes that hold a part of it must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def _answer(writer: Connection, output: str, variables: dict[str, str], module: str, name: str, args: str) -> None:
    """Call the function in the new process, and send what it returns; all that is printed goes to a file."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ |= variables
    jax.config.update("jax_platforms", "cpu")
    bounds.install()
    try:
        answer = json.dumps(getattr(importlib.import_module(module), name)(*json.loads(args)))
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # a forked process runs none by itself; jax leaves other processes by one
    writer.send((answer, bounds.taken()))


def in_two_processes(function: Callable[..., Any], *args: Any, timeout: float = 600) -> list[Any]:
    """Return what `function(address, index, *args)` returns in each of two processes; they meet at `address`."""
    address = free_address()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(elsewhere, function, address, index, *args, timeout=timeout) for index in (0, 1)]
        return [call.result() for call in calls]
