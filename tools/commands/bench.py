"""`axl bench NAME`: measure our stack, and peers on the same job, in one run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import click

from mesh.errors import UserError, did_you_mean
from tools.bench.rollout.sections import SECTIONS
from tools.bench.weights.sections import SECTIONS as WEIGHTS_SECTIONS

RL_UPDATE_SECTIONS = ("packing", "shared_prefix")


class BenchmarkGroup(click.Group):
    """A group that suggests the nearest name for an unknown benchmark."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the benchmark of this name."""
        if cmd_name not in self.commands:
            hint = did_you_mean(cmd_name, self.commands)
            raise UserError(f"there is no benchmark {cmd_name!r}{hint}")
        return self.commands[cmd_name]


@click.group(name="bench", cls=BenchmarkGroup)
def command() -> None:
    """Measure our stack, and peers on the same job, in one run.

    The exit status is 1 if anything that was asked for could not be measured; the rest is reported.
    """


_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
_quick = click.option("--quick", is_flag=True, help="Tiny jobs: shows that all runs, measures nothing.")
_steps = click.option("--steps", default=10, show_default=True, type=click.IntRange(min=1), help="Measured steps.")


def _peers(names: str) -> Callable[[Any], Any]:
    return click.option("--peers", default="", help=f"Comma-separated peers to take turns with: {names}.")


def _sections(names: Iterable[str], but: str) -> Callable[[Any], Any]:
    words = f"Comma-separated parts to measure, of {', '.join(names)}; default: all but {but}."
    return click.option("--sections", default="", help=words)


@command.command(name="verify")
@_quick
@_json
def verify(quick: bool, as_json: bool) -> None:
    """Checks of mathematics and tests of code a second, attacks on the sandbox, and the seconds to reap a hang."""
    from tools.bench.verify import benchmark as bench

    figures = bench.measure(checks=60, tests=10) if quick else bench.measure()
    for name, value in figures.items():
        click.echo(f"{name:32} {value}")
    if as_json:
        click.echo(json.dumps(figures))
    if figures["attacks_survived"] < figures["attacks"] or any(figures["self_test_mistakes"].values()):
        raise UserError("an attack got through, or a verifier failed its self-test")


@command.command(name="kernels")
@click.option("--topologies", default="", help="Comma-separated; default: v5e:2x2, v5p:2x2x1, v6e:2x2.")
@_quick
@_json
def kernels(topologies: str, quick: bool, as_json: bool) -> None:
    """Errors of the kernels against float64, simulated; temporary memory and copies by the TPU compiler."""
    from tools.bench.kernels import benchmark as bench

    with _progress() as say:
        result = bench.run([] if quick else _names(topologies) or bench.TOPOLOGIES, say)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="block_sizes")
@click.option("--kv-heads", default=8, show_default=True, type=click.IntRange(min=1), help="Of one device.")
@click.option("--per-head", default=4, show_default=True, type=click.IntRange(min=1), help="Query heads of each.")
@click.option("--width", default=128, show_default=True, type=click.IntRange(min=1), help="Of a head.")
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens of a page.")
@click.option("--rows", default=64, show_default=True, type=click.IntRange(min=1), help="Sequences that decode.")
@click.option("--keys", default=4096, show_default=True, type=click.IntRange(min=64), help="Tokens of each.")
@click.option("--vmem-mib", type=click.IntRange(min=1), help="Limit of vector memory; default: the compiler's.")
@click.option("--topology", default="", help="A TPU that is not here: what the compiler says, without times.")
@click.option("--table", type=click.Path(path_type=Path, dir_okay=False), help="A table for the fastest; made if new.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Turns of each candidate.")
@_quick
@_json
def block_sizes(
    kv_heads: int,
    per_head: int,
    width: int,
    page_size: int,
    rows: int,
    keys: int,
    vmem_mib: int | None,
    topology: str,
    table: Path | None,
    rounds: int,
    quick: bool,
    as_json: bool,
) -> None:
    """Time block sizes of paged attention on the TPU of this machine, and write the fastest into a table for engines.

    Candidates that disagree with XLA there are refused. With --topology nothing is timed or written.
    """
    from tools.bench.kernels import tune
    from tools.bench.kernels.candidates import Job

    job = Job(kv_heads, per_head, width, page_size, rows=rows, keys=keys, vmem_mib=vmem_mib)
    tune.check(topology, table, quick=quick)
    with _progress() as say:
        if topology:
            result = tune.compiled(topology, job, say)
        else:
            result = tune.timed(tune.QUICK if quick else job, 1 if quick else rounds, say, table)
    _report(result, as_json, failed=False)


