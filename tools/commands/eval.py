"""`axl eval NAME`: a policy's answers to held-out problems, kept to read, with pass@k and maj@k."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mesh.errors import UserError, printable
from tools.commands import options_as
from tools.experiment import LocalPath, Number, apply_edits, find_policy, text_options, trust_place

if TYPE_CHECKING:
    from rl.experiment import RLExperiment
    from rl.serving.policy import ServedModel

_PROBLEMS = 96  # problems of an endless family
_URLS = ("http://", "https://")


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How answers are drawn, and how they are judged."""

    samples: int  # answers to each problem
    seed: int = 0  # seed of the draws
    ks: tuple[int, ...] = (1,)  # the k of pass@k and maj@k
    most: int | None = None  # problems of each task; None: all
    verifier: str | None = None  # place of a function from the tasks' config to a verifier's
    temperature: float | None = None  # temperature of the draws; None: the policy's
    sets: tuple[str, ...] = ()  # edits of the policy's config
    untrained: bool = False  # take the weights that the policy begins with


@click.command("eval")
@text_options
@click.argument("name")
@click.option(
    "--tasks",
    "named",
    multiple=True,
    metavar="NAME=FILE,...",
    help="gsm8k=FILE, humaneval=FILE, ehrsql=FILE, any other NAME=FILE with questions and answers, a family of "
    "reasoning-gym, or MINE.py:FUNCTION for a config of tasks.  [default: the run's own]",
)
@click.option(
    "--verifier", metavar="PLACE:FUNCTION", help="Function of the tasks' config that returns a verifier's, or its name."
)
@click.option(
    "--problems",
    "most",
    type=click.IntRange(1),
    help=f"Problems of each task.  [default: all rows, {_PROBLEMS} of a family]",
)
@click.option("--samples", type=click.IntRange(1), default=4, show_default=True, help="Answers to each problem.")
@click.option(
    "-k", "ks", type=click.IntRange(1), multiple=True, help="The k of pass@k and maj@k.  [default: 1 and samples]"
)
@click.option("--temperature", type=Number(0), help="0: greedy.  [default: the policy's]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draws.")
@click.option("--out", type=LocalPath(path_type=Path, file_okay=False), help="Folder.  [default: runs/eval/NAME]")
@click.option("--against", type=LocalPath(path_type=Path), help="Folder of another evaluation, to compare pairs with.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object, as the last line.")
@click.option("--random-weights", "untrained", is_flag=True, help="Evaluate an untrained policy.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change a field of the policy's config.")
@options_as(drawing=Drawing)
def command(
    drawing: Drawing, name: str, named: tuple[str, ...], out: Path | None, against: Path | None, as_json: bool
) -> None:
    """Evaluate the policy of NAME: RUN, RUN@best, RUN@STEP, an experiment (its run in runs/), a model, or an endpoint.

    An endpoint is its address, such as http://127.0.0.1:8000/v1 of axl serve, with --set model=NAME, and is asked by
    OpenAI's chat completions.

    Answers go to samples.jsonl in the folder as they come, the figures to result.json. The same command goes on after
    it was stopped, and gives the same files. pass@k is unbiased, with 95 % intervals by the bootstrap over problems
    (with one sample each, Wilson's too); pairs are compared by the paired bootstrap and McNemar's test.
    """
    ks = tuple(sorted(set(drawing.ks or (1, drawing.samples))))
    if max(ks) > drawing.samples:
        raise UserError(f"pass@{max(ks)} needs --samples {max(ks)} or more; there are {drawing.samples}")
    from rl.evaluation.samples import sample_rows
    from rl.evaluation.standalone import compare_folders

    if against is not None:
        sample_rows(against)  # refused before anything is drawn
    folder = out or Path("runs") / "eval" / _label(name)
    result = evaluate_policy(name, named, folder, dataclasses.replace(drawing, ks=ks), against)
    compared = None if against is None else compare_folders(against, folder, seed=drawing.seed)
    if as_json:
        click.echo(json.dumps({**result, "compared": compared} if compared else result))
        return
    _print(result, ks)
    if compared is not None:
        from rl.evaluation.paired import paired_text

        click.echo(printable(f"against {against}: {paired_text(compared)}"))
    click.echo(f"samples: {folder / 'samples.jsonl'}")


