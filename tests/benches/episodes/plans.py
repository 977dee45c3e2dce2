"""RL of parallelism: critical paths of plans before and after it, and whether their answers stay right.

A small policy is fine-tuned on plans of the same problems that differ in what can be drawn at the same time; RL takes a
cost for each token of the critical path from the reward (`experiments/tasks/expressions.py`). The same plans answered
one after the other, and without their parents' answers, are what both are compared with.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from axlearn_like.checkpoint.reader import list_steps, restore_params
from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.run.directory import RunDirectory
from axlearn_like.tokenizers.protocol import completion_text
from experiments.tasks.expressions import Expression, expression, expressions_rl, problem_seed
from rl.experiment import RLExperiment
from rl.protocol.messages import Prompt
from rl.rollout.agent_loops.graph.decoding import GraphDecoding, GraphRecord, Order
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.runtime.run import RLRun
from rl.tasks.encoding import encode_prompt
from rl.training.warm_start import warm_start_directory

_UNSEEN = 4_000_000  # number of the first problem, behind those of training
_LEVELS = 3  # answers one after the other in a plan of full parallelism

# Tokens one after the other, as they are and were one answer drawn after the other; indicators of right answers, plans
# of full parallelism, and those that were refused
FIGURES = ("path", "one_by_one", "right", "parallel", "refused")

type Answers = dict[str, np.ndarray]  # figures of each problem


def plans(quick: bool) -> dict[str, Any]:
    """Return critical paths and accuracies before and after RL, by seed and over all, with 95 % intervals."""
    found = dict[int, dict[str, Answers]]()
    for seed in (0,) if quick else (0, 1, 2):
        with TemporaryDirectory() as folder:
            found[seed] = trained(experiment(seed, quick=quick), Path(folder) / "run", 16 if quick else 512)
    return {**summary(found), "job": {"quick": quick, "seeds": len(found)}}


def summary(found: Mapping[int, Mapping[str, Answers]]) -> dict[str, Any]:
    """Return the figures of seeds together, and of each; of paths, those of problems whose plans were never refused."""
    before, after, flat = (
        {name: np.concatenate([row[when][name] for row in found.values()]) for name in FIGURES}
        for when in ("before", "after", "flat")
    )
    shorter = after["path"] - before["path"]
    whole = np.isfinite(shorter)
    return {
        "path_ratio": _mean(after["path"][whole]) / max(1.0, _mean(before["path"][whole])),
        "path_change": _interval(shorter),
        "accuracy_change": _interval(after["right"] - before["right"]),
        "accuracy_over_flat": _interval(after["right"] - flat["right"]),
        "one_by_one_ratio": _mean(after["one_by_one"]) / max(1.0, _mean(after["path"])),
        **{f"seed_{seed}": {when: _means(one) for when, one in row.items()} for seed, row in found.items()},
    }


def experiment(seed: int, *, quick: bool = False) -> RLExperiment.Config:
    """Return the experiment of a seed, without its evaluations."""
    cfg = expressions_rl(seed=seed).set(evaluation=None)
    if quick and cfg.warm_start is not None:
        cfg.set(num_steps=1)
        cfg.warm_start.set(num_steps=60, evaluators=())
    return cfg


def trained(cfg: RLExperiment.Config, run: Path, problems: int) -> dict[str, Answers]:
    """Return figures of each unseen problem before RL, after it, and after it with nodes that see no other's answer."""
    RLRun(cfg.build(), say=lambda line: None).run(run, runtime="inprocess", progress=False)
    places = warm_start_directory(RunDirectory.attach(run)) / "checkpoints", run / "checkpoints" / "rl"
    abstract = split(build_abstract(cfg.policy))[1]
    before, after = (restore_params(place / str(max(list_steps(place))), abstract) for place in places)
    tokenizer, graph = cfg.tokenizer.build(), cfg.graph
    assert graph is not None
    sizes = {"max_prompt_tokens": cfg.max_prompt_tokens, "max_new_tokens": cfg.max_new_tokens}
    engine_cfg = cfg.engine.clone(model=cfg.policy, stop_tokens=(tokenizer.eos,), **sizes)
    engine: RolloutEngine = engine_cfg.build(decode=partial(completion_text, tokenizer))
    asked = [expression(problem_seed(_UNSEEN + problems * cfg.seed + number)) for number in range(problems)]

    def answer(params: Params, order: Order) -> Answers:
        engine.set_weights(params, 0)
        decoding: GraphDecoding = graph.decoding.clone(order=order).build(tokenizer=tokenizer)
        prompts = [Prompt(n, "sums", encode_prompt(one.question, tokenizer)) for n, one in enumerate(asked)]
        engine.generate([Request(prompt, agent_loop=decoding) for prompt in prompts])
        rows = [_figures(decoding.records[n, 0], one) for n, one in enumerate(asked)]
        return {name: np.asarray([row[name] for row in rows], np.float64) for name in FIGURES}

    return {"before": answer(before, "pipelined"), "after": answer(after, "pipelined"), "flat": answer(after, "flat")}


def _figures(record: GraphRecord, problem: Expression) -> dict[str, float]:
    """Return the figures of an answer; a plan that was refused has no path."""
    if record.error:
        return dict.fromkeys(FIGURES, 0.0) | {"path": np.nan, "one_by_one": np.nan, "refused": 1.0}
    levels = dict[int, int]()
    for number, node in record.nodes.items():
        levels[number] = 1 + max([0, *(levels[parent] for parent in node.parents)])
    planned = max(node.written for node in record.nodes.values())
    return {
        "path": record.critical_path,
        "one_by_one": planned + sum(record.drawn.values()),
        "right": record.answers[max(record.answers)].endswith(f"={problem.value}"),
        "parallel": len(levels) == len(problem.nodes) and max(levels.values()) == _LEVELS,
        "refused": 0.0,
    }


def _means(answers: Answers) -> dict[str, float]:
    return {name: _mean(values) for name, values in answers.items()}


def _mean(values: np.ndarray) -> float:
    """Return the mean of what is known, or 0."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else 0.0


def _interval(values: np.ndarray) -> list[float]:
    """Return a mean over problems and its 95 % interval, by the normal approximation."""
    known = values[np.isfinite(values)]
    mean, spread = _mean(known), 1.96 * float(np.std(known)) / len(known) ** 0.5 if len(known) else 0.0
    return [mean, mean - spread, mean + spread]
