"""A process reward model as a verifier: it judges each step of an answer, and the answer by what it says of all.

Steps are the lines of an answer, or what else a separator divides, as in `StepLabels`, which such models are trained
on: a step's score is that at the last token of its separator, where the model has read it and nothing of the next one.
"""

from typing import Literal, override

import numpy as np

from axlearn_like.input.labelled import step_tokens
from rl.protocol.messages import Problem
from rl.verification.verifiers.reward_model import RewardModel


class ProcessRewardModel(RewardModel):
    """A `RewardModel` of steps. Blank steps are left out: an answer cannot raise its mean by them."""

    class Config(RewardModel.Config):
        separator: str = "\n"  # text between steps; that of the `StepLabels` that the model has learned from
        # Score of an answer, of the scores of its steps; the least: a solution is as right as its worst step.
        aggregate: Literal["min", "mean", "product", "last"] = "min"
        # Scores are logits (`ClassificationLoss`), and each step counts with its probability; False: as they are.
        probabilities: bool = True

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("separator", bool(self.separator), "a text")
            whole = self.aggregate != "product" or self.probabilities
            self.require("aggregate", whole, "min, mean or last where probabilities=False: scores may be negative")

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._separator, self._probabilities = cfg.separator, cfg.probabilities
        self._aggregate = {"min": np.min, "mean": np.mean, "product": np.prod, "last": lambda x: x[-1]}[cfg.aggregate]

    @override
    def scored(self, problem: Problem, answer: str) -> tuple[list[int], list[int]]:
        """Return the tokens that the model reads, and the ends of the steps."""
        steps = [step for step in answer.split(self._separator) if step.strip()] or [""]
        messages = problem.messages or ({"content": problem.question},)
        prompt = "\n\n".join(message["content"] for message in messages)
        return step_tokens(self.tokenizer, prompt, steps, self._separator)

    @override
    def combined(self, scores: np.ndarray) -> float:
        """Return the score of an answer from those of its steps."""
        wide = scores.astype(np.float64)
        return float(self._aggregate(1 / (1 + np.exp(-wide)) if self._probabilities else wide))
