"""`axl convert`: checkpoints from and to Hugging Face's form."""

import json
import os
import re
import time
from pathlib import Path

import click

from axlearn_like.run.object_store import outgoing
from axlearn_like.run.progress import bytes_progress
from mesh.errors import UserError, printable
from mesh.imports import collect_rarely, no_blas_threads
from tools.experiment import AnyPath, LocalPath, text_options

_DTYPES = click.Choice(["float32", "bfloat16", "float16"])
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@click.group("convert")
def command() -> None:
    """Convert checkpoints from and to Hugging Face's form."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # bytes alone: no accelerator is taken
    no_blas_threads()
    collect_rarely()


@command.command("import")
@click.argument("source", type=AnyPath(path_type=Path))
@click.argument("target", type=AnyPath(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Type of the parameters; what layers compute with unrounded (norms, routers) is not rounded to bfloat16. "
    "Default: bfloat16 where the tensors are, else float32, so that nothing is lost.",
)
@click.option(
    "--adapter",
    type=LocalPath(path_type=Path),
    help="A directory of PEFT: its factors become LoRA layers around those of SOURCE.",
)
@click.option("--no-tokenizer", is_flag=True, help="Leave out the files of SOURCE's tokenizer and its chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def _import(
    source: Path,
    target: Path,
    dtype: str | None,
    adapter: Path | None,
    no_tokenizer: bool,
    as_json: bool,
) -> None:
    """Import SOURCE, a directory in Hugging Face's form or a safetensors file in one, as the directory TARGET.

    The model is the one that config.json describes. Everything is checked before anything is written; tensors are
    copied without holding them. TARGET can be served, exported, and named
    wherever a run starts from another; with --adapter it is exported by --merge or --adapter.
    """
    from axlearn_like.tokenizers.embedding import tokenizer_fault
    from models.huggingface.checkpoints.directory import HuggingFaceDirectory
    from models.huggingface.checkpoints.importing import import_checkpoint
    from models.huggingface.checkpoints.importing_adapter import with_adapter

    began = time.monotonic()
    found = HuggingFaceDirectory.open(source)
    if adapter is not None:
        found = with_adapter(found, adapter)
    if no_tokenizer:
        found = found.without_tokenizer()
    elif fault := tokenizer_fault(found.path, found.decoder.vocab_size):
        raise UserError(f"{fault}; put the model's own tokenizer there, or import the model alone with --no-tokenizer")
    for note in found.notes:
        click.echo(f"axl: warning: {printable(note)}", err=True)
    with bytes_progress("import") as progress, outgoing(target, "TARGET") as folder:
        done = import_checkpoint(found, folder, dtype=dtype, progress=progress)
    seconds = time.monotonic() - began
    if done.before:
        click.echo(f"finished before: {done.directory} is this import of {source}; nothing is written", err=as_json)
    if as_json:
        result = {"directory": str(done.directory), "architecture": found.architecture.name, "tensors": done.tensors}
        click.echo(json.dumps({**result, "bytes": done.nbytes, "seconds": seconds}))
        return
    click.echo(
        f"{done.directory}: {found.architecture.name}, {done.tensors} tensors, {done.nbytes / 1e9:.2f} GB in "
        f"{seconds:.1f} s"
    )


@command.command("export")
@text_options
@click.argument("source", type=AnyPath(path_type=Path))
@click.argument("target", type=AnyPath(path_type=Path))
@click.option(
    "--dtype",
    type=_DTYPES,
    help="Type of the tensors. Default: as imported, else as the checkpoint has the parameters. What layers compute "
    "with unrounded (norms, routers) is rounded to neither.",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    callback=lambda _, __, text: _size(text),
    help="Tensors beyond it go into further files, with an index.",
)
@click.option("--adapter", is_flag=True, help="Export the LoRA adapter alone, in PEFT's form.")
@click.option("--merge", is_flag=True, help="Add the LoRA adapter to the weights, and export a plain model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def _export(
    source: Path, target: Path, dtype: str | None, max_shard_size: int, adapter: bool, merge: bool, as_json: bool
) -> None:
    """Export SOURCE, a run or one step of it, as TARGET, a directory in Hugging Face's form.

    SOURCE is RUN (its newest weights), RUN@best, RUN@STEP, a checkpoint's path, or what `axl convert import` made.
    The tokenizer and the other files of a model that was imported are given back; else those of the run's tokenizer.
    """
    from experiments.start.exported import SavedModel

    began = time.monotonic()
    if adapter and merge:
        raise UserError("--adapter exports an adapter alone, --merge a model with it: expected one of them")
    saved = SavedModel.find(source)
    path = saved.params.path
    if adapter:
        with outgoing(target, "TARGET") as folder:
            nbytes, before = saved.export_adapter(folder)
        _say_before(before, target, as_json)
        if as_json:
            click.echo(json.dumps({"directory": str(target), "checkpoint": str(path), "bytes": nbytes}))
        else:
            click.echo(f"{target}: adapter of {nbytes / 1e6:.1f} MB, from {path}")
        return
    if merge and not saved.adapted:
        raise UserError(f"{source}: its model has no adapters, which --merge would add to the weights; leave it out")
    if not merge and saved.adapted:
        raise UserError(
            f"{source}: its model has layers with adapters; --adapter exports those alone, in PEFT's form, and --merge "
            "a plain model with them added"
        )
    with bytes_progress("export") as progress, outgoing(target, "TARGET") as folder:
        done = saved.export(folder, dtype=dtype, max_shard_size=max_shard_size, progress=progress)
    seconds = time.monotonic() - began
    _say_before(done.before, done.directory, as_json)
    if as_json:
        result = {"directory": str(done.directory), "architecture": done.architecture, "tensors": done.tensors}
        files = {"files": done.files, "checkpoint": str(path)}
        click.echo(json.dumps({**result, **files, "bytes": done.nbytes, "seconds": seconds}))
        return
    click.echo(
        f"{done.directory}: {done.architecture}, {done.tensors} tensors in {done.files} "
        f"{'file' if done.files == 1 else 'files'}, {done.nbytes / 1e9:.2f} GB in {seconds:.1f} s, from {path}"
    )


def _say_before(before: bool, target: Path, as_json: bool) -> None:
    if before:
        click.echo(f"finished before: {target} has these bytes; nothing is written", err=as_json)


def _size(text: str) -> int:
    """Return the bytes that a text such as 5GB means."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise click.BadParameter(f"expected a size such as 5GB or 500MB, got {text!r}")
    return max(1, int(float(found[1]) * _UNITS[found[2].upper()]))
