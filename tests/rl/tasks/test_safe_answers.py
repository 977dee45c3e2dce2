"""No answer reaches a scorer that would run it as code, and answers of the right form score as before."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl.tasks.family import TaskFamily
from rl.tasks.reasoning_gym import import_reasoning_gym
from rl.tasks.safe_answers import EVALUATED, readable

FAMILIES = {name: TaskFamily(TaskFamily.Config(name=name), seed=0) for name in sorted(EVALUATED)}


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mark"
    yield path
    assert not path.exists()


@pytest.mark.parametrize("name", sorted(EVALUATED))
def test_an_answer_does_not_run(name: str, mark: Path):
    item = FAMILIES[name].item(3)
    call = f"open({str(mark)!r}, 'w')"
    lambdas = f"(lambda: {call})()"
    for answer in (call, lambdas, f"[{call} for x in [1]]", f"[*map(open, [{str(mark)!r}], 'w')]", f"C*{call}"):
        assert FAMILIES[name].score(answer, item) <= 0.01
    # It is the check that stops them: the package's own scorer runs the first.
    import_reasoning_gym().get_score_answer_fn(name)(call, item)
    assert mark.exists(), "the scorer of this family evaluates nothing: take it off the list"
    mark.unlink()


@pytest.mark.parametrize("name", sorted(EVALUATED))
def test_what_cannot_be_read_in_time_is_not_read(name: str):
    item = FAMILIES[name].item(3)
    for answer in ("9**9**9**9", "[" * 5000 + "]" * 5000, "-" * 19_000 + "1", "(" * 49 + "1" + ")" * 49, "1" * 50_000):
        assert FAMILIES[name].score(answer, item) <= 0.05


@pytest.mark.parametrize("name", sorted(EVALUATED))
def test_answers_of_the_task_score_as_the_package_scores_them(name: str):
    package = import_reasoning_gym().get_score_answer_fn(name)
    for index in range(3):
        item = FAMILIES[name].item(index)
        for answer in (item["answer"], f" {item['answer']} ", item["answer"][:-1] + "7", "", "no idea", "1 2 3"):
            assert FAMILIES[name].score(answer, item) == package(answer, item)


@pytest.mark.parametrize(
    ("name", "answer", "passes"),
    [
        ("spiral_matrix", "[1, 2, -3]", True),
        ("n_queens", "[['Q', '_'], ['_', 'Q']]", True),
        ("spiral_matrix", "[1] * 9", False),
        ("spiral_matrix", "{1: 2}", False),
        ("countdown", "(1 + 2) * 3 / -4 - 5", True),
        ("countdown", "2 ** 3", False),
        ("countdown", "x + 1", False),
        ("countdown", "'1' + '2'", False),
        ("puzzle24", "(1)(2)", False),
        ("simple_integration", "2*X**3/3 - X**(1/2) + C", True),
        ("simple_integration", "X**C", False),
        ("simple_integration", "X.free_symbols", False),
    ],
)
def test_what_passes(name: str, answer: str, passes: bool):
    entry = {"answer": "-", "metadata": {"variable": "X"}}
    assert readable(name, answer, entry) == (answer if passes else "")


@pytest.mark.full
def test_no_other_family_runs_an_answer():
    """Every dataset of the package scores an answer while Python reports what is compiled."""
    gym = import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    compiled: list[str] = []
    watching = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching[0] or event != "compile":
            return
        source, filename = arguments
        module = str(filename).endswith(".py")  # one that a family imports: matplotlib names a colour so
        if b"poison" in bytes(source or b"") and not module:
            compiled.append(current)

    sys.addaudithook(hook)
    current = ""
    for name in sorted(DATASETS):
        current = name
        try:
            dataset = gym.create_dataset(name, size=3, seed=1)
            dataset.score_answer("poison(1)", dataset[0])
        except Exception:
            continue
    watching[0] = False
    assert set(compiled) - {"intermediate_integration", "polynomial_multiplication"} == set(EVALUATED)  # both refused
