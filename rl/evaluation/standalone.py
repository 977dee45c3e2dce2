"""An evaluation by itself: a policy's answers to problems, kept in a folder, and the figures from them.

Problems are answered in order, and each is written as soon as its samples are scored: after `kill -9` the same command
goes on behind the last one. What is drawn depends on (seed, problem, sample, position), so the files are the same.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError
from rl.environments.scoring import score_rollouts
from rl.evaluation.evaluator import transcript
from rl.evaluation.pass_at_k import ProblemResult, is_correct, mean_terms, summarise
from rl.evaluation.samples import Row, Samples, sample_rows
from rl.evaluation.statistics import compare, wilson
from rl.protocol.messages import Problem, Rollout, Score
from rl.protocol.protocols import ScoreSource
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.agent_loops.graph.rollouts import GraphRollouts
from rl.rollout.agent_loops.interruption import Interruption
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.tasks.mixture import TaskMixture
from rl.tasks.prompts import PromptMaker
from rl.tasks.skipped import SkippedProblems


class Answering(Protocol):
    """A policy that answers problems: of this process, or at an endpoint (`served`)."""

    @property
    def at_once(self) -> int: ...
    @property
    def skipped(self) -> SkippedProblems: ...
    def answers(self, problems: Sequence[Problem], count: int, seed: int) -> Iterator[Row]: ...


@dataclasses.dataclass(frozen=True)
class Respondent:
    """A policy of this process that answers problems, and what scores its answers."""

    engine: RolloutEngine
    tokenizer: Tokenizer
    verifier: ScoreSource
    maker: PromptMaker  # makes the prompts
    at_once: int  # problems that the engine gets at a time
    episodes: Episodes | None = None  # episodes of the tasks' environments; None: they have none
    interruption: Interruption | None = None  # long thinking is interrupted; None: it is not
    graph: GraphRollouts | None = None  # answers are plans whose nodes are drawn in parallel; None: they are not
    # Tokens by problem id, as the same keys have drawn them from another policy: drafts (`earlier_tokens`)
    earlier: Mapping[int, tuple[np.ndarray, ...]] = dataclasses.field(default_factory=dict[int, tuple[np.ndarray, ...]])

    @property
    def skipped(self) -> SkippedProblems:
        """Problems that are left out."""
        return self.maker.skipped

    def answers(self, problems: Sequence[Problem], count: int, seed: int) -> Iterator[Row]:
        """Answer problems, `count` times each, and yield a row for each; `seed` is of the draws."""
        steered = self.interruption or self.graph
        ask = Request if steered is None else steered.request
        ask = ask if self.episodes is None else self.episodes.request
        requests = [ask(self.maker.prompt(problem), count, seed) for problem in problems]
        found = [self.earlier.get(problem.id, ()) for problem in problems]
        requests = [dataclasses.replace(one, earlier=known) for one, known in zip(requests, found, strict=True)]
        rollouts = self.engine.generate(requests)
        if self.episodes is not None:
            rollouts = self.episodes.recorded(rollouts, again=False)
        if self.graph is not None:
            rollouts = list(self.graph.recorded(rollouts))
        answers, scores = score_rollouts(self.verifier, rollouts, self.tokenizer)
        asked = [problem for problem in problems for _ in range(count)]
        shown = [transcript(one, self.tokenizer, problem) for one, problem in zip(rollouts, asked, strict=False)]
        drawn = len(asked)  # nodes of plans follow
        yield from answer_rows(problems, rollouts[:drawn], answers[:drawn], scores[:drawn], shown)


def evaluate(
    samples: Samples,
    problems: Sequence[Problem],
    tasks: TaskMixture,
    respondent: Answering,
    *,
    count: int,
    ks: Sequence[int],
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Answer the problems that are not answered yet, `count` times each, and return the figures of all.

    Args:
        problems: in the order in which they are answered.
        respondent: answers, and scores the answers.
        ks: the k of pass@k and maj@k.
        seed: seed of the draws, and of the bootstrap.
        progress: gets the number of problems that are answered.
    """
    for first in range(samples.answered(problems), len(problems), respondent.at_once):
        part = problems[first : first + respondent.at_once]
        for number, row in enumerate(respondent.answers(part, count, seed), start=first + 1):
            samples.append(row)
            progress(number)
    return conclude(samples, problems, tasks, skipped=respondent.skipped, ks=ks, seed=seed)


