"""Environments of other forms, by classes with the methods that those libraries have."""

import asyncio
import inspect
from typing import Any

import gymnasium

from rl.environments.adapters import GymEnvironment, PlainEnvironment
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


# ---- the library itself


def test_a_world_of_gymnasium():
    lake: dict[str, Any] = {"id": "FrozenLake-v1", "is_slippery": False}
    cfg = GymEnvironment.Config(make=gymnasium.make, arguments=lake, read=int, pure=True)
    first, steps = play(cfg.build(), "1", "1", "2", "1", "2", "2")
    assert (first, [step.observation for step in steps]) == ("0", ["4", "8", "9", "13", "14", "15"])
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0] and steps[-1].done and not steps[-2].done