@command.command(name="episodes")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Measured rounds.")
@_quick
@_json
def episodes(rounds: int, quick: bool, as_json: bool) -> None:
    """Tokens a second of episodes with tools, beside a loop that waits for its tools; prefixes that are reused."""
    from tools.bench.episodes import benchmark as bench

    small = {"rounds": 1, "rows": 4, "turns": 4, "action": 16, "dim": 192, "layers": 2}
    _report(bench.run(**small) if quick else bench.run(rounds), as_json, failed=False)


@command.command(name="grpo_step")
@_peers("tunix,trl")
@_steps
@_json
def grpo_step(peers: str, steps: int, as_json: bool) -> None:
    """CPU seconds of one small GRPO step on this machine.

    Peers run in virtual environments of their own, which the first use installs.
    """
    from tools.bench.grpo import benchmark as bench
    from tools.bench.harness.environments import find_peers

    asked = find_peers(_names(peers), bench.BENCHMARK)
    with _progress() as say:
        result = bench.run(asked, steps, say)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="grpo_reward")
@_peers("tunix,trl")
@click.option("--steps", default=60, show_default=True, type=click.IntRange(min=5), help="Updates of each run.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), help="Runs of each system.")
@_json
def grpo_reward(peers: str, steps: int, seeds: int, as_json: bool) -> None:
    """Steps to the rewards that peers reach on the small GRPO job, from the same initial weights; nothing is timed."""
    from tools.bench.grpo import reward as bench
    from tools.bench.harness.environments import find_peers

    asked = find_peers(_names(peers), "grpo_step")
    with _progress() as say:
        result = bench.run(asked, steps, seeds, say)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="rollout")
@_peers("tunix,transformers")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Measured rounds.")
@_sections(("peers", *SECTIONS), "peers")
@_quick
@_json
def rollout(peers: str, rounds: int, sections: str, quick: bool, as_json: bool) -> None:
    """Sampled tokens per CPU second of the rollout engine on this machine, and further measurements of the engine.

    The comparison runs when peers are given, or as `--sections peers` with ours alone. Peers run in virtual
    environments of their own, which the first use installs.
    """
    from tools.bench.harness.environments import find_peers
    from tools.bench.harness.sections import find_sections
    from tools.bench.rollout import benchmark as bench

    asked = find_peers(_names(peers), bench.BENCHMARK)
    known = (bench.PEERS, *SECTIONS)
    chosen = find_sections(bench.BENCHMARK, _names(sections), known, default=SECTIONS)
    if asked and bench.PEERS not in chosen:
        chosen.insert(0, bench.PEERS)
    with _progress() as say:
        result = bench.run(asked, rounds, say, sections=chosen, quick=quick)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="launch")
@_quick
@_json
def launch(quick: bool, as_json: bool) -> None:
    """Seconds of a plan, from submission to the first update, and from a lost machine to its next rollout.

    The manifests are carried out on this machine, twice: cold, and with programs that are compiled. `bit_identical`:
    both runs, which lose a worker's machine, end in the weights of one process that lost nothing.
    """
    from tools.bench.launch import benchmark as bench

    with _progress() as say:
        figures = bench.measure(say, quick=quick)
    for name, value in figures.items():
        click.echo(f"{name:32} {value}")
    if as_json:
        click.echo(json.dumps(figures))
    if not figures.get("bit_identical", True):
        raise UserError("a run that lost a machine ended in other weights")


