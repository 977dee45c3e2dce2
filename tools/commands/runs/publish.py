"""`axl publish RUN`: a run in one small file, from which anyone who has its data makes every rollout again."""

import json
from pathlib import Path

import click

from mesh.errors import printable
from tools.experiment import AnyPath, LocalPath, text_options


@click.command("publish")
@text_options
@click.argument("run", metavar="RUN", type=AnyPath(path_type=Path, exists=True, file_okay=False))
@click.option("--out", type=LocalPath(path_type=Path, dir_okay=False), help="Write this file.  [default: RUN.axlrun]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def command(run: Path, out: Path | None, as_json: bool) -> None:
    """Write the RL run RUN to one file: config, checksums of its data and weights, names and digests of rollouts.

    `axl verify run FILE` makes it again. The file holds the config as RUN has it, with the paths in it, and no prompt
    and no answer. Runs whose versions depend on time, environments that are not pure and judges are refused.
    """
    from axlearn_like.run.directory import RunDirectory
    from rl.runtime.published import publish

    directory = RunDirectory.attach(run)
    out = out or directory.path.with_name(f"{directory.path.name}.axlrun")
    made = publish(directory, out)
    rollouts, nbytes = len(made.entries()), out.stat().st_size
    ledger = sum(len(row.data) for row in made.rows.values())
    click.echo(
        printable(
            f"{out}: {len(made.rows)} updates, {rollouts} rollouts, {nbytes:,} bytes; "
            f"the ledger has {ledger / rollouts:.1f} bytes a rollout"
        )
    )
    if as_json:
        figures = {"updates": len(made.rows), "rollouts": rollouts, "bytes": nbytes}
        click.echo(json.dumps({"file": str(out), **figures, "bytes_per_rollout": round(ledger / rollouts, 2)}))
