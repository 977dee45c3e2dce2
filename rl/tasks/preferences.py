"""Right and wrong answers to the problems of a task mixture: pairs, and answers that are right or wrong alone."""

from typing import override

import numpy as np

from axlearn_like.config import REQUIRED
from axlearn_like.input import Chat, EncodedCompletion, preference, unpaired
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError
from rl.protocol.messages import Problem
from rl.tasks.encoding import encode_solution, messages_of
from rl.tasks.supervised import ProblemExamples

_ATTEMPTS = 32  # changed answers that are scored before a problem is given up


class PreferenceSource(ProblemExamples):
    """Pairs of a question with its answer and with a wrong one.

    The wrong answer is the right one with one character replaced by another of the same kind, two neighbours swapped,
    or one left out: near enough that only solving the problem tells them apart. The family's own score says that it is
    wrong.
    """

    labelled = True

    class Config(ProblemExamples.Config):
        num_examples: int = REQUIRED  # number of examples; if held out, of each family
        heldout: bool = False  # problems that training never sees, see `TaskMixture`
        seed: int = 0  # random seed of the wrong answers

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._heldout = self.mixture.heldout(cfg.num_examples) if cfg.heldout else None
        self._size = cfg.num_examples if self._heldout is None else len(self._heldout)
        self._seed = cfg.seed

    @override
    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return the example of both sequences (see `axlearn_like.input.preference`): the question and its answers."""
        problem = self.problem(index)
        return preference(self._completion(problem, problem.answer), self._completion(problem, self._wrong(problem)))

    @override
    def problem(self, index: int) -> Problem:
        if self._heldout is None or not 0 <= index < self._size:
            return super().problem(index)
        return self._heldout[index]

    def _completion(self, problem: Problem, answer: str) -> EncodedCompletion:
        return completion_of(problem, answer, self.tokenizer)

    def _wrong(self, problem: Problem) -> str:
        rng = np.random.default_rng((self._seed, problem.id))
        for _ in range(_ATTEMPTS):
            changed = changed_text(problem.answer, rng)
            if changed != problem.answer and self.mixture.score(problem, changed) < 1.0:
                return changed
        raise UserError(f"problem {problem.id}: no change of its answer {problem.answer!r} is scored as wrong")


def completion_of(problem: Problem, answer: str, tokenizer: Tokenizer) -> EncodedCompletion:
    """Return the whole sequence of a problem and an answer to it, as preferences in files have them.

    With a chat template it is the conversation to its last token, which may be behind the end of the answer.
    """
    if tokenizer.chat_template is None:
        prompt, drawn = encode_solution(problem, answer, tokenizer)
        return EncodedCompletion(prompt, drawn, np.ones(len(drawn), bool))
    asked = messages_of(problem)
    said = [*asked, {"role": "assistant", "content": answer}]
    chat = Chat.Config().build(tokenizer=tokenizer)
    return EncodedCompletion.of(*chat.encode_messages(said, problem.tools, f"problem {problem.id}", first=len(asked)))


class JudgedSource(PreferenceSource):
    """Answers that are right or wrong, in turn (see `axlearn_like.input.unpaired`)."""

    @override
    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return the example of an answer, right for even indices, and of the next problem's answer."""
        problem, other = self.problem(index), self.problem((index + 1) % len(self))
        right = index % 2 == 0
        answer = problem.answer if right else self._wrong(problem)
        return unpaired(self._completion(problem, answer), right, self._completion(other, other.answer))


def changed_text(text: str, rng: np.random.Generator) -> str:
    """Return a text with one change; it may be the same by chance."""
    place = int(rng.integers(len(text)))
    way = rng.choice(["replace", "swap", "drop"], p=[0.6, 0.3, 0.1])
    if way == "swap" and len(text) > 1:
        place = min(place, len(text) - 2)
        return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    if way == "drop" and len(text) > 1:
        return text[:place] + text[place + 1 :]
    kinds = ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "+-")
    letters = next((kind for kind in kinds if text[place] in kind), kinds[0])
    return text[:place] + str(rng.choice(list(letters))) + text[place + 1 :]
