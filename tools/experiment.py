"""From the words of a command line to an experiment's config, with mistakes refused in one message.

An unknown name is refused from the source text alone, before jax is imported (seconds on a small
machine). Errors that the config system raises become `UserError`; an error of the experiment's own
code stays what it is, with its traceback.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from mesh.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from axlearn_like.config import ConfigBase

# Modules that raise built-in errors to say that a config, a path or a name is wrong.
CONFIG_MODULES = ("axlearn_like.config", "experiments.registry", "tools.commands.config")
ROOMS = ("axlearn_like", "rl", "models", "mesh", "experiments", "tools")


def experiment_options[F: Callable[..., Any]](function: F) -> F:
    """Adds what `axl train` and `axl rl` have in common: EXPERIMENT, --apply, --set, --seed, --run-dir."""
    for decorate in (
        click.option(
            "--run-dir",
            type=click.Path(path_type=Path),
            help="Where the run lives; the same command resumes it. Default: runs/EXPERIMENT.",
        ),
        click.option("--seed", type=int, help="The experiment's argument `seed`."),
        click.option(
            "--set",
            "sets",
            multiple=True,
            metavar="PATH=VALUE",
            help="Change one field, e.g. learner.schedule.lr=3e-4. May be repeated.",
        ),
        click.option(
            "--apply",
            "applied",
            multiple=True,
            metavar="MODIFIER",
            help="Change the config by a function of experiments/modifiers.py (low_rank, int8, ...), or by "
            "FILE.py:FUNCTION, before --set. May be repeated.",
        ),
        click.argument("experiment"),
    ):
        function = decorate(function)
    return function


def load_experiment(
    name: str,
    sets: Sequence[str] = (),
    seed: int | None = None,
    device: Callable[[], str] | None = None,
    applied: Sequence[str] = (),
) -> ConfigBase:
    """Returns the config of an experiment with the edits applied in order.

    Args:
        name: A registered name, `file.py:function` or `package.module:function`.
        sets: Edits `path=value`.
        seed: Passed to the experiment's function if not None.
        device: Name of the devices, asked for where the experiment has mesh rules, which are applied before the edits.
        applied: Modifiers: names in `experiments.modifiers`, or `file.py:function`; after mesh rules, before `sets`.

    Raises:
        UserError: For an unknown experiment or modifier, a path or a value that does not fit, or an experiment
            without a seed.
    """
    check_name(name)
    from axlearn_like.config import has_mesh_rules, with_mesh_rules
    from experiments import registry
    from tools.commands import config

    with config_errors():
        arguments: dict[str, Any] = {} if seed is None else {"seed": seed}
        function = registry.find(name)
        if arguments and "seed" not in function.__code__.co_varnames[: _parameter_count(function)]:
            raise UserError(f"experiment {name!r} takes no argument 'seed'; use --set path=value")
        cfg = config.load(name, **arguments)
        if device is not None and has_mesh_rules(cfg):
            cfg = with_mesh_rules(cfg, device())
        for modifier in applied:
            find_modifier(modifier)(cfg)
        return config.edit(cfg, sets)


def find_modifier(name: str) -> Callable[[ConfigBase], Any]:
    """A function of `experiments.modifiers`, or `file.py:function` or `package.module:function`.

    Raises:
        UserError: If there is none, with the nearest names.
    """
    from experiments import modifiers, registry

    if ":" in name:
        with config_errors():
            return registry.find(name)
    known = {n: f for n, f in vars(modifiers).items() if getattr(f, "__module__", "") == modifiers.__name__}
    if name not in known:
        raise UserError(f"no modifier {name!r}{did_you_mean(name, known)}")
    return known[name]


def check_name(name: str) -> None:
    """Refuses a name that no module of `experiments` defines, with the nearest ones.

    Raises:
        UserError: If `name` is not that of an experiment; names with a colon are not looked at.
    """
    if ":" in name:
        return
    known = experiment_names()
    if name not in known:
        raise UserError(f"no experiment {name!r}{did_you_mean(name, known)}")


def experiment_names() -> list[str]:
    """Reads the names of the functions decorated with `experiment` from the package's source."""
    spec = find_spec("experiments")
    names = []
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.py")):
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.FunctionDef) and any(map(_registers, node.decorator_list)):
                    names.append(node.name)
    return sorted(names)


@contextmanager
def config_errors(*, building: bool = False) -> Iterator[None]:
    """Turns errors of the config system into `UserError`.

    Args:
        building: Also the ValueErrors by which constructors in our rooms refuse their configs.
    """
    try:
        yield
    except UserError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        module = _raised_in(error.__traceback__)
        refused = module.startswith(CONFIG_MODULES) or (
            building and isinstance(error, ValueError) and module.split(".")[0] in ROOMS
        )
        if not refused:
            raise
        # str() of a KeyError is its argument's repr.
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UserError(str(message)) from error


def default_run_dir(experiment: str, run_dir: Path | None) -> Path:
    """Returns `run_dir`, or the folder in `runs` that bears the experiment's name."""
    return Path("runs") / experiment.rpartition(":")[2] if run_dir is None else run_dir


def owner_of(cfg: ConfigBase) -> str:
    """Returns `module:Class` of what the config builds."""
    from axlearn_like.config import config_name

    return config_name(cfg)


def _registers(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (isinstance(target, ast.Name) and target.id == "experiment") or (
        isinstance(target, ast.Attribute) and target.attr == "experiment"
    )


def _parameter_count(function: Callable[..., Any]) -> int:
    return function.__code__.co_argcount + function.__code__.co_kwonlyargcount


def _raised_in(trace: TracebackType | None) -> str:
    """The module whose code raised."""
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", ""))
