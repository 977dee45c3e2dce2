"""An OpenEnv server for tests, by the library itself: `PYTHON openenv_server.py PORT`."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# ruff: noqa: D101, D102

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._secret, self._count = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Hint:
        self._secret, self._count = int(others.get("secret", 7)), 0
        return Hint(hint=f"Guess, episode {episode_id}.", done=False, reward=None)

    def step(self, action: Guess, timeout_s: float | None = None, **others: Any) -> Hint:
        self._count += 1
        if action.message == "crash":
            raise ValueError("no such number")
        if action.message.strip() == str(self._secret):
            return Hint(hint="yes", done=True, reward=1.0)
        return Hint(hint="higher" if int(action.message) < self._secret else "lower", done=False, reward=0.25)

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=self._count)


app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=16)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
