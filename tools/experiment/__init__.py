"""Experiments and policies from the arguments of a command line."""

from tools.experiment.chosen import (
    Chosen,
    Edits,
    Modifiers,
    apply_edits,
    check_command,
    choose,
    commands_of,
    default_run_dir,
    edit_experiment,
    find_modifier,
    load_experiment,
    trust_place,
)
from tools.experiment.options import (
    AnyPath,
    LocalPath,
    Number,
    edit_options,
    experiment_options,
    text_options,
    warn_of_idle_accelerator,
)
from tools.experiment.policy import find_policy

__all__ = [
    "AnyPath",
    "Chosen",
    "Edits",
    "LocalPath",
    "Number",
    "Modifiers",
    "apply_edits",
    "check_command",
    "choose",
    "commands_of",
    "default_run_dir",
    "edit_experiment",
    "edit_options",
    "experiment_options",
    "find_modifier",
    "find_policy",
    "load_experiment",
    "text_options",
    "trust_place",
    "warn_of_idle_accelerator",
]
