"""`axl worker RUN_DIR`: one more rollout worker for a run that goes on."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("worker")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--name", help="What it is called in events and reports.  [default: elastic-HOST-PID]")
def command(run_dir: Path, name: str | None) -> None:
    """Join the run that `axl rl` drives in RUN_DIR as one more rollout worker.

    On this machine, or on another of the run's Ray cluster that sees RUN_DIR. The results do not depend on it. Ctrl-C
    or SIGTERM hands back what it has in hand; it ends with the run.
    """
    from mesh.compilation import enable_compilation_cache
    from rl.runtime.ray.elastic_workers import run_elastic_worker

    enable_compilation_cache()
    run_elastic_worker(run_dir, name, click.echo)
