"""One module per subcommand of ``axl``, which defines ``command``, a ``click.Command``.

A module is imported only when its subcommand is used, so that ``axl --help`` stays fast; ``COMMANDS`` lists all of
them, and ``PLACES`` the modules that are in a folder of their kind.
"""

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any


def options_as(**kinds: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Pass the options that are fields of a dataclass as one object, under its name in `kinds`.

    Fields without an option have their defaults.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(**given: Any) -> Any:
            for name, kind in kinds.items():
                own = [field.name for field in dataclasses.fields(kind) if field.name in given]
                given[name] = kind(**{field: given.pop(field) for field in own})
            return function(**given)

        return called

    return decorate


COMMANDS: dict[str, str] = {
    "config": "List, show and compare the configs of experiments.",
    "train": "Train a model by an experiment's trainer.",
    "rl": "Improve a policy by reinforcement learning.",
    "worker": "Join an active run with one more rollout worker.",
    "eval": "Evaluate a policy on held-out problems: pass@k, maj@k, pairs.",
    "verify": "Make a published run again and compare it; show how an answer and its reference are read.",
    "serve": "Answer over HTTP, in OpenAI's protocol, by a run's policy.",
    "service": "Train and sample many adapters of one base, for clients of the Tinker API.",
    "convert": "Convert checkpoints from and to Hugging Face's form.",
    "doctor": "Check this machine: versions, devices, speed, kernels, a step of training and of RL.",
    "models": "List the published models that are built in, and show what one costs.",
    "data": "Prepare data: train a tokenizer, filter, dedup, decontaminate, split rows.",
    "recipes": "List recipes by model, job and machine: what fits there, and the command to type.",
    "aot": "Compile a step for TPUs that are not there: does it fit, and how fast could it be.",
    "launch": "Plan a run on TPUs, and submit it: to GKE, as a queued resource, or on this machine.",
    "simulate": "Hours, dollars and staleness of an RL run, by its real control plane and a virtual clock.",
    "bench": "Run a benchmark and print its result as JSON.",
    "report": "Rebuild the report of a run directory.",
    "publish": "Write an RL run to one small file, from which anyone makes every rollout again.",
    "runs": "List runs: running, finished, stopped or died, and where they stand.",
    "watch": "Follow a run in the terminal, or its report in a browser.",
    "replay": "Make an update of a past RL run again, to the bit, and once more with a change.",
    "bisect": "Find the first event, token, layer and array at which two RL runs differ.",
    "compare": "Lay runs side by side: curves, final and best values, configs.",
}

PLACES = {name: f"runs.{name.replace('-', '_')}" for name in ("report", "publish", "worker", "watch", "compare")}
PLACES |= {name: f"runs.{name}" for name in ("replay", "bisect")}
PLACES |= {"simulate": "runs.simulate", "runs": "runs.listing", "doctor": "bench.doctor"}
PLACES |= {"serve": "serving.serve", "service": "serving.service"}
