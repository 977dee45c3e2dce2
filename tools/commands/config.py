"""`axl config`: what experiments there are, what one says, and how two differ."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from axlearn_like.config import ConfigBase, resolve, set_path, to_text, walk_configs
from axlearn_like.config import diff as config_diff
from experiments import registry
from tools.experiment import check_name, config_errors

Build = Callable[[ConfigBase[Any]], Any]
_UNWRAPPED = 1000  # columns


def list_experiments(console: Console | None = None) -> None:
    """Print a row for each experiment: its name, its module, the first line of its docstring.

    Rows are wrapped on a terminal only: what reads a pipe wants an experiment a line.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = _UNWRAPPED
    table = Table("experiment", "module", "what it is", box=None, pad_edge=False)
    for name in registry.names():
        function = registry.find(name)
        about = (inspect.getdoc(function) or "").partition("\n")[0]
        table.add_row(Text(name), Text(function.__module__), Text(about))
    console.print(table)


def load(experiment: str, sets: Iterable[str] = (), **arguments: Any) -> ConfigBase[Any]:
    """An experiment's config with the edits `path=value` applied in order.

    Args:
        experiment: a name, or `file.py:function`, or `package.module:function`.
        sets: edits `path=value`.
        arguments: of the experiment's function.

    Raises:
        ValueError: for an edit without `=`.
        LookupError, AttributeError, TypeError: for names, paths or values that do not fit.
    """
    return edit(registry.get(experiment, **arguments), sets)


def edit(cfg: ConfigBase[Any], sets: Iterable[str]) -> ConfigBase[Any]:
    """Applies the edits `path=value` in order, in place; errors as in `load`."""
    for one in sets:
        path, equals, value = one.partition("=")
        if not equals:
            raise ValueError(f"--set {one!r}: expected path=value, like trainer.learner.lr=3e-4")
        set_path(cfg, path.strip(), value)
    return cfg


def show(
    experiment: str,
    sets: Iterable[str] = (),
    resolved: bool = False,
    build: Build | None = None,
    console: Console | None = None,
) -> None:
    """Prints an experiment's config as text.

    Args:
        experiment: a name, or `file.py:function`, or `package.module:function`.
        sets: edits `path=value`.
        resolved: build it and show the values that parents filled in.
        build: how to build it for `resolved`; plain `cfg.build()` by default.
        console: where to print.
    """
    cfg = load(experiment, sets)
    if resolved and build is None and hasattr(cfg._owner, "resolved"):
        cfg = cfg.build().resolved()  # what runs says itself how its roles are built
    elif resolved:
        cfg = resolve(cfg, build)
    _print_lines(to_text(cfg).splitlines(), console)


def diff(experiment_a: str, experiment_b: str, console: Console | None = None) -> None:
    """Prints what differs between two experiments, a line per path."""
    lines = config_diff(registry.get(experiment_a), registry.get(experiment_b))
    _print_lines(lines or [f"{experiment_a} and {experiment_b} are the same"], console)


def _print_lines(lines: Iterable[str], console: Console | None) -> None:
    """Plain, unwrapped and without markup: the output can be pasted, compared and parsed back."""
    styles = {"-": "red", "+": "green"}
    console = console or Console()
    for line in lines:
        style = styles.get(line[:1], "") if line[1:2] == " " else ""
        console.print(Text(line, style=style), soft_wrap=True)


@click.group("config")
def command() -> None:
    """List, show and compare the configs of experiments."""


@command.command("list")
def _list() -> None:
    """List the experiments, one to a line."""
    list_experiments()


@command.command("show")
@click.argument("experiment")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change one field first.")
@click.option("--resolved", is_flag=True, help="Build it and show what parents filled in.")
def _show(experiment: str, sets: tuple[str, ...], resolved: bool) -> None:
    """Print the config of EXPERIMENT, one `path: value` to a line; the text parses back."""
    check_name(experiment)
    with config_errors(building=resolved):
        show(experiment, sets, resolved)


@command.command("kernels")
@click.argument("experiment")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change one field first.")
@click.option("--platform", type=click.Choice(["tpu", "gpu", "cpu"]), default="tpu", show_default=True)
@click.option("--length", default=4096, show_default=True, type=click.IntRange(1), help="Tokens of a row.")
@click.option("--sequence", default=1, show_default=True, type=click.IntRange(1), help="Devices that share a row.")
def _kernels(experiment: str, sets: tuple[str, ...], platform: str, length: int, sequence: int) -> None:
    """Print which attention kernel each model of EXPERIMENT gets on a platform, and why not another."""
    check_name(experiment)
    with config_errors(building=True):
        lines = list(kernels(load(experiment, sets), platform=platform, length=length, cp_size=sequence))
    _print_lines(lines or [f"{experiment} has no decoder"], None)


def kernels(cfg: ConfigBase[Any], *, platform: str, length: int, cp_size: int) -> Iterator[str]:
    """A line for each decoder in a config: its path, the attention kernel it gets, and why not another."""
    import jax
    from flax import nnx

    from axlearn_like.kernels.attention.dispatch import explain
    from axlearn_like.layers.decoder import Decoder

    for path, node in walk_configs(cfg):
        if isinstance(node, Decoder.Config):
            model = jax.eval_shape(lambda node=node: node.build(rngs=nnx.Rngs(0)))
            choice = explain(
                model.layers.attention, platform=platform, dtype=model.dtype, length=length, cp_size=cp_size
            )
            yield f"{path or 'experiment'}.block.attention: {choice}"


@command.command("diff")
@click.argument("experiment_a")
@click.argument("experiment_b")
def _diff(experiment_a: str, experiment_b: str) -> None:
    """Print the lines in which two experiments differ."""
    check_name(experiment_a)
    check_name(experiment_b)
    with config_errors():
        diff(experiment_a, experiment_b)
