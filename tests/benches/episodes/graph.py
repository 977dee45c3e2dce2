"""Critical paths of plans that are answered in parallel, one answer after the other, and without parents' answers.

A small policy is fine-tuned on plans and answers of nested sums first (`experiments/tasks/expressions.py`); it writes
each plan itself.
"""

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from experiments.tasks.expressions import PHRASES, expression, expressions_sft, problem_seed
from rl.protocol.messages import Prompt
from rl.rollout.agent_loops.graph.decoding import GraphDecoding, GraphRecord, Order
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.tasks.encoding import encode_prompt
from tests.benches.episodes.policies import greedy_engine, trained_params

_UNSEEN = 3_000_000  # number of the first problem, behind those of training


def graph(quick: bool) -> dict[str, Any]:
    """Return critical paths, accuracies and seconds of four orders of the same plans."""
    steps, problems = (60, 4) if quick else (400, 32)
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES).build()
    engine = _trained(steps, tokenizer)
    found = {order: _decode(engine, tokenizer, order, problems) for order in get_args(Order) for _ in range(2)}
    path = {order: one["critical_path"] for order, one in found.items()}
    right = {order: one["accuracy"] for order, one in found.items()}
    return {
        "critical_path_ratio": path["sequential"] / path["pipelined"],
        "pipelined_ratio": path["planned"] / path["pipelined"],
        "seconds_ratio": found["sequential"]["seconds"] / found["pipelined"]["seconds"],
        "pipelined_seconds_ratio": found["planned"]["seconds"] / found["pipelined"]["seconds"],
        "accuracy_over_flat": right["pipelined"] - right["flat"],
        "accuracy_over_sequential": right["pipelined"] - right["sequential"],
        "job": {"steps": steps, "problems": problems, "nodes": 7},
        **found,
    }


def _trained(steps: int, tokenizer: Tokenizer) -> RolloutEngine:
    """Return an engine with a policy that was fine-tuned for so many steps."""
    cfg = expressions_sft(steps=steps)
    with TemporaryDirectory() as folder:
        params = trained_params(cfg, Path(folder))
    sizes = {"max_prompt_tokens": 96, "max_new_tokens": 160, "max_num_seqs": 8, "steps_per_dispatch": 4}
    return greedy_engine(cfg, params, tokenizer, **sizes)


def _decode(engine: RolloutEngine, tokenizer: Tokenizer, order: Order, problems: int) -> dict[str, float]:
    """Return means over problems, which have the engine to themselves one after the other."""
    decoding = GraphDecoding.Config(order=order).build(tokenizer=tokenizer)
    seconds, right = list[float](), 0
    for number in range(problems):
        problem = expression(problem_seed(_UNSEEN + number))
        prompt = Prompt(number, "expressions", encode_prompt(problem.question, tokenizer))
        began = time.perf_counter()
        engine.generate([Request(prompt, agent_loop=decoding)])
        seconds.append(time.perf_counter() - began)
        answers = decoding.records[number, 0].answers
        right += bool(answers) and answers[max(answers)].endswith(f"={problem.value}")
    records: list[GraphRecord] = [decoding.records[number, 0] for number in range(problems)]
    whole = [one for one in records if not one.error]
    return {
        "critical_path": statistics.mean(one.critical_path for one in whole) if whole else 0.0,
        "accuracy": right / problems,
        "refused_plans": (problems - len(whole)) / problems,
        "seconds": statistics.mean(seconds),
    }
