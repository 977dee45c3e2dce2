"""A reward model as a verifier: the score that a model with a score head gives to a prompt with its answer.

It reads the sequence as reward models are trained on it: the conversation with the answer by the tokenizer's chat
template, or without one the prompt, the answer and the end of text. An answer cannot write a special token: its text is
encoded as text.
"""

from collections.abc import Sequence
from typing import Any, override

import jax
import numpy as np

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.pretrained import pretrained_source
from axlearn_like.config import REQUIRED, ConfigBase, path_of
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.heads import ScoreHead
from axlearn_like.tokenizers.embedding import check_tokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from axlearn_like.training.head_losses import one_score
from axlearn_like.training.program import check_length
from mesh import UserError, make_mesh, to_named_sharding
from rl.protocol.messages import Details, Problem
from rl.tasks.preferences import completion_of
from rl.verification.scorers import TaskScorer

_LEAST_LENGTH = 64  # rows are as long as a power of two from here on, so few programs are compiled


class RewardModel(TaskScorer):
    """The score of a reward model, moved and scaled; all answers to a prompt are scored at once.

    In `Verifier` it runs on the CPU of the verifier's processes, which need the memory (`memory_mb`) and the time
    (`deadline_s`) for it; in `InlineVerifier` on a device of the caller.
    """

    class Config(TaskScorer.Config):
        # A decoder with `head=ScoreHead.Config()`; `models.huggingface.hf(path)` of a reward model is one.
        model: ConfigBase[Any] = REQUIRED
        tokenizer: ConfigBase[Any] = REQUIRED  # tokenizer of that model, which need not be the policy's
        # Source of its parameters, such as the run of `axl train reward_model`; None: the model's own.
        start_from: StartFrom.Config | None = None
        centre: float = 0.0
        scale: float = 1.0  # the reward is `scale` times the score's distance from `centre`

        @override
        def wants(self) -> frozenset[str]:
            return frozenset({"group"})

        @override
        def negative(self) -> str | None:
            return "model"  # a score is any number

        @override
        def check_fields(self) -> None:
            head = getattr(self.model, "head", None)
            scores = isinstance(head, ScoreHead.Config) and head.outputs == 1
            self.require("model", scores, "a decoder with head=ScoreHead.Config(), of one output")
            known = self.start_from is not None or pretrained_source(self.model) is not None
            self.require("start_from", known, "StartFrom.Config(path=...) of the model's parameters, which has none")

    def __init__(self, cfg: Config):
        check_tokenizer(cfg.tokenizer, cfg.model)
        super().__init__(cfg)
        self._cfg = cfg
        self.tokenizer: Tokenizer = cfg.tokenizer.build()
        self._mesh = make_mesh({"data": 1}, devices=jax.local_devices()[:1])
        start: Any = cfg.start_from or pretrained_source(cfg.model)
        with jax.set_mesh(self._mesh):
            graphdef, described = split(build_abstract(cfg.model))
            self._params = start.build().params(to_named_sharding(described, self._mesh))

            def scores(params: Any, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
                model, context = bind(graphdef, params), PackedContext(positions, segments)
                return one_score(model.scores(model.hidden(tokens, context).x, context), "RewardModel")

            self._scores = jax.jit(scores)

    @override
    def score(self, problem_id: int, answer: str) -> float:
        (found,) = self.score_samples(problem_id, [answer], [])
        if isinstance(found, Exception):
            raise found
        return found

    @override
    def score_samples(self, problem_id: int, answers: Sequence[str], details: Sequence[Details]) -> list[Any]:
        """Return the reward of each answer; of one that is longer than the model's positions, an exception."""
        problem = self.problem(problem_id)
        sequences, places = zip(*(self.scored(problem, answer) for answer in answers), strict=True)
        refused = [self._too_long(problem_id, len(sequence)) for sequence in sequences]
        sequences = [[] if error else sequence for sequence, error in zip(sequences, refused, strict=True)]
        rows, length = _power_of_two(len(answers), 1), _power_of_two(max(map(len, sequences)), _LEAST_LENGTH)
        tokens, inside = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)], inside[row, : len(sequence)] = sequence, True
        positions = np.where(inside, np.arange(length), 0).astype(np.int32)
        with jax.set_mesh(self._mesh):
            found = np.asarray(self._scores(self._params, tokens, positions, inside.astype(np.int32)))
        scale, centre = self._cfg.scale, self._cfg.centre
        return [
            error or scale * (self.combined(found[row, list(places[row])]) - centre)
            for row, error in enumerate(refused)
        ]

    def _too_long(self, problem_id: int, length: int) -> Exception | None:
        what = f"an answer to problem {problem_id} with its prompt, in tokens,"
        try:
            return check_length(self._cfg.model, length, what, path_of(self._cfg.model))
        except UserError as error:
            return error

    def scored(self, problem: Problem, answer: str) -> tuple[list[int], list[int]]:
        """Return the tokens that the model reads, and the places whose scores count: the last one."""
        read = completion_of(problem, answer, self.tokenizer)
        tokens = [*read.prompt.tolist(), *read.tokens.tolist()]
        return tokens, [len(tokens) - 1]

    def combined(self, scores: np.ndarray) -> float:
        """Return the score of an answer from those of its places."""
        return float(scores[-1])


def _power_of_two(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())