@command.command(name="recovery")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=1), help="Of each role.")
@click.option("--roles", default="", help="Comma-separated roles to kill; default: all, and the driver.")
@click.option("--seed", default=0, show_default=True, help="Of the order of the kills and of the moments.")
@click.option("--minutes", type=float, help="Begin no further kill after so long; default: make them all.")
@click.option("--keep", type=click.Path(path_type=Path), help="A new directory to keep the runs in.")
@_json
def recovery(kills: int, roles: str, seed: int, minutes: float | None, keep: Path | None, as_json: bool) -> None:
    """Seconds from SIGKILL of a role to the next update, and whether the run's result is the same to the bit."""
    from mesh.programs.compilation import enable_compilation_cache
    from tools.bench.recovery import benchmark as bench

    chosen = bench.find_roles(_names(roles))
    enable_compilation_cache()
    with _progress() as say:
        result = bench.run(kills, chosen, say, seed=seed, minutes=minutes, keep=keep)
    _report(result, as_json, failed=not bench.succeeded(result))


@command.command(name="weights")
@_sections(WEIGHTS_SECTIONS, "transports")
@_quick
@_json
def weights(sections: str, quick: bool, as_json: bool) -> None:
    """Speed of push and pull of weights on this machine, pause of a swap, deltas, resharding, fan-out."""
    from tools.bench.harness.sections import find_sections
    from tools.bench.weights import benchmark as bench

    chosen = find_sections(bench.BENCHMARK, _names(sections), WEIGHTS_SECTIONS, bench.DEFAULT)
    with _progress() as say:
        result = bench.run(say, sections=chosen, quick=quick)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="input")
@click.option("--documents", default=5000, show_default=True, type=click.IntRange(min=1), help="To make and pack.")
@_json
def input_(documents: int, as_json: bool) -> None:
    """Tokens of training input per CPU second: tokenising, and packing in each way."""
    from tools.bench.input import benchmark as bench

    _report(bench.run(documents), as_json, failed=False)


@command.command(name="import")
@click.option("--size", type=click.Choice(["0.6B", "3B", "8B"]), default="3B", show_default=True, help="Parameters.")
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Of a read and an import each."
)
@click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="On the disk to measure.")
@_quick
@_json
def import_(size: str, rounds: int, folder: Path | None, quick: bool, as_json: bool) -> None:
    """Speed of `axl convert import`, with and without --link, beside a plain read of the same files; its peak memory.

    Needs twice the bytes of the model on the disk (8B: 32 GB).
    """
    from tools.bench.checkpoint_import import benchmark as bench

    with _progress() as say:
        result = bench.run(size, rounds, say, folder=folder, quick=quick)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="first_token")
@_peers("transformers")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Turns of each.")
@click.option("--link", is_flag=True, help="Import by --link.")
@_quick
@_json
def first_token(peers: str, rounds: int, link: bool, quick: bool, as_json: bool) -> None:
    """Seconds from `axl convert import` of a model of 0.5B parameters to the first token of `axl serve`.

    The first turn compiles (`cold`); the others find its programs in the cache. Peers load the same files and generate.
    """
    from tools.bench.checkpoint_import import first_token as bench
    from tools.bench.harness.environments import find_peers

    asked = find_peers(_names(peers), bench.BENCHMARK)
    with _progress() as say:
        result = bench.run(asked, rounds, say, link=link, quick=quick)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="train_step")
@_peers("maxtext")
@_steps
@_quick
@_json
def train_step(peers: str, steps: int, quick: bool, as_json: bool) -> None:
    """CPU seconds of a supervised train step beside plain JAX, of its dispatch, and from start to first step.

    Peers run in virtual environments of their own, which the first use installs.
    """
    from tools.bench.harness.environments import find_peers
    from tools.bench.train_step import benchmark as bench

    asked = find_peers(_names(peers), bench.BENCHMARK)
    with _progress() as say:
        result = bench.run(asked, steps, say, quick=quick)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="sft_step")
@_peers("trl")
@_steps
@_quick
@_json
def sft_step(peers: str, steps: int, quick: bool, as_json: bool) -> None:
    """CPU seconds of a small step of supervised fine-tuning, from the same parameters and tokens as the peer's.

    Peers run in virtual environments of their own, which the first use installs.
    """
    _post_training("sft", peers, steps, quick, as_json)


