"""Environments of other forms, by classes with the methods that those libraries have."""

import asyncio
import importlib
import inspect
from typing import Any

import gymnasium
import pytest

from mesh.errors import UserError
from rl.environments.adapters import GymEnvironment, PlainEnvironment, VerifiersEnvironment
from rl.environments.environment import Environment, Step, checked_step

ROW = {"question": "2+2?", "answer": "4", "family": "sums", "problem_id": 3, "seed": 5}


def play(environment: Environment, *actions: str) -> tuple[str, list[Step]]:
    async def awaited(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def episode() -> tuple[str, list[Step]]:
        first = await awaited(environment.reset(ROW))
        steps = [checked_step(await awaited(environment.step(action))) for action in actions]
        await awaited(environment.close())
        return first, steps

    return asyncio.run(episode())


class Plain:
    closed = 0

    def __init__(self, prize: float):
        self._prize = prize

    def reset(self, row: Any) -> str:
        return row["question"]

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", self._prize, action == "4"

    def close(self) -> None:
        Plain.closed += 1


def test_a_plain_class():
    cfg = PlainEnvironment.Config(make=Plain, arguments={"prize": 2.0})
    assert play(cfg.build(), "3", "4") == ("2+2?", [Step("", 2.0, False), Step("", 2.0, True)])
    assert Plain.closed == 1


class Corridor:
    """Environment of gymnasium's form."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self._place = seed or 0
        return self._place, {"row": options["row"]["problem_id"]}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._place += action
        return self._place, float(action), self._place >= 8, self._place < 0, {}


class OldCorridor(Corridor):
    """Environment of gym's form: no seed, no second value of `reset`, four of `step`."""

    def reset(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._place = 5
        return self._place

    def step(self, action: int) -> Any:
        place, reward, done, cut, info = super().step(action)
        return place, reward, done or cut, info


def test_environments_of_gymnasium_and_of_gym():
    for make in (Corridor, OldCorridor):
        cfg = GymEnvironment.Config(make=make, read=int, pure=True)
        assert play(cfg.build(), "1", "2") == ("5", [Step("6", 1.0, False), Step("8", 2.0, True)])
    assert play(GymEnvironment.Config(make=Corridor, read=int).build(), "-9")[1][0].done


class OldRubric:
    async def score_rollout(
        self, prompt: Any, completion: Any, answer: str, state: Any, **others: Any
    ) -> dict[str, Any]:
        right = float(completion[-1]["content"] == answer)
        return {"reward": right, "metrics": {"right": right, "messages": len(prompt) + len(completion)}}


class OldVerifiers:
    """Environment of the library's earlier form."""

    rubric = OldRubric()

    async def setup_state(self, state: dict[str, Any], **others: Any) -> dict[str, Any]:
        return {**state, "tries": 0}

    async def is_completed(self, messages: Any, state: dict[str, Any], **others: Any) -> bool:
        return messages[-1]["content"] == "4" or state["turn"] >= 3

    async def env_response(self, messages: Any, state: dict[str, Any], **others: Any) -> Any:
        state["tries"] += 1
        return [{"role": "user", "content": f"no, try {state['tries']}"}], state


class NewRubric:
    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["reward"] = float(state["completion"][-1]["content"] == state["answer"])


class NewVerifiers:
    """Environment of the library's later form."""

    rubric = NewRubric()

    async def is_completed(self, state: dict[str, Any]) -> bool:
        return len(state["trajectory"]) == 2

    async def env_response(self, messages: Any, state: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": "are"}, {"role": "user", "content": "you sure?"}]


def test_environments_of_verifiers():
    old = VerifiersEnvironment.Config(make=OldVerifiers).build()
    assert play(old, "3", "4") == ("", [Step("no, try 1", 0.0, False), Step("", 1.0, True)])
    assert old.figures() == {"right": 1.0, "messages": 4.0}
    cfg = VerifiersEnvironment.Config(make=NewVerifiers)
    new = cfg.build(shared=cfg.share())
    assert play(new, "4", "5") == ("", [Step("are\nyou sure?", 0.0, False), Step("", 0.0, True)])


def test_a_taskset_of_a_later_form_is_refused():
    with pytest.raises(UserError, match="Plain has no is_completed: expected an environment in the form of verifiers"):
        VerifiersEnvironment.Config(make=Plain, arguments={"prize": 1.0}).share()


# ---- the libraries themselves; verifiers, which needs many others, where it is installed


def test_a_world_of_gymnasium():
    lake: dict[str, Any] = {"id": "FrozenLake-v1", "is_slippery": False}
    cfg = GymEnvironment.Config(make=gymnasium.make, arguments=lake, read=int, pure=True)
    first, steps = play(cfg.build(), "1", "1", "2", "1", "2", "2")
    assert (first, [step.observation for step in steps]) == ("0", ["4", "8", "9", "13", "14", "15"])
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0] and steps[-1].done and not steps[-2].done


def test_an_environment_of_verifiers():
    library = pytest.importorskip("verifiers")
    if not hasattr(library, "MultiTurnEnv"):
        pytest.skip("verifiers of a later form")
    datasets = importlib.import_module("datasets")

    async def right(completion: Any, answer: str, **others: Any) -> float:
        return float(completion[-1].content == answer)

    class Guess(library.MultiTurnEnv):  # pyright: ignore
        async def env_response(self, messages: Any, state: Any, **others: Any) -> Any:
            return [{"role": "user", "content": f"no, not {messages[-1]['content']}"}]

    rows = datasets.Dataset.from_list([{"question": "2+2?", "answer": "4"}])
    made = lambda: Guess(dataset=rows, max_turns=2, rubric=library.Rubric(funcs=[right]))  # noqa: E731
    cfg = VerifiersEnvironment.Config(make=made)
    environment = cfg.build(shared=cfg.share())
    assert play(environment, "3", "4") == ("", [Step("no, not 3", 0.0, False), Step("", 1.0, True)])
    assert environment.figures() == {"right": 1.0, "num_turns": 2.0}
