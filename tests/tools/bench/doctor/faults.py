"""Checks that break as real ones do; the doctor's processes call them by name."""

import functools
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from tools.bench.doctor.checks import Finding


def fine(options: Mapping[str, Any]) -> Finding:
    return Finding("ok", f"process {os.getpid()}", "", {"options": dict(options)})


def killed(options: Mapping[str, Any]) -> Finding:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def crashed(options: Mapping[str, Any]) -> Finding:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def left(options: Mapping[str, Any]) -> Finding:
    print("a driver says goodbye", flush=True)
    os._exit(3)


def hangs(options: Mapping[str, Any]) -> Finding:
    """Hang with a child of its own, as a compiler's process would."""
    if child := os.fork():
        with open(options["pids"], "w") as file:
            file.write(f"{os.getpid()} {child}")
    time.sleep(600)
    raise AssertionError


def raises(options: Mapping[str, Any]) -> Finding:
    raise RuntimeError("INTERNAL: something of the driver\nand its screen of text")


def broken_attention(options: Mapping[str, Any]) -> Finding:
    """The real check, on a kernel whose rows lack their newest key: what an off-by-one in a mask computes."""
    from tools.bench.doctor import kernels

    right = kernels.attend

    def wrong(q: Any, k: Any, v: Any, *args: Any, **more: Any) -> Any:
        return right(q, k.at[:, 3].set(0), v, *args, **more)

    kernels.attend = wrong
    return kernels.attention(options)


def nan_head(options: Mapping[str, Any]) -> Finding:
    from tools.bench.doctor import kernels

    right = kernels.policy_statistics

    def wrong(x: Any, *args: Any) -> Any:
        return right(x.at[0, 0].set(float("nan")), *args)

    kernels.policy_statistics = wrong
    return kernels.policy_head(options)


def stuck_training(options: Mapping[str, Any]) -> Finding:
    """The real check, with a learning rate of zero: nothing is learnt."""
    from tools.bench.doctor import steps

    steps.__dict__["train_bench"] = functools.partial(steps.train_bench, learning_rate=0.0)
    return steps.sft_step(options)