@command.command(name="dpo_step")
@_peers("trl")
@_steps
@_quick
@_json
def dpo_step(peers: str, steps: int, quick: bool, as_json: bool) -> None:
    """CPU seconds of a small step of DPO, from the same parameters and tokens as the peer's.

    Peers run in virtual environments of their own, which the first use installs.
    """
    _post_training("dpo", peers, steps, quick, as_json)


def _post_training(kind: Literal["sft", "dpo"], peers: str, steps: int, quick: bool, as_json: bool) -> None:
    from tools.bench.harness.environments import find_peers
    from tools.bench.train_step.post_training import benchmark as bench

    asked = find_peers(_names(peers), f"{kind}_step")
    with _progress() as say:
        result = bench.run(kind, asked, steps, say, quick=quick)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="rl_update")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Measured updates of each.")
@_sections(RL_UPDATE_SECTIONS, "shared_prefix")
@_json
def rl_update(rounds: int, sections: str, as_json: bool) -> None:
    """Tokens that an RL update wastes by packed rows and by padded ones, and the CPU seconds of each.

    Section `shared_prefix`: FLOPs, temporary bytes and CPU seconds of a group that shares its prompt, beside separate
    rows, where the prompt is as long as an answer, 4 and 16 times as long; and of a group of forked answers.
    """
    from tools.bench.harness.sections import find_sections
    from tools.bench.rl_update import benchmark as bench

    chosen = find_sections("rl_update", _names(sections), RL_UPDATE_SECTIONS, ("packing",))
    _report(bench.run_sections(rounds, chosen), as_json, failed=False)


@command.command(name="learning")
@click.option("--only", default="", help="Comma-separated runs or sections; default: all.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), help="Of each run.")
@click.option("--steps", default=40, show_default=True, type=click.IntRange(min=1), help="Batches of a run.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), default=Path("runs/bench_learning"),
              show_default=True, help="Where the runs live; the same command goes on there.")  # fmt: skip
@click.option("--no-runs", is_flag=True, help="Make no runs: report those that have ended.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), help="A folder for plots (SVG).")
@_quick
@_json
def learning(
    only: str, seeds: int, steps: int, folder: Path, no_runs: bool, plot: Path | None, quick: bool, as_json: bool
) -> None:
    """Rewards of every objective over updates, from one supervised start; staleness, epochs, KL and cut batches.

    Every run is a run directory: killed and started again, the benchmark goes on where it was.
    """
    from mesh.programs.compilation import enable_compilation_cache
    from tools.bench.learning import benchmark as bench

    chosen = bench.find_runs(_names(only))
    enable_compilation_cache()
    with _progress() as say:
        result = bench.run(chosen, seeds, steps, say, folder=folder, quick=quick, measure=not no_runs)
    if plot is not None:
        from tools.bench.learning.plot import write_plots

        write_plots(result, plot)
    _report(result, as_json, failed=bool(result["errors"]))


@command.command(name="adapters")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Measured rounds.")
@click.option("--adapters", default=32, show_default=True, type=click.IntRange(min=1), help="In one batch.")
@_quick
@_json
def adapters_(rounds: int, adapters: int, quick: bool, as_json: bool) -> None:
    """Sampling with many LoRA adapters in one batch, beside one adapter after another and the base alone."""
    from tools.bench.adapters import benchmark as bench

    sizes = {"adapters": 4, "width": 128, "new": 4} if quick else {"adapters": adapters}
    with _progress() as say:
        result = bench.run(rounds, say, **sizes)
    _report(result, as_json, failed=False)


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows lines on standard error; rounds replace each other."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:

        def say(line: str) -> None:
            if line.startswith("round"):
                status.update(line)
            else:
                console.print(line, markup=False, highlight=False)

        yield say


def _report(result: dict[str, Any], as_json: bool, *, failed: bool) -> None:
    from tools.bench.harness.show import show

    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
    if failed:
        raise SystemExit(1)
