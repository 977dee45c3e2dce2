"""Checks that the problems of a run fit its sizes, made once before anything expensive."""

from collections.abc import Iterable

from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError
from rl.roles.messages import Problem
from rl.tasks.mixture import TaskMixture, encode_prompt


def check_prompts(
    tasks: TaskMixture, tokenizer: Tokenizer, *, max_prompt: int, num_train: int, per_family: int
) -> None:
    """Refuse prompts that are too long, and held-out questions that are trained on.

    Args:
        tasks: where the problems come from.
        tokenizer: counts the tokens of a prompt.
        max_prompt: tokens that a prompt may have.
        num_train: the first training problems, which are looked at.
        per_family: held-out problems of each family; 0: there is no evaluation.

    Raises:
        UserError: names the problem, its family and its length.
    """
    training = ((f"training problem {index}", tasks.train(index)) for index in range(num_train))
    _check_lengths(training, tokenizer, max_prompt)
    if per_family:
        tasks.check_disjoint(num_train, per_family)
        heldout = ((f"held-out problem {problem.id}", problem) for problem in tasks.heldout(per_family))
        _check_lengths(heldout, tokenizer, max_prompt)


def _check_lengths(problems: Iterable[tuple[str, Problem]], tokenizer: Tokenizer, max_prompt: int) -> None:
    for name, problem in problems:
        length = len(encode_prompt(problem.question, tokenizer))
        if length > max_prompt:
            raise UserError(
                f"{name} of family {problem.family!r} has {length} prompt tokens; max_prompt is {max_prompt}"
            )
