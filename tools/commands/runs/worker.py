"""`axl worker RUN`: join an active run as an elastic rollout worker."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from tools.experiment import LocalPath, text_options


def _write_plugin(ctx: click.Context, _: click.Parameter, folder: Path | None) -> None:
    if folder is None:
        return
    from rl.parameter_server.pull.vllm.mirror import write_plugin

    write_plugin(folder)
    transfer = """--weight-transfer-config '{"backend": "axl"}'"""
    click.echo(f"VLLM_SERVER_DEV_MODE=1 PYTHONPATH={folder.absolute()} vllm serve MODEL {transfer}")
    ctx.exit()


@click.command("worker")
@text_options
@click.option(
    "--vllm-plugin",
    type=LocalPath(path_type=Path, file_okay=False),
    callback=_write_plugin,
    is_eager=True,
    expose_value=False,
    help="Write the plugin of vLLM servers into this folder, print how to start one, and exit.",
)
@click.argument("run_dir", metavar="RUN", type=LocalPath(path_type=Path, exists=True, file_okay=False))
@click.option("--name", help="Name in events and reports.  [default: elastic-HOST-PID]")
@click.option("--vllm", metavar="URL", help="Keep the vLLM server there at the run's newest weights; draw nothing.")
@click.option(
    "--vllm-folder",
    type=LocalPath(path_type=Path, file_okay=False, exists=True),
    default=Path("/dev/shm"),
    show_default=True,
    help="Folder that both processes read, with room for the model.",
)
def command(run_dir: Path, name: str | None, vllm: str | None, vllm_folder: Path) -> None:
    """Join the run that `axl rl` drives in RUN as one more rollout worker.

    It runs on this machine, or on another of the run's Ray cluster where RUN is visible. The results do not depend
    on it. Ctrl-C or SIGTERM hands back its work; otherwise it ends with the run.
    """
    from axlearn_like.run.directory import RunDirectory
    from mesh.programs.compilation import enable_compilation_cache
    from rl.runtime.cluster_file import read_cluster

    read_cluster(RunDirectory.attach(run_dir))  # sets Ray's token, which Ray reads when it is imported
    from rl.runtime.ray.elastic_workers import run_elastic_worker

    enable_compilation_cache()
    make = None if vllm is None else partial(_mirror, vllm, vllm_folder)
    run_elastic_worker(run_dir, name, click.echo, make)


def _mirror(url: str, folder: Path, cfg: Any, weights: Any) -> Any:
    from models.huggingface.convert import expected_tensors, to_huggingface
    from rl.parameter_server.pull.vllm.mirror import Mirror, Sent, VllmServer

    def say(sent: Sent) -> None:
        seconds = f"pull {sent.pull:.2f} s, write {sent.write:.2f} s, pause {sent.pause:.2f} s"
        click.echo(f"{url}: version {sent.label}, {sent.bytes / 1e6:,.1f} MB; {seconds}")

    expected_tensors(cfg.policy)  # refuses what has no form of Hugging Face's
    return Mirror(weights, partial(to_huggingface, cfg=cfg.policy, tied=True), VllmServer(url), folder, say)
