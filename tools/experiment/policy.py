"""The policy of a run, of a checkpoint in one, of an experiment or of a model, by its name on a command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments import registry
from mesh.errors import UserError, did_you_mean
from tools.experiment.chosen import Edits, apply_edits, check_command, default_run_dir, load_experiment, trust_place

if TYPE_CHECKING:
    from rl.experiment import RLExperiment
    from rl.serving.policy import SavedWeights, ServedModel


def find_policy(
    name: str, sets: Edits, *, random_weights: bool, command: Literal["serve", "eval"]
) -> tuple[RLExperiment.Config | ServedModel.Config, SavedWeights | None, str]:
    """Return how to ask the policy of a run, of a checkpoint in one, of an experiment or of a model; and its name.

    Args:
        name: as on the command line.
        random_weights: take those that it begins with.

    Returns:
        The config, the weights (None: those that it begins with), and the name for clients.

    Raises:
        UserError: there is no such policy, or it has no weights yet.
    """
    from axlearn_like.checkpoint.versions import BEST, find_version, split_version
    from axlearn_like.checkpoint.versions import label as version_label

    path, which = split_version(name)
    places = "a run directory, RUN@best, RUN@STEP, a checkpoint's path, an experiment's name, or a model's directory"
    named, name = name, name if which is None else name.rpartition("@")[0]
    if not path.is_dir():
        if ":" not in name:
            if os.sep in name:
                if path.name == BEST or path.name.isdecimal():
                    find_version(path)  # refusal names the existing ones
                near = did_you_mean(str(path), map(str, _folders(path.parent)))
                raise UserError(f"no directory {path}{near}; expected {places}")
            registry.check_name(name, [*map(str, _folders(Path())), *map(str, _folders(Path("runs")))])
        trust_place(name)
    from axlearn_like.run.directory import RunDirectory
    from rl.serving.policy import find_run, newest_weights, recorded_config

    if path.is_dir():
        from experiments.start.served import is_model, served_model

        if is_model(path):
            if which is not None:
                raise UserError(f"{named}: a model's directory has no other versions; expected {path}")
            model = served_model(path, random_weights=random_weights)
            apply_edits(model, sets)
            model.check()
            return model, None, path.absolute().name
    elif random_weights:
        cfg: Any = load_experiment(name, sets)
        check_command(cfg, "serve", name)
        return cfg, None, default_run_dir(name, None).name
    run = find_run(path) if path.is_dir() else RunDirectory.attach(default_run_dir(name, None))
    if run is None:
        raise UserError(
            f"{path} is not a run directory: it has no config.txt; expected one, an experiment's name, or a directory "
            "with config.json and safetensors"
        )
    if not run.config_path.is_file():
        raise UserError(
            f"experiment {name!r} has no run in {run.path}; train it (axl rl {name}), name the directory of a run, "
            f"or axl {command} it with --random-weights"
        )
    recorded = recorded_config(run)
    apply_edits(recorded, sets)
    at = named if path.is_dir() else f"{run.path}@{which}" if which else run.path
    weights = None if random_weights else newest_weights(run, at)
    if weights is None and not random_weights:
        from rl.runtime.policies.changes import refuse_several

        refuse_several(run.path)
        raise UserError(
            f"{run.path} holds no weights yet; continue its training, or axl {command} with --random-weights"
        )
    return recorded, weights, version_label(at, run.path, weights)


def _folders(parent: Path) -> list[Path]:
    files = [*parent.glob("*/config.txt"), *parent.glob("*/config.json")]
    return sorted({file.parent for file in files})
