"""Benchmarks of supervised training, its input, and checkpoints from Hugging Face's form."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from tools.commands.bench.group import command
from tools.commands.bench.options import (
    json_option,
    names_in,
    peers_option,
    progress,
    quick_option,
    report,
    steps_option,
)
from tools.experiment import LocalPath


@command.command(name="train_step")
@peers_option("maxtext")
@steps_option
@quick_option
@json_option
def train_step(peers: str, steps: int, quick: bool, as_json: bool) -> None:
    """CPU seconds of a supervised train step beside plain JAX, of its dispatch, and from start to first step.

    Peers run in virtual environments of their own, which the first use installs.
    """
    from tools.bench.harness.environments import find_peers
    from tools.bench.train_step import benchmark as bench

    asked = find_peers(names_in(peers), bench.BENCHMARK)
    with progress() as say:
        result = bench.run(asked, steps, say, quick=quick)
    report(result, as_json, failed=bool(result["errors"]))


@command.command(name="sft_step")
@peers_option("trl")
@steps_option
@quick_option
@json_option
def sft_step(peers: str, steps: int, quick: bool, as_json: bool) -> None:
    """CPU seconds of a small step of supervised fine-tuning, from the same parameters and tokens as the peer's.

    Peers run in virtual environments of their own, which the first use installs.
    """
    _post_training("sft", peers, steps, quick, as_json)


@command.command(name="dpo_step")
@peers_option("trl")
@steps_option
@quick_option
@json_option
def dpo_step(peers: str, steps: int, quick: bool, as_json: bool) -> None:
    """CPU seconds of a small step of DPO, from the same parameters and tokens as the peer's.

    Peers run in virtual environments of their own, which the first use installs.
    """
    _post_training("dpo", peers, steps, quick, as_json)


def _post_training(kind: Literal["sft", "dpo"], peers: str, steps: int, quick: bool, as_json: bool) -> None:
    from tools.bench.harness.environments import find_peers
    from tools.bench.train_step.post_training import benchmark as bench

    asked = find_peers(names_in(peers), f"{kind}_step")
    with progress() as say:
        result = bench.run(kind, asked, steps, say, quick=quick)
    report(result, as_json, failed=bool(result["errors"]))


@command.command(name="input")
@click.option(
    "--documents", default=5000, show_default=True, type=click.IntRange(min=1), help="Documents to make and pack."
)
@json_option
def input_(documents: int, as_json: bool) -> None:
    """Tokens of training input per CPU second: tokenising, and packing in each way."""
    from tools.bench.input import benchmark as bench

    report(bench.run(documents), as_json, failed=False)


@command.command(name="import")
@click.option("--size", type=click.Choice(["0.6B", "3B", "8B"]), default="3B", show_default=True, help="Parameters.")
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds of a read and an import each."
)
@click.option(
    "--folder", type=LocalPath(path_type=Path, exists=True, file_okay=False), help="A folder on the disk to measure."
)
@quick_option
@json_option
def import_(size: str, rounds: int, folder: Path | None, quick: bool, as_json: bool) -> None:
    """Speed of `axl convert import`, with and without --link, beside a plain read of the same files; its peak memory.

    Needs twice the bytes of the model on the disk (8B: 32 GB).
    """
    from tools.bench.checkpoint_import import benchmark as bench

    with progress() as say:
        result = bench.run(size, rounds, say, folder=folder, quick=quick)
    report(result, as_json, failed=bool(result["errors"]))


@command.command(name="first_token")
@peers_option("transformers")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds of each.")
@click.option("--link", is_flag=True, help="Import by --link.")
@quick_option
@json_option
def first_token(peers: str, rounds: int, link: bool, quick: bool, as_json: bool) -> None:
    """Seconds from `axl convert import` of a model of 0.5B parameters to the first token of `axl serve`.

    The first turn compiles (`cold`); the others find its programs in the cache. Peers load the same files and generate.
    """
    from tools.bench.checkpoint_import import first_token as bench
    from tools.bench.harness.environments import find_peers

    asked = find_peers(names_in(peers), bench.BENCHMARK)
    with progress() as say:
        result = bench.run(asked, rounds, say, link=link, quick=quick)
    report(result, as_json, failed=bool(result["errors"]))
