"""`axl data`: what is made of text before training."""

from __future__ import annotations

import time
from pathlib import Path

import click

from mesh.errors import UserError


@click.group("data")
def command() -> None:
    """Prepare the data of a training run."""


@command.command("train-tokenizer")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--vocab-size", type=int, required=True, help="Ids at most: 256 bytes, 3 special tokens, and merges.")
@click.option(
    "--out", "directory", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory to write."
)
@click.option(
    "--field", "fields", multiple=True, metavar="NAME", help="Field of each JSON line with a text. May be repeated."
)
@click.option("--quiet", is_flag=True, help="No progress on the terminal.")
def train_tokenizer(
    files: tuple[Path, ...], vocab_size: int, directory: Path, fields: tuple[str, ...], quiet: bool
) -> None:
    """Train a small byte-level BPE on FILES: .txt, .jsonl, and either with .gz.

    The directory gets tokenizer.json and tokenizer_config.json, which transformers and HuggingFaceTokenizer read. The
    same files in the same order give the same tokenizer.
    """
    from axlearn_like.input.text_files import read_texts
    from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
    from axlearn_like.tokenizers.train import train_bpe, write_tokenizer

    if (directory / "tokenizer.json").exists():
        raise UserError(f"{directory} has a tokenizer.json already; name another directory, or remove it")
    began, read = time.monotonic(), [0]

    def count(size: int) -> None:
        read[0] += size

    tokenizer = train_bpe(read_texts(files, fields, count), vocab_size, progress=not quiet)
    write_tokenizer(tokenizer, directory)
    built = HuggingFaceTokenizer.Config(path=str(directory)).build()
    if built.vocab_size < vocab_size:
        click.echo(f"the text has no more than {built.vocab_size} tokens to give", err=True)
    click.echo(
        f"{directory}: {built.vocab_size} tokens from {read[0] / 1e6:.2f} MB of text in "
        f"{time.monotonic() - began:.1f} s; use it by HuggingFaceTokenizer.Config(path={str(directory)!r})"
    )
