"""A task with an environment is its source in everything else."""

from rl.environments.task import EnvironmentTask, environments_of
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.calculator import Calculator
from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture
from rl.tasks.source import ProblemSource
from tests.rl.environments.toys import Echo
from tests.rl.tiny import tiny_tasks

CALCULATOR = ToolEnvironment.Config(tools=(Calculator.Config(),))


def test_problems_and_scores_are_those_of_the_source():
    plain = tiny_tasks().families
    assert isinstance(plain[0], ProblemSource.Config)
    tasks = tiny_tasks().set(families=(EnvironmentTask.Config(source=plain[0], environment=CALCULATOR), plain[1]))
    one, other = tasks.build(), tiny_tasks().build()
    assert one.family_names == other.family_names
    assert [one.train(n) for n in range(8)] == [other.train(n) for n in range(8)]
    assert one.heldout(3) == other.heldout(3)
    problem = one.train(0)
    assert one.score(problem, problem.answer) == 1.0 and one.vote(problem, " a ") == "a"
    assert [one.environment(one.train(n).id) is None for n in range(2)] == [False, True]
    assert environments_of(tasks) == [CALCULATOR] and environments_of(tiny_tasks()) == []


def test_a_label_names_the_task():
    source = TaskFamily.Config(name="products")
    mixture = TaskMixture.Config(
        families=(
            EnvironmentTask.Config(source=source, environment=CALCULATOR, label="with", weight=3.0),
            EnvironmentTask.Config(source=source.clone(), environment=Echo.Config()),
        )
    ).build()
    assert mixture.family_names == ("with", "products")
    assert [mixture.train(n).family for n in range(4)].count("with") == 3
