"""`axl config`: list experiments, show the config of one, and compare two."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from axlearn_like.config import ConfigBase, check_values, resolve, text_lines, to_text, walk_configs
from axlearn_like.config import diff as config_diff
from axlearn_like.config.declared import installed
from experiments import registry
from mesh.errors import UserError, did_you_mean, nearest, printable
from tools.experiment import check_command, edit_options, load_experiment

_UNWRAPPED = 1000  # columns


def _print_lines(lines: Iterable[str]) -> None:
    """Print lines unwrapped and without markup, so that the output can be pasted, compared and parsed back."""
    styles, console = {"-": "red", "+": "green"}, Console()
    for line in lines:
        style = styles.get(line[:1], "") if line[1:2] == " " else ""
        console.print(Text(printable(line), style=style), soft_wrap=True)


@click.group("config")
def command() -> None:
    """List, show and compare the configs of experiments."""


@command.command("list")
def _list() -> None:
    """List the experiments, one to a line."""
    console = Console()
    if not console.is_terminal:  # a program that reads a pipe expects one experiment a line
        console.width = _UNWRAPPED
    table = Table("experiment", "module", "what it is", box=None, pad_edge=False)
    for name, entry in registry.entries().items():
        table.add_row(Text(name), Text(entry.module), Text(entry.summary))
    for name, point in installed("experiments").items():
        package = "an installed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        table.add_row(Text(name), Text(point.module), Text(f"of {package}"))
    console.print(table)


@command.command("show")
@edit_options
@click.argument("path", required=False)
@click.option("--resolved", is_flag=True, help="Build it and show what parents filled in.")
def _show(experiment: str, path: str | None, applied: tuple[str, ...], sets: tuple[str, ...], resolved: bool) -> None:
    """Print the config of EXPERIMENT, or what is below PATH in it, one `path: value` to a line; all parses back."""
    cfg = load_experiment(experiment, sets, applied=applied)
    if resolved:
        check_values(cfg)
        own: Any = getattr(cfg, "resolved", None)  # the experiment itself defines how its roles are built
        cfg = resolve(cfg, None) if own is None else own()
        check_values(cfg)
    if path is None:
        return _print_lines(to_text(cfg).splitlines())
    lines = text_lines(cfg)
    found = [f"{at}: {text}" for at, text in lines.items() if f"{at}.".startswith(f"{path}.")]
    if not found:
        parts = [at.split(".") for at in lines]
        known = {".".join(names[:size]) for names in parts for size in range(1, len(names) + 1)}
        tails = sorted(at for at in known if at.endswith(f".{path.rpartition('.')[2]}"))
        raise UserError(f"{experiment} has no {path!r}{did_you_mean(path, nearest(path, known) or tails or known)}")
    _print_lines(found)


@command.command("kernels")
@edit_options
@click.option("--platform", type=click.Choice(["tpu", "gpu", "cpu"]), default="tpu", show_default=True)
@click.option("--length", default=4096, show_default=True, type=click.IntRange(1), help="Tokens of a row.")
@click.option("--sequence", default=1, show_default=True, type=click.IntRange(1), help="Devices that share a row.")
def _kernels(
    experiment: str, applied: tuple[str, ...], sets: tuple[str, ...], platform: str, length: int, sequence: int
) -> None:
    """Print which attention kernel each model of EXPERIMENT gets on a platform, and why not another."""
    cfg = load_experiment(experiment, sets, applied=applied)
    lines = list(kernels(cfg, platform=platform, length=length, cp_size=sequence))
    _print_lines(lines or [f"{experiment} has no decoder"])


def kernels(cfg: ConfigBase[Any], *, platform: str, length: int, cp_size: int) -> Iterator[str]:
    """Return a line for each decoder in a config: its path, the attention kernel it gets, and why not another.

    The policy of an RL experiment has three more: prompts with their completions, scoring and decoding.
    """
    from axlearn_like.kernels.attention.dispatch import explain
    from axlearn_like.layers.base import build_abstract
    from axlearn_like.layers.decoder import Decoder

    contexts: Callable[..., Iterator[str]] | None = getattr(cfg, "kernels", None)  # further contexts of the model
    for path, node in walk_configs(cfg):
        if isinstance(node, Decoder.Config):
            model = build_abstract(node)
            kinds = [block.attention for block, _ in model.kinds()]
            choices = [
                explain(one, platform=platform, dtype=model.dtype, length=length, cp_size=cp_size) for one in kinds
            ]
            name = f"{path or 'experiment'}.block.attention"
            for choice in dict.fromkeys(map(str, choices)):
                yield f"{name}: {choice}"
            if contexts is not None and path.split(".")[0] == "policy":
                lines = [line for one in kinds for line in contexts(one, platform, model.dtype)]
                yield from (f"{name}, {line}" for line in dict.fromkeys(lines))


@command.command("features")
@click.argument("experiment", default="demo")
@click.option("--markdown", is_flag=True, help="Print the page of the documentation.")
def _features(experiment: str, markdown: bool) -> None:
    """Print the features of RL with the options that switch them on, and which exclude each other, and why.

    Each feature, and each two, are switched on in EXPERIMENT (default: demo), and what a run would refuse is listed.
    """
    from tools.features import exclusions, page, tables

    cfg = load_experiment(experiment)
    check_command(cfg, "rl", experiment)
    found = list(exclusions(cfg))
    if markdown:
        click.echo(page(found), nl=False)
        return
    rows, reasons = tables(found)
    for head, cells in ((("feature", "options", "not with"), rows), (("features", "what is expected"), reasons)):
        table = Table(*head, box=None, pad_edge=False)
        for row in cells:
            table.add_row(*map(Text, row))
        Console().print(table)


@command.command("diff")
@edit_options
@click.argument("other", required=False)
def _diff(experiment: str, other: str | None, applied: tuple[str, ...], sets: tuple[str, ...]) -> None:
    """Print the lines in which EXPERIMENT and OTHER differ; --apply and --set change OTHER, by default EXPERIMENT."""
    if other is None and not (applied or sets):
        raise UserError("axl config diff: expected another experiment, or --apply or --set that change this one")
    registry.check_name(other := other or experiment)
    lines = config_diff(load_experiment(experiment), load_experiment(other, sets, applied=applied))
    _print_lines(lines or [f"{experiment} and {other} are the same"])
