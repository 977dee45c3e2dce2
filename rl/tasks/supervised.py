"""Solved problems of a task mixture as examples for supervised fine-tuning."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.tokenizers.bytes import ByteTokenizer
from mesh.errors import UserError
from rl.tasks.mixture import TaskMixture, encode_solution


class SupervisedSource(Configurable):
    """Questions with their answers for supervised fine-tuning, by random access."""

    class Config(ConfigBase["SupervisedSource"]):
        mixture: TaskMixture.Config = REQUIRED
        num_examples: int = REQUIRED
        start: int = 0  # index of the first training problem
        tokenizer: ConfigBase = ByteTokenizer.Config()

    def __init__(self, cfg: Config):
        self._mixture = cfg.mixture.build()
        if missing := self._mixture.without_answers():
            raise UserError(
                f"SupervisedSource.mixture: {missing[0]!r} has no answers that score 1, so there is nothing to learn "
                "by supervision; leave it to RL (weight=0.0 here)"
            )
        self._tokenizer = cfg.tokenizer.build()
        self._num_examples = cfg.num_examples
        self._start = cfg.start

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{"tokens": int32, "loss_mask": bool}: the question and its answer, see `encode_solution`.

        The loss is on the answer and its end.
        """
        if not 0 <= index < self._num_examples:
            raise IndexError(f"example {index} of {self._num_examples}")
        problem = self._mixture.train(self._start + index)
        prompt, answer = encode_solution(problem, problem.answer, self._tokenizer)
        tokens = np.concatenate([prompt, answer])
        return {"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))
