"""`axl worker RUN_DIR`: join an active run as an elastic rollout worker."""

from __future__ import annotations

from pathlib import Path

import click

from tools.experiment import LocalPath, text_options


@click.command("worker")
@text_options
@click.argument("run_dir", type=LocalPath(path_type=Path))
@click.option("--name", help="Name in events and reports.  [default: elastic-HOST-PID]")
def command(run_dir: Path, name: str | None) -> None:
    """Join the run that `axl rl` drives in RUN_DIR as one more rollout worker.

    It runs on this machine, or on another of the run's Ray cluster where RUN_DIR is visible. The results do not depend
    on it. Ctrl-C or SIGTERM hands back its work; otherwise it ends with the run.
    """
    from axlearn_like.run.directory import RunDirectory
    from mesh.programs.compilation import enable_compilation_cache
    from rl.runtime.cluster_file import read_cluster

    read_cluster(RunDirectory.attach(run_dir))  # sets Ray's token, which Ray reads when it is imported
    from rl.runtime.ray.elastic_workers import run_elastic_worker

    enable_compilation_cache()
    run_elastic_worker(run_dir, name, click.echo)
