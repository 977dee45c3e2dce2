"""Demonstrations: the tokens of an episode with given actions, and the loss on these alone."""

from collections.abc import Sequence
from typing import cast

import pytest

from mesh import UserError
from rl.environments.calls import TextCalls
from rl.environments.demonstrations import Demonstrations
from rl.environments.environment import Environment
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.calculator import Calculator
from rl.protocol.messages import Problem
from tests.rl.environments.toys import TOKENIZER, Echo, tasks

TOOLS = ToolEnvironment.Config(tools=(Calculator.Config(),))


def with_a_call(problem: Problem) -> Sequence[str]:
    return TextCalls.Config().build().call("calculator", {"expression": f"{problem.answer} + 1"}), "done"


def too_short(problem: Problem) -> Sequence[str]:
    del problem
    return ("a", "b")


def too_long(problem: Problem) -> Sequence[str]:
    del problem
    return ("a", "b", "c", "d")


def source(environment: Environment.Config, actions: object) -> Demonstrations:
    cfg = Demonstrations.Config(mixture=tasks(environment), actions=actions, num_examples=8)  # pyright: ignore
    return cast(Demonstrations, cfg.build())


def test_actions_are_learned_and_what_is_given_is_not():
    made = source(TOOLS, with_a_call)
    example = made[2]
    number = int(TOKENIZER.decode(example["tokens"]).partition("\n")[0].removeprefix("q"))
    pieces = (f"q{number}\n", f"<tool>calculator: {number} + 1</tool>", f"<result>{number + 1}</result>", "done")
    assert TOKENIZER.decode(example["tokens"]) == "".join(pieces)
    lengths = [1 + len(pieces[0]), len(pieces[1]), len(pieces[2]), len(pieces[3]) + 1]  # bos before, eos behind
    assert example["tokens"][-1] == TOKENIZER.eos and len(example["tokens"]) == sum(lengths)
    learned = [n % 2 == 1 for n, length in enumerate(lengths) for _ in range(length)]
    assert example["loss_mask"].tolist() == learned
    assert len(made) == len(list(made)) == 8


@pytest.mark.parametrize(("actions", "when"), [(too_short, "not with"), (too_long, "before")])
def test_actions_that_are_no_whole_episode_are_refused(actions: object, when: str):
    with pytest.raises(UserError, match=f"over {when} its last action"):
        source(Echo.Config(), actions)[0]
