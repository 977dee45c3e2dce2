"""`axl convert`: checkpoints from and to Hugging Face's form."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axlearn_like.run.bytes_progress import bytes_progress
from axlearn_like.run.object_store import outgoing
from mesh.errors import UserError, printable
from mesh.imports import collect_rarely, no_blas_threads
from tools.experiment import AnyPath, LocalPath, text_options

if TYPE_CHECKING:
    from axlearn_like.config import ConfigBase
    from axlearn_like.layers.decoder import Decoder
    from axlearn_like.run.directory import RunDirectory
    from axlearn_like.tokenizers.protocol import Tokenizer
    from models.huggingface.checkpoints.exporting import Entries

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
@click.option(
    "--link",
    is_flag=True,
    help="Leave the tensors in their files, of which TARGET gets hard links: no copy, no more space.",
)
@click.option("--no-tokenizer", is_flag=True, help="Leave out the files of SOURCE's tokenizer and its chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def _import(
    source: Path,
    target: Path,
    dtype: str | None,
    adapter: Path | None,
    link: bool,
    no_tokenizer: bool,
    as_json: bool,
) -> None:
    """Import SOURCE, a directory in Hugging Face's form or a safetensors file in one, as the directory TARGET.

    The model is the one that config.json describes. Everything is checked before anything is written; tensors are
    copied without holding them, and the same command goes on after a kill. With --link they stay in their files, which
    are read once; SOURCE may be deleted, and what is read later is compared with what it was. TARGET can be served,
    exported, and named wherever a run starts from another; with --adapter it is exported by --merge or --adapter.
    """
    from axlearn_like.tokenizers.embedding import tokenizer_fault
    from models.huggingface.checkpoints.directory import HuggingFaceDirectory
    from models.huggingface.checkpoints.importing import import_checkpoint
    from models.huggingface.checkpoints.linked import link_checkpoint
    from models.huggingface.checkpoints.with_adapter import with_adapter

    if link and (dtype is not None or adapter is not None):
        other = "--adapter" if dtype is None else "--dtype"
        raise UserError(f"--link leaves the tensors as they are in their files; {other} needs an import that copies")
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
        if link:
            done = link_checkpoint(found, folder, progress=progress)
        else:
            done = import_checkpoint(found, folder, dtype=dtype, progress=progress)
    seconds = time.monotonic() - began
    if done.before:
        click.echo(f"finished before: {done.directory} is this import of {source}; nothing is written", err=as_json)
    if as_json:
        result = {"directory": str(done.directory), "architecture": found.architecture.name, "tensors": done.tensors}
        click.echo(json.dumps({**result, "bytes": done.nbytes, "resumed_bytes": done.resumed, "seconds": seconds}))
        return
    resumed = f", {done.resumed / 1e9:.2f} GB of it before" if done.resumed else ""
    click.echo(
        f"{done.directory}: {found.architecture.name}, {done.tensors} tensors, {done.nbytes / 1e9:.2f} GB in "
        f"{seconds:.1f} s{resumed}"
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
    from axlearn_like.config import from_text
    from axlearn_like.layers.wrappers.base import plain_config
    from models.huggingface.checkpoints.exporting import Original, export_checkpoint
    from models.huggingface.checkpoints.merged import MergedParams
    from rl.serving.policy import find_run, newest_weights

    began = time.monotonic()
    run = find_run(source)
    if run is None:
        forms = "RUN, RUN@best, RUN@STEP or a checkpoint's path"
        raise UserError(f"{source}: expected {forms}, got none: it has no config.txt")
    cfg = from_text(run.read_config())
    decoder = _decoder(cfg, run)
    weights = newest_weights(run, source)
    params = _saved(run.path) if weights is None else _saved(weights.path)
    if adapter and merge:
        raise UserError("--adapter exports an adapter alone, --merge a model with it: expected one of them")
    if adapter:
        _export_adapter(params, decoder, target, _origin(cfg, run), as_json)
        return
    plain = plain_config(decoder)
    if merge and plain == decoder:
        raise UserError(f"{source}: its model has no adapters, which --merge would add to the weights; leave it out")
    if not merge and plain != decoder:
        raise UserError(
            f"{source}: its model has layers with adapters; --adapter exports those alone, in PEFT's form, and --merge "
            "a plain model with them added"
        )
    tokenizer, token_ids, template = _tokenizer(cfg)
    with bytes_progress("export") as progress, outgoing(target, "TARGET") as folder:
        done = export_checkpoint(
            MergedParams(params, decoder) if merge else params,
            plain,
            folder,
            original=Original.of(_origin(cfg, run)),
            dtype=dtype,
            max_shard_size=max_shard_size,
            token_ids=token_ids,
            tokenizer=tokenizer,
            template=template,
            progress=progress,
        )
    seconds = time.monotonic() - began
    _say_before(done.before, done.directory, as_json)
    if as_json:
        result = {"directory": str(done.directory), "architecture": done.architecture, "tensors": done.tensors}
        files = {"files": done.files, "checkpoint": str(params.path)}
        click.echo(json.dumps({**result, **files, "bytes": done.nbytes, "seconds": seconds}))
        return
    click.echo(
        f"{done.directory}: {done.architecture}, {done.tensors} tensors in {done.files} "
        f"{'file' if done.files == 1 else 'files'}, {done.nbytes / 1e9:.2f} GB in {seconds:.1f} s, from {params.path}"
    )


def _saved(path: Path) -> Entries:
    """Return the parameters of a checkpoint, or of what an import made."""
    from axlearn_like.checkpoint.arrays import SavedParams
    from models.huggingface.checkpoints.directory import LINKED, HuggingFaceDirectory
    from models.huggingface.checkpoints.linked import LinkedParams

    return LinkedParams(HuggingFaceDirectory.open(path)) if (path / LINKED).is_file() else SavedParams(path)


def _export_adapter(params: Entries, cfg: Decoder.Config, target: Path, base: Path | None, as_json: bool) -> None:
    from models.huggingface.checkpoints.exporting_adapter import export_adapter

    with outgoing(target, "TARGET") as folder:
        nbytes, before = export_adapter(params, cfg, folder, "" if base is None else str(base))
    _say_before(before, target, as_json)
    if as_json:
        click.echo(json.dumps({"directory": str(target), "checkpoint": str(params.path), "bytes": nbytes}))
    else:
        click.echo(f"{target}: adapter of {nbytes / 1e6:.1f} MB, from {params.path}")


def _say_before(before: bool, target: Path, as_json: bool) -> None:
    if before:
        click.echo(f"finished before: {target} has these bytes; nothing is written", err=as_json)


def _decoder(cfg: ConfigBase[Any], run: RunDirectory) -> Decoder.Config:
    """Return the decoder of a directory's config: an imported one's, a trainer's model, an experiment's policy."""
    from axlearn_like.layers.decoder import Decoder

    for found in (cfg, getattr(cfg, "policy", None), getattr(cfg, "model", None)):
        if isinstance(found, Decoder.Config):
            return found
    raise UserError(f"{run.path}: expected a run of a decoder, got {run.read_config().partition(chr(10))[0]}")


def _origin(cfg: ConfigBase[Any], run: RunDirectory) -> Path | None:
    """Return the directory of the model that a run began with, if it was in Hugging Face's form, or imported."""
    from axlearn_like.checkpoint.convert import StartFrom
    from axlearn_like.config import walk_configs
    from models.huggingface.checkpoints.directory import RECORD
    from rl.serving.policy import find_run

    starts = [Path(node.path) for _, node in walk_configs(cfg) if isinstance(node, StartFrom.Config)]
    for path in (run.path, *starts):
        imported = find_run(path)
        if imported is not None and (imported.path / RECORD).is_file():
            return imported.path
        if imported is None and path.is_dir():
            return path
    return None


