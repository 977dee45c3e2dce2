"""An experiment's config from its name and edits.

An unknown name is refused from the source text alone, before jax is imported (seconds on a small machine). Code
that the user names here (an experiment's file or module, modifiers, values `module:name`) is trusted by later commands,
and so is what the experiment reaches outside of its run.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.config import (
    ConfigBase,
    config_name,
    has_mesh_rules,
    label,
    path_of,
    reach,
    replace,
    set_path,
    with_mesh_rules,
)
from axlearn_like.config.consent import remember_consent
from axlearn_like.config.declared import installed, place_of
from axlearn_like.config.trusted_code import KNOWN, remember
from experiments import registry
from mesh.errors import UserError, did_you_mean

Edits = Sequence[str] | Mapping[str, Any]
Modifiers = Sequence[str | Callable[[ConfigBase], Any]]
_NAME = re.compile(r"\b([A-Za-z_][\w.]*):[A-Za-z_]")


def load_experiment(
    name: str | ConfigBase,
    sets: Edits = (),
    seed: int | None = None,
    device: Callable[[], str] | None = None,
    applied: Modifiers = (),
) -> ConfigBase:
    """Return the config of an experiment with the edits applied in order.

    Args:
        name: A registered name, `file.py:function` or `package.module:function`; or a config, which is not changed.
        sets: Edits `path=value`, or values by path.
        seed: Passed to the experiment's function if not None.
        device: Called for the name of the devices if the experiment has mesh rules, which are applied before the edits.
        applied: Modifiers: functions, names in `experiments.modifiers`, or `file.py:function`; after mesh rules, before
            `sets`.

    Raises:
        UserError: For an unknown experiment or modifier, a path or a value that does not fit, or an experiment
            without a seed.
    """
    return choose(name, sets, seed, applied).on(device)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """An experiment of a command line: its config as it is registered, and the edits, which come after devices."""

    cfg: ConfigBase  # the config, which is not changed
    name: str  # name or path, for messages
    recipe: str | None  # name of the recipe that it is; None: it is none
    edits: tuple[Modifiers, Edits]  # modifiers, then edits

    def on(self, device: Callable[[], str] | None = None) -> ConfigBase:
        """Return the config with the edits; before them with its mesh rules for the devices of this name."""
        cfg = self._copy()
        if device is not None and (has_mesh_rules(cfg) or self.recipe is not None):
            there = device()
            cfg = with_mesh_rules(self.fitted(cfg, there, there), there)
        return edit_experiment(cfg, *self.edits)

    def fitted[C: ConfigBase](self, cfg: C, device: str, devices: Any) -> C:
        """Return a recipe, or an experiment without a mesh rule for its devices, as it fits them; else the config.

        Args:
            devices: the machine, or the built fleet.
        """
        rules = getattr(cfg, "mesh_rules", ())
        if self.recipe is None and (not rules or any(re.fullmatch(pattern, device) for pattern, _ in rules)):
            return cfg
        from experiments.recipes.apply import fitted

        return fitted(cfg, self.recipe, devices, device, edit_experiment(cfg.clone(), *self.edits))

    def for_command(self, command: str) -> Any:
        """Return a copy of the config as it is registered (UserError: this command does not run it)."""
        check_command(self.cfg, command, self.name)
        return self._copy()

    def _copy(self) -> ConfigBase:
        return label(self.cfg.clone(), path_of(self.cfg))


def choose(name: str | ConfigBase, sets: Edits = (), seed: int | None = None, applied: Modifiers = ()) -> Chosen:
    """Find an experiment, without its devices; arguments and errors as of `load_experiment`."""
    if not isinstance(name, str):
        return Chosen(name, path_of(name), None, (applied, sets))
    trust_place(name)
    cfg = registry.get(name) if seed is None else registry.get(name, seed=seed)
    return Chosen(cfg, name, name if name in registry.recipes() else None, (applied, sets))


def edit_experiment(cfg: ConfigBase, applied: Modifiers, sets: Edits) -> ConfigBase:
    """Apply modifiers, then edits, in place, and return the config; see `load_experiment`."""
    for modifier in applied:
        function = find_modifier(modifier) if isinstance(modifier, str) else modifier
        modifier = modifier if isinstance(modifier, str) else function.__name__
        try:
            function(cfg)
        except UserError as error:
            purpose = (function.__doc__ or "").strip().partition("\n")[0]
            raise UserError(f"--apply {modifier}: {error}" + (f" ({purpose})" if purpose else "")) from error
    apply_edits(cfg, sets)
    remember_consent(reach(cfg))
    return cfg


def apply_edits(cfg: ConfigBase, sets: Edits, prefix: str = "") -> ConfigBase:
    """Apply the edits `path=value` of `--set` in order, in place, and return the config.

    Args:
        prefix: what stood before the paths on the command line.

    Raises:
        UserError: For an edit without `=`, or a path or a value that does not fit.
    """
    for path, value in sets.items() if isinstance(sets, Mapping) else (_path_and_value(edit, prefix) for edit in sets):
        for module in _NAME.findall(value) if isinstance(value, str) else ():
            trust_place(f"{module}:")  # named by the user
        set_path(cfg, path, value)
    return cfg


def _path_and_value(edit: str, prefix: str) -> tuple[str, str]:
    path, equals, value = edit.partition("=")
    if not equals:
        raise UserError(f"--set {prefix + edit!r}: expected path=value, like learner.schedule.peak_lr=3e-4")
    return path.strip(), value


def find_modifier(name: str) -> Callable[[ConfigBase], Any]:
    """Return a function of `experiments.modifiers`, `file.py:function` or `package.module:function`.

    The name of an environment that an installed package declares is a modifier, too: all tasks are played in it.

    Raises:
        UserError: If there is none, with the nearest names.
    """
    from experiments import modifiers

    if ":" in name:
        trust_place(name)
        return registry.find(name)
    known = {n: f for n, f in vars(modifiers).items() if getattr(f, "__module__", "") == modifiers.__name__}
    if name in installed("environments"):
        return functools.partial(_with_environment, name)
    if name not in known:
        raise UserError(f"no modifier {name!r}{did_you_mean(name, [*known, *installed('environments')])}")
    return known[name]


def _with_environment(name: str, cfg: ConfigBase) -> None:
    """Let all tasks of a config be played in an environment that an installed package declares."""
    from rl.environments.task import EnvironmentTask

    environment = registry.find(place_of("environments", name))()
    replace(cfg, EnvironmentTask.Config, lambda task: task.set(environment=environment.clone()))


def default_run_dir(experiment: str, run_dir: Path | None) -> Path:
    """Return `run_dir`, or the folder in `runs` with the experiment's name."""
    return Path("runs") / experiment.rpartition(":")[2] if run_dir is None else run_dir


def check_command(cfg: Any, command: str, experiment: str) -> None:
    """Refuse an experiment that this command does not run; `commands` of its config lists those that do.

    Raises:
        UserError: naming the command that runs it.
    """
    known = commands_of(cfg)
    if command not in known:
        use = f"; use `axl {known[0]}`" if known else ""
        raise UserError(f"experiment {experiment!r} builds {config_name(cfg)}, which `axl {command}` does not run{use}")


def commands_of(cfg: Any) -> tuple[str, ...]:
    """Return the commands that run a config, the usual one first; of what no command runs, none."""
    said: Callable[[Any], tuple[str, ...]] | None = getattr(type(cfg), "commands", None)
    return said(cfg) if said is not None else ()


def trust_place(name: str) -> None:
    """Trust the file or package in `place:function`, from now on, if it is not part of this project."""
    place = name.rpartition(":")[0]
    if place and place.partition(".")[0] not in KNOWN:
        remember(place)
