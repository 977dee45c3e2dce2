"""pass@k on held-out problems, with the engine that also makes the training rollouts."""

from collections.abc import Callable, Sequence
from typing import Any

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.tokenizers.protocol import Tokenizer
from rl.evaluation.pass_at_k import ProblemResult, summarise
from rl.roles.messages import Problem, Prompt, Rollout, Score
from rl.roles.protocols import ScoreSource
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.rollout.worker import check_whole
from rl.tasks.mixture import encode_prompt


class Evaluation(Configurable):
    """Samples every held-out problem `samples` times, and scores the answers.

    Sampling keys depend on (seed, problem, sample, position) only: evaluating the same weights twice gives the same
    figures to the last digit.
    """

    class Config(ConfigBase["Evaluation"]):
        problems_per_family: int = 96
        ks: tuple[int, ...] = (1, 8)
        shown_per_family: int = 4  # problems whose answers are kept for the report

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def run(
        self,
        engine: RolloutEngine,
        problems: Sequence[Problem],
        tokenizer: Tokenizer,
        verifier: ScoreSource,
        seed: int,
        samples: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """(summary as `summarise` makes it, rows with sample answers); None if asked to stop."""
        results: list[ProblemResult] = []
        shown: list[dict[str, Any]] = []
        batch = max(1, 2 * engine.cfg.max_num_seqs // samples)  # between which it can be stopped
        for first in range(0, len(problems), batch):
            if stop():
                return None
            part = problems[first : first + batch]
            prompts = [Prompt(p.id, p.family, encode_prompt(p.question, tokenizer)) for p in part]
            rollouts = engine.generate([Request(prompt, samples, seed) for prompt in prompts])
            check_whole(rollouts)
            answers = [tokenizer.decode(rollout.tokens) for rollout in rollouts]
            scores = verifier.score([rollout.prompt_id for rollout in rollouts], answers)
            for i, problem in enumerate(part):
                mine = slice(i * samples, (i + 1) * samples)
                results.append(ProblemResult.from_scores(problem.id, problem.family, scores[mine]))
                if sum(row["family"] == problem.family for row in shown) < self.cfg.shown_per_family:
                    shown.append(sample_row(problem, rollouts[mine][0], answers[mine][0], scores[mine][0]))
        return summarise(results, ks=self.cfg.ks, seed=seed), shown


def sample_row(problem: Problem, rollout: Rollout, answer: str, score: Score) -> dict[str, Any]:
    """A rollout as a person reads it: one row of rollouts/*.jsonl."""
    return {
        "family": problem.family,
        "question": problem.question,
        "answer": answer,
        "expected": problem.answer,
        "reward": score.reward,
        "status": score.status,
        "finish_reason": rollout.finish_reason,
        "version": int(rollout.versions[0]),
    }
