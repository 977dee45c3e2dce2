"""`axl data`: a tokenizer for texts, and curation of rows, before training."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from mesh.errors import UserError, printable
from tools.commands import options_as
from tools.experiment import LocalPath, Number

if TYPE_CHECKING:
    from rl.tasks.curation.checks import Check

_PATH = LocalPath(path_type=Path, dir_okay=False)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of files, the field with their text, and the files that a pass over them writes."""

    files: tuple[str, ...]
    field: str
    out: Path
    report: Path | None
    removed: Path | None


@click.group("data")
def command() -> None:
    """Prepare the data of a training run."""


@command.command("train-tokenizer")
@click.argument("files", nargs=-1, required=True, type=LocalPath(path_type=Path))
@click.option("--vocab-size", type=int, required=True, help="Ids at most: 256 bytes, 3 special tokens, and merges.")
@click.option(
    "--out", "directory", type=LocalPath(path_type=Path, file_okay=False), required=True, help="Directory to write."
)
@click.option(
    "--field", "fields", multiple=True, metavar="NAME", help="Field of each row with a text. May be repeated."
)
@click.option("--quiet", is_flag=True, help="No progress on the terminal.")
def train_tokenizer(
    files: tuple[Path, ...], vocab_size: int, directory: Path, fields: tuple[str, ...], quiet: bool
) -> None:
    """Train a small byte-level BPE on FILES: lines of .txt, or rows (JSON lines, CSV, Parquet, ...); also .gz.

    The directory gets tokenizer.json and tokenizer_config.json, which transformers and HuggingFaceTokenizer read. The
    same files in the same order give the same tokenizer.
    """
    from axlearn_like.input.rows.tables import read_texts
    from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
    from axlearn_like.tokenizers.train import Texts, train_bpe, trained_before, write_tokenizer

    began, names = time.monotonic(), tuple(map(str, files))
    use = f"use it by HuggingFaceTokenizer.Config(path={str(directory)!r})"
    if trained_before(Texts(read_texts(names, fields)), vocab_size, directory):
        click.echo(f"finished before: {directory} is the tokenizer of these texts; nothing is written; {use}")
        return
    texts = Texts(read_texts(names, fields))
    tokenizer = train_bpe(texts, vocab_size, progress=not quiet and sys.stderr.isatty())
    write_tokenizer(tokenizer, directory, texts.recipe(vocab_size))
    built = HuggingFaceTokenizer.Config(path=str(directory)).build()
    if built.vocab_size < vocab_size:
        click.echo(f"the text has no more than {built.vocab_size} tokens to give", err=True)
    click.echo(
        f"{directory}: {built.vocab_size} tokens from {texts.characters / 1e6:.2f} million characters in "
        f"{time.monotonic() - began:.1f} s; {use}"
    )


def _rows_options[F: Callable[..., Any]](function: F) -> F:
    """Add what every pass over rows takes: FILES, --field, --out, --report, --removed."""
    function = cast(F, options_as(rows=Rows)(function))
    for decorate in (
        click.option("--removed", type=_PATH, help="File for the rows that go, each with its reason."),
        click.option("--report", type=_PATH, help="File for the report.  [default: OUT.report.json]"),
        click.option("--out", type=_PATH, required=True, help="File to write: .jsonl or .jsonl.gz."),
        click.option("--field", default="prompt", show_default=True, metavar="NAME", help="Field with the text."),
        click.argument("files", nargs=-1, required=True),
    ):
        function = decorate(function)
    return function


@command.command("filter")
@_rows_options
@click.option("--shortest", type=click.IntRange(0), default=1, show_default=True, help="Least characters of a text.")
@click.option("--longest", type=click.IntRange(1), help="Most characters of a text.")
@click.option("--require", "required", multiple=True, metavar="NAME", help="Field that must not be empty.")
@click.option("--match", multiple=True, metavar="NAME=REGEX", help="Keep rows in whose field this is found.")
@click.option("--drop", multiple=True, metavar="NAME=REGEX", help="Remove rows in whose field this is found.")
@click.option("--between", multiple=True, metavar="NAME=LOW..HIGH", help="Keep rows whose number is in the bounds.")
def filter_rows(
    rows: Rows,
    shortest: int,
    longest: int | None,
    required: tuple[str, ...],
    match: tuple[str, ...],
    drop: tuple[str, ...],
    between: tuple[str, ...],
) -> None:
    """Keep the rows of FILES that meet all conditions."""
    from rl.tasks.curation.checks import Filter

    bounds = [(name, _bounds(name, text)) for name, text in _pairs("--between", between)]
    check = Filter(
        field=rows.field,
        shortest=shortest,
        longest=longest,
        required=required,
        match=_pairs("--match", match),
        drop=_pairs("--drop", drop),
        between=bounds,
    )
    _curate(rows, check)


@command.command("dedup")
@_rows_options
@click.option("--threshold", type=Number(0.5, 1.0), default=0.8, show_default=True, help="Jaccard similarity.")
@click.option("--words", type=click.IntRange(1), default=3, show_default=True, help="Words of a shingle.")
def dedup(
    rows: Rows,
    threshold: float,
    words: int,
) -> None:
    """Remove rows of FILES whose text an earlier row has, or nearly (MinHash)."""
    from rl.tasks.curation.checks import Duplicates

    _curate(rows, Duplicates(field=rows.field, threshold=threshold, n=words))