def _label(name: str) -> str:
    """Return the name of a policy's folder: of a version of a run `RUN@STEP`, so that no two share one."""
    from axlearn_like.checkpoint.versions import label, split_version

    if name.startswith(_URLS):
        return re.sub(r"\W+", "-", name.partition("://")[2]).strip("-")
    if split_version(name)[0].is_dir():
        from rl.serving.policy import find_run, newest_weights

        run = find_run(name)
        if run is not None:
            return label(name, run.path, newest_weights(run, name))
    return Path(name.rpartition(":")[2]).absolute().name


def evaluate_policy(
    name: str, named: tuple[str, ...], folder: Path, drawing: Drawing, near: Path | None = None
) -> dict[str, Any]:
    """Evaluate a policy in a folder, or go on with it; returns the figures.

    Args:
        name: as `axl eval` takes it.
        named: tasks, as its option `--tasks`; empty: the run's own.
        folder: where answers and figures are kept.
        drawing: how answers are drawn.
        near: folder of another policy's evaluation, whose samples are drafts where they have the same noise.
    """
    if name.startswith(_URLS):
        return _evaluate_endpoint(name, named, folder, drawing)
    cfg, weights, _ = find_policy(name, drawing.sets, random_weights=drawing.untrained, command="eval")
    tasks_cfg, verifier_cfg = _tasks(cfg, named, drawing.verifier)
    from rl.environments.roles import check_alone

    check_alone(tasks_cfg)
    from axlearn_like.config import to_text
    from axlearn_like.run.progress import Progress
    from mesh.programs.compilation import enable_compilation_cache
    from rl.evaluation.samples import Samples, earlier_tokens, record_of
    from rl.evaluation.standalone import Respondent, conclude, evaluate
    from rl.rollout.agent_loops.episodes import Episodes
    from rl.serving.policy import make_engine
    from rl.tasks.prompts import PromptMaker
    from rl.tasks.skipped import skipped_text

    enable_compilation_cache()
    if drawing.temperature is not None:
        cfg.sampler.temperature = drawing.temperature
    experiment: RLExperiment | ServedModel = cfg.build()
    maker = PromptMaker(experiment.tokenizer, max_prompt_tokens=cfg.max_prompt_tokens, seconds=10.0)
    tasks = tasks_cfg.build()
    tasks.admission = maker
    problems = tasks.for_evaluation(drawing.most, _PROBLEMS)
    for line in skipped_text(maker.skipped.counts()):
        click.echo(f"note: {printable(line)}", err=True)
    policy = {
        "policy": "as it begins" if weights is None else f"{weights.path} (version {weights.version})",
        "sampler": to_text(cfg.sampler),
        "sizes": [cfg.max_prompt_tokens, cfg.max_new_tokens],
        **{name: to_text(one) for name in ("interruption", "graph") if (one := getattr(cfg, name, None)) is not None},
    }
    asked = {"problems": len(problems), "samples": drawing.samples, "seed": drawing.seed}
    opened = Samples(folder, policy | record_of(tasks_cfg, tasks, verifier_cfg) | asked)
    if opened.answered(problems) == len(problems):
        click.echo(f"finished before: {folder} has all answers; nothing is sampled again", err=True)
        return conclude(opened, problems, tasks, skipped=maker.skipped, ks=drawing.ks, seed=drawing.seed)
    at_once = max(1, 2 * experiment.engine_cfg.max_num_seqs // drawing.samples)
    drawn: dict[str, Any] = {"count": drawing.samples, "ks": drawing.ks, "seed": drawing.seed}
    if (interruption := getattr(cfg, "interruption", None)) is not None:
        interruption = interruption.build(tokenizer=experiment.tokenizer)
    if (graph := getattr(cfg, "graph", None)) is not None:
        graph = graph.build(tokenizer=experiment.tokenizer, max_new_tokens=cfg.max_new_tokens)
    with Progress(len(problems), title="problems") as shown:
        engine, _ = make_engine(experiment, weights)
        with verifier_cfg.build() as scoring:
            episodes = Episodes.of(tasks_cfg, experiment.tokenizer, drawing.seed)
            roles = (engine, experiment.tokenizer, scoring)
            earlier = {} if near is None else earlier_tokens(near, drawing.seed)
            loops: dict[str, Any] = {"episodes": episodes, "interruption": interruption, "graph": graph}
            respondent = Respondent(*roles, maker, at_once, earlier=earlier, **loops)
            try:
                return evaluate(opened, problems, tasks, respondent, **drawn, progress=shown.update)
            finally:
                if episodes is not None:
                    episodes.close()


def _evaluate_endpoint(url: str, named: tuple[str, ...], folder: Path, drawing: Drawing) -> dict[str, Any]:
    from rl.evaluation.served import ServedPolicy, evaluate_served

    cfg = ServedPolicy.Config(url=url)
    apply_edits(cfg, drawing.sets)
    if drawing.temperature is not None:
        cfg.temperature = drawing.temperature
    tasks, verifier = _tasks(cfg, named, drawing.verifier)
    drawn: dict[str, Any] = {"count": drawing.samples, "ks": drawing.ks, "seed": drawing.seed}
    return evaluate_served(cfg, tasks, verifier, folder, most=drawing.most, default=_PROBLEMS, **drawn)


def _tasks(cfg: Any, named: tuple[str, ...], verifier: str | None) -> tuple[Any, Any]:
    """Return the configs of the tasks and of their verifier."""
    from axlearn_like.config.declared import place_of
    from experiments.datasets import named_tasks, verifier_of
    from experiments.registry import find

    parts = [part for text in named for part in text.split(",")]
    tasks: Any
    if not parts:
        tasks = getattr(cfg, "tasks", None)
        if tasks is None:
            raise UserError("there are no tasks to evaluate on: name some, as --tasks gsm8k=FILE")
    elif len(parts) == 1 and ":" in parts[0] and "=" not in parts[0]:
        trust_place(parts[0])
        tasks = find(parts[0])()
    else:
        tasks = named_tasks(parts)
    if verifier is not None:
        verifier = verifier if ":" in verifier else place_of("verifiers", verifier)
        trust_place(verifier)
        return tasks, find(verifier)(tasks)
    return tasks, cfg.verifier if not parts and hasattr(cfg, "verifier") else verifier_of(tasks)


def _print(result: dict[str, Any], ks: tuple[int, ...]) -> None:
    for name, part in [*result["families"].items(), ("mean of tasks", result)]:
        figures = []
        for k in ks:
            low, high = part[f"pass@{k}_ci"]
            figures.append(f"pass@{k} {100 * part[f'pass@{k}']:.2f} % ({100 * low:.2f} to {100 * high:.2f})")
            figures.append(f"maj@{k} {100 * part[f'maj@{k}']:.2f} %")
        figures += [f"{term} {value:.4g}" for term, value in part.get("terms", {}).items()]
        click.echo(printable(f"{name}: {part['problems']} problems; {', '.join(figures)}"))
        if cut := part.get("cut_off"):
            click.echo(
                printable(f"{name}: {cut} of {part['samples']} answers are cut off: they have no end in max_new_tokens")
            )
        if forms := part.get("forms"):
            read = ", ".join(f"{count} {form}" for form, count in forms.items() if form != "none")
            said = f"{name}: answers read as {read or 'nothing'}; {forms.get('none', 0)} in no readable form"
            click.echo(printable(said))
    if result["failed"]:
        counts = ", ".join(f"{count} {status}" for status, count in result["failed"].items())
        click.echo(f"warning: the verifier failed on {counts}; these count as wrong", err=True)