def _tokenizer(cfg: ConfigBase[Any]) -> tuple[str | None, dict[str, Any], str | None]:
    """Return the path of an experiment's tokenizer, if it has files, its fields of `config.json`, its own template."""
    from axlearn_like.config import ConfigBase, walk_configs
    from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
    from axlearn_like.tokenizers.jinja_template import JinjaTemplate

    found = (getattr(node, "tokenizer", None) for _, node in walk_configs(cfg))
    tokenizer = next((each for each in found if isinstance(each, ConfigBase)), None)
    if tokenizer is None:
        return None, {}, None
    built: Tokenizer = tokenizer.build()
    ends = built.stop_ids
    ids = {"bos_token_id": built.bos, "eos_token_id": ends[0] if len(ends) == 1 else list(ends)}
    fields = {name: i for name, i in ids.items() if i is not None}
    if not isinstance(tokenizer, HuggingFaceTokenizer.Config):
        return None, fields, None
    own = JinjaTemplate.read(tokenizer.chat_template, {}).source if tokenizer.chat_template else None
    return tokenizer.path, fields, own


def _size(text: str) -> int:
    """Return the bytes that a text such as 5GB means."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise click.BadParameter(f"expected a size such as 5GB or 500MB, got {text!r}")
    return max(1, int(float(found[1]) * _UNITS[found[2].upper()]))
