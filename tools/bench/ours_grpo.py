"""Our own stack as a benchmark worker: the experiment `grpo_bench`, all roles in this process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from tools.bench.grpo_job import GrpoJob
from tools.bench.step_protocol import StepServer


def build_step(job: GrpoJob) -> tuple[Callable[[StepServer, int], None], int]:
    """Builds the stack for `job`.

    Returns:
        The function that runs step `index` to its end (parameters ready, inside it
        `server.generation()` around sampling and one `server.record(tokens, reward)`), and the
        number of parameters.
    """
    raise NotImplementedError(f"experiment 'grpo_bench' is not wired to the benchmark yet: {job}")


def _version() -> str:
    try:
        return f"axlearn-like {version('axlearn-like')}"
    except PackageNotFoundError:
        return "axlearn-like (source tree)"


def main() -> None:
    """Runs steps on request until told to stop."""
    step, parameters = build_step(GrpoJob())
    server = StepServer(_version(), parameters)
    server.begin()
    index = 0
    step(server, index)
    while server.step_done():
        index += 1
        step(server, index)


if __name__ == "__main__":
    main()