@command.command("decontaminate")
@_rows_options
@click.option("--against", multiple=True, required=True, metavar="NAME=FILE", help="Questions of an evaluation.")
@click.option("--words", type=click.IntRange(2), default=8, show_default=True, help="Words of a run (n-gram).")
@click.option(
    "--share",
    type=Number(0.0, 1.0),
    default=0.5,
    show_default=True,
    help="Least share of a question's runs of words that match.",
)
@click.option(
    "--question", "questions", multiple=True, default=("prompt", "question"), metavar="NAME", help="Their fields."
)
def decontaminate(
    rows: Rows,
    against: tuple[str, ...],
    words: int,
    share: float,
    questions: tuple[str, ...],
) -> None:
    """Remove rows of FILES that hold a question of an evaluation."""
    from rl.tasks.curation.checks import Contamination
    from rl.tasks.curation.passes import read_all

    evaluations = [(name, read_all([file])) for name, file in _pairs("--against", against, "FILE")]
    check = Contamination(evaluations, fields=questions, field=rows.field, n=words, share=share)
    _curate(rows, check)


@command.command("split")
@click.argument("files", nargs=-1, required=True)
@click.option("--field", default="prompt", show_default=True, metavar="NAME", help="Field with the text, or the date.")
@click.option(
    "--every", type=click.IntRange(2), help="Put one text in N into the test set, by a hash (as TaskMixture does)."
)
@click.option("--from", "first", metavar="DATE", help="Rows from this day on are the test.")
@click.option("--train", type=_PATH, required=True, help="File to write.")
@click.option("--test", type=_PATH, required=True, help="File to write.")
def split_rows(
    files: tuple[str, ...], field: str, every: int | None, first: str | None, train: Path, test: Path
) -> None:
    """Divide the rows of FILES into train and test, by text or by date."""
    from rl.tasks.curation.passes import read_all, split, split_by_date, split_by_text

    if (every is None) == (first is None):
        raise UserError("name one of --every (by text) and --from (by date)")
    rule = split_by_text(field, every) if every is not None else split_by_date(field, first or "")
    _check_outputs(files, train, test)
    counts = split(read_all(files), rule, {"train": train, "test": test})
    click.echo(f"{counts['read']} rows: {counts['train']} in {train}, {counts['test']} in {test}")


@command.command("difficulty")
@click.argument("file")
@click.option(
    "--task", default="rows", show_default=True, metavar="NAME", help="gsm8k, or rows: with questions and answers."
)
@click.option("--policy", required=True, metavar="NAME", help="A run or a model that answers, as for `axl eval`.")
@click.option("--samples", type=click.IntRange(1), default=8, show_default=True, help="Answers to each row.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draws.")
@click.option("--work", type=LocalPath(path_type=Path), help="Folder of the answers.  [default: OUT.samples]")
@click.option("--out", type=_PATH, required=True, help="File to write: .jsonl or .jsonl.gz.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change a field of the policy's config.")
@click.option("--random-weights", "untrained", is_flag=True, help="Sample an untrained policy.")
def difficulty(file: str, task: str, policy: str, work: Path | None, out: Path, **drawing: Any) -> None:
    """Add `pass_rate` and `samples` to the rows of FILE, from a policy's answers; resumed like `axl eval`.

    Then `axl data filter --between pass_rate=0.1..0.9`. Rows whose prompt is too long for the policy have none.
    """
    from experiments.datasets import find_dataset
    from rl.evaluation.difficulty import with_pass_rates
    from rl.tasks.rows.datasets import rows
    from rl.tasks.rows.task_rows import found_columns
    from tools.commands.eval import Drawing, evaluate_policy

    folder = work or out.with_name(f"{out.name}.samples")
    _check_outputs((file,), out)
    evaluate_policy(policy, (f"{task}={file}",), folder, Drawing(**drawing))
    published = find_dataset(task)
    cfg = (rows if published is None else published.rows)(file)
    columns = cfg.columns or found_columns(cfg.rows.build(), task)
    counts = with_pass_rates(file, folder, columns.build(), out)
    click.echo(f"{counts['rows']} rows, {counts['rated']} with a pass rate (mean {counts['mean']:.3f}): {out}")


def _check_outputs(files: Iterable[str], *outs: Path | None) -> None:
    """Refuse to write over what is read, or one file over the other (UserError)."""
    from axlearn_like.input.rows.tables import find_tables

    read = {path.resolve() for path in find_tables(tuple(files))}
    written: set[Path] = set()
    for out in outs:
        if out is not None and out.resolve() in read | written:
            raise UserError(f"{out} is read, or written twice; name another file, so that no row is lost")
        written |= {out.resolve()} if out is not None else set()


def _curate(rows: Rows, check: Check) -> None:
    from rl.tasks.curation.passes import curate, read_all

    path = rows.report or rows.out.with_name(f"{rows.out.name}.report.json")
    _check_outputs(rows.files, rows.out, path, rows.removed)
    found = curate(read_all(rows.files), [check], rows.out, removed=rows.removed)
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    click.echo(f"{found['kept']} of {found['read']} rows in {rows.out}; report: {path}")
    for reason, count in sorted(found["removed"].items(), key=lambda pair: -pair[1]):
        first = found["examples"][reason][0]
        click.echo(printable(f"  {count} {reason}, such as {first['where']} ({first['detail']})"))


def _pairs(option: str, given: tuple[str, ...], kind: str = "VALUE") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            from experiments.datasets import with_name

            such = f", such as {with_name(text)}" if kind == "FILE" and not equals else ""
            raise UserError(f"{option} {text!r}: expected NAME={kind}{such}")
        pairs.append((name, value))
    return pairs


def _bounds(name: str, text: str) -> tuple[float, float]:
    low, _, high = text.partition("..")
    try:
        return float(low or "-inf"), float(high or "inf")
    except ValueError:
        raise UserError(f"--between {name}={text}: expected LOW..HIGH, such as 0.1..0.9") from None