def conclude(
    samples: Samples,
    problems: Sequence[Problem],
    tasks: TaskMixture,
    *,
    skipped: SkippedProblems,
    ks: Sequence[int],
    seed: int,
) -> dict[str, Any]:
    """Write and return the figures of problems that are all answered; the arguments are those of `evaluate`."""
    found = figures(samples.rows(), problems, tasks, ks=ks, seed=seed)
    result = {"policy": samples.policy, **found, "left_out": skipped.counts()}
    samples.finish(result)
    return result


def figures(
    rows: Sequence[Row], problems: Sequence[Problem], tasks: TaskMixture, *, ks: Sequence[int], seed: int
) -> dict[str, Any]:
    """Return pass@k with bootstrap intervals over problems, as an evaluation during RL has them, and more.

    maj@k is the mean of `majority`; with one sample a problem, pass@1 has Wilson's interval too. "terms" of a family
    are the means of the rewards' terms, "forms" counts those in which answers were read, "cut_off" those without an
    end within the policy's tokens or the episode's turns. `failed` counts the verifier's
    failures by status: they count as wrong.
    """
    pairs = list(zip(rows, problems, strict=True))
    results = [
        ProblemResult(
            row["problem"],
            row["family"],
            [is_right(sample) for sample in row["samples"]],
            [tasks.vote(problem, sample["answer"]) for sample in row["samples"]],
        )
        for row, problem in pairs
    ]
    result = summarise(results, ks=ks, majorities=ks, seed=seed)
    for name, part in result["families"].items():
        if part["samples"] == part["problems"]:
            part["pass@1_wilson"] = wilson(round(part["pass@1"] * part["problems"]), part["problems"])
        samples = [(problem, one) for row, problem in pairs if row["family"] == name for one in row["samples"]]
        if terms := mean_terms(sample.get("terms", {}).items() for _, sample in samples):
            part["terms"] = terms
        if cut := sum(sample["finish_reason"] == "length" for _, sample in samples):
            part["cut_off"] = cut
        forms = Counter(tasks.form(problem, sample["answer"]) for problem, sample in samples)
        if set(forms) != {None}:
            part["forms"] = {str(form): count for form, count in forms.most_common()}
    statuses = [sample["status"] for row in rows for sample in row["samples"] if sample["status"] != "ok"]
    return {**result, "failed": {status: statuses.count(status) for status in sorted(set(statuses))}}


def is_right(sample: Mapping[str, Any]) -> bool:
    """Return True if the verifier gave a sample full marks."""
    return is_correct(Score(sample["reward"], sample["status"]))


def compare_folders(first: Path, second: Path, *, seed: int = 0) -> dict[str, Any]:
    """Compare two policies on the problems of both, all and by family (UserError: no samples, or none in common)."""
    tables = [_by_question(sample_rows(folder)) for folder in (first, second)]
    common = [key for key in tables[0] if key in tables[1]]
    if not common:
        raise UserError(f"{first} and {second} have no problem in common: evaluate both on the same tasks")

    def compared(keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
        right = [[[is_right(sample) for sample in table[key]["samples"]] for key in keys] for table in tables]
        return compare(right[0], right[1], seed=seed)

    families = sorted({family for family, _ in common})
    by_family = {name: compared([key for key in common if key[0] == name]) for name in families}
    only = [len(table) - len(common) for table in tables]
    return {**compared(common), "unpaired": only, "families": by_family}


def _by_question(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """Return rows by family and content; of several with the same question and answer, by the number of each, too."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        content, number = json.dumps([row["question"], row["expected"]]), 0
        while (key := (row["family"], hashlib.blake2b(f"{content}{number}".encode()).hexdigest()[:32])) in found:
            number += 1
        found[key] = row
    return found


def answer_rows(
    problems: Sequence[Problem],
    rollouts: Sequence[Rollout],
    answers: Sequence[str],
    scores: Sequence[Score],
    shown: Sequence[Row],
) -> Iterator[Row]:
    """Yield the row of each problem, of which the others have as many, in turn; `shown`: added to each sample."""
    drawn = [
        {
            "answer": answer,
            "reward": score.reward,
            "status": score.status,
            "finish_reason": rollout.finish_reason,
            "tokens": len(rollout.tokens),
            "token_ids": rollout.tokens.tolist(),
            **({} if score.status == "ok" else {"error": score.error}),
            **({"terms": dict(score.terms)} if score.terms else {}),
            **more,
        }
        for rollout, answer, score, more in zip(rollouts, answers, scores, shown, strict=True)
    ]
    count = len(drawn) // max(1, len(problems))
    for number, problem in enumerate(problems):
        head = {"problem": problem.id, "family": problem.family, "question": problem.question}
        yield {**head, "expected": problem.answer, "samples": drawn[number * count : (number + 1) * count]}
