"""Solved problems of a task mixture as examples for supervised fine-tuning."""

import abc
from collections.abc import Iterator
from typing import override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError
from rl.protocol.messages import Problem
from rl.tasks.encoding import encode_solution
from rl.tasks.mixture import TaskMixture


class ProblemExamples(Configurable, abc.ABC):
    """Examples of the training problems of a mixture, by random access."""

    class Config(ConfigBase["ProblemExamples"]):
        mixture: TaskMixture.Config = REQUIRED
        num_examples: int = REQUIRED
        start: int = 0  # index of the first training problem
        tokenizer: ConfigBase = ByteTokenizer.Config()

    def __init__(self, cfg: Config):
        self.mixture: TaskMixture = cfg.mixture.build()
        self.tokenizer: Tokenizer = cfg.tokenizer.build()
        self._size, self._start = cfg.num_examples, cfg.start

    def __len__(self) -> int:
        return self._size

    @abc.abstractmethod
    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[i] for i in range(len(self)))

    def problem(self, index: int) -> Problem:
        """Return the problem of an example (IndexError: there is none)."""
        if not 0 <= index < self._size:
            raise IndexError(f"example {index} of {self._size}")
        return self.mixture.train(self._start + index)


class SupervisedSource(ProblemExamples):
    """Questions with their answers for supervised fine-tuning."""

    def __init__(self, cfg: ProblemExamples.Config):
        super().__init__(cfg)
        if missing := self.mixture.without_answers():
            raise UserError(
                f"SupervisedSource.mixture: {missing[0]!r} has no answers that score 1, so there is nothing to learn "
                "by supervision; leave it to RL (weight=0.0 here)"
            )

    @override
    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{"tokens": int32, "loss_mask": bool}: the question and its answer, see `encode_solution`.

        The loss is on the answer and its end.
        """
        problem = self.problem(index)
        prompt, answer = encode_solution(problem, problem.answer, self.tokenizer)
        tokens = np.concatenate([prompt, answer])
        return {"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)}
