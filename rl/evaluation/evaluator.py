"""pass@k and maj@k on held-out problems, by the workers that also make the training rollouts."""

from collections.abc import Sequence
from typing import Any, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.tokenizers.protocol import Tokenizer, answer_text
from rl.evaluation.pass_at_k import ProblemResult, is_correct, mean_terms, summarise
from rl.protocol.experiment import ExperimentFields
from rl.protocol.messages import Group, Problem, Rollout, Score
from rl.tasks.encoding import messages_of


class Evaluation(Configurable):
    """Samples every held-out problem as often as a training prompt, and scores the answers.

    Sampling keys depend on (seed, problem, sample, position) only: evaluating the same weights twice gives the same
    figures to the last digit, on whichever workers.
    """

    class Config(ConfigBase["Evaluation"]):
        problems_per_family: int = 96
        ks: tuple[int, ...] = (1, 8)
        shown_per_family: int = 4  # problems whose answers are kept for the report
        # Tokens kept of an evaluation, as drafts of the next one, with `evaluate_every`; 0: there are none.
        earlier_tokens: int = 0

        @override
        def check_fields(self) -> None:
            self.require_least(0, "earlier_tokens")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse a pass@k of more tries than a prompt gets."""
            most = max(self.ks)
            expected = f"{most} or more, for pass@{most} (evaluation.ks)"
            experiment.require("samples_per_prompt", experiment.samples_per_prompt >= most, expected)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def summarise(
        self,
        problems: Sequence[Problem],
        groups: Sequence[Group],
        votes: Sequence[Sequence[str]],
        tokenizer: Tokenizer,
        seed: int,
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the summary and rows with answers.

        Args:
            groups: scores of all samples, and at least the first rollout, of each problem in order.
            votes: what each sample of each problem votes for (`TaskMixture.vote`).

        Returns:
            The summary of `pass_at_k.summarise`, with maj@k for each k of `ks` above 1, and "terms", the means of the
            rewards' terms, if there are any; and a row for each answer that is shown.
        """
        results: list[ProblemResult] = []
        shown: list[dict[str, Any]] = []
        for problem, group, cast in zip(problems, groups, votes, strict=True):
            correct = [is_correct(score) for score in group.scores]
            results.append(ProblemResult(problem.id, problem.family, correct, cast))
            if sum(row["family"] == problem.family for row in shown) < self.cfg.shown_per_family:
                first = group.rollouts[0]
                text = answer_text(tokenizer, first.tokens.tolist())
                row = sample_row(problem, first, text, group.scores[0])
                shown.append({**row, **transcript(first, tokenizer, problem)})
        summary = summarise(results, ks=self.cfg.ks, majorities=[k for k in self.cfg.ks if k > 1], seed=seed)
        terms = mean_terms(score.terms for group in groups for score in group.scores if score.status == "ok")
        return {**summary, **({"terms": terms} if terms else {})}, shown


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


def transcript(rollout: Rollout, tokenizer: Tokenizer, problem: Problem) -> dict[str, Any]:
    """Return an episode as a person reads it: what policy and environment said in turn; nothing of other rollouts.

    `turns` are the texts between which the policy goes on, with what a chat template writes; `messages` are those of a
    chat.
    """
    episode = rollout.episode
    if episode is None:
        return {}
    changes = np.flatnonzero(np.diff(rollout.action_mask)) + 1
    pieces = np.split(np.arange(len(rollout.tokens)), changes)
    said = [
        {"by": "policy" if rollout.action_mask[piece[0]] else "environment", "text": answer_text(tokenizer, ids)}
        for piece in pieces
        if len(piece)
        for ids in [rollout.tokens[piece].tolist()]
    ]
    told: dict[str, Any] = {"error": episode.error} if episode.error else {}
    messages: list[Any] = [] if problem.asked_by_environment else list(messages_of(problem))
    first = 0
    for turn in episode.turns:
        drawn = rollout.tokens[first : turn.end][rollout.action_mask[first : turn.end]]
        messages += [*turn.given, {"role": "assistant", "content": answer_text(tokenizer, drawn.tolist())}]
        first = turn.end
    told["messages"] = messages
    return {"turns": said, "ended": episode.ended, "turn_rewards": [turn.reward for turn in episode.turns], **told}
