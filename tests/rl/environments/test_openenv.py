"""Environments behind a server of OpenEnv: the library's own, in an environment of its own.

AXL_OPENENV_PYTHON names an interpreter with `openenv==0.10.0`.
"""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import reach
from rl.environments.environment import Step, checked_step
from rl.environments.openenv import OpenEnvEnvironment

PYTHON = os.environ.get("AXL_OPENENV_PYTHON", "")
real = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON, reason="AXL_OPENENV_PYTHON names no interpreter with openenv 0.10"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the library in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(__file__).with_name("openenv_server.py"))
    process = subprocess.Popen([PYTHON, program, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def row(**more: Any) -> dict[str, Any]:
    return {"question": "guess", "answer": "", "family": "guess", "problem_id": 3, "seed": 5, **more}


async def episode(cfg: OpenEnvEnvironment.Config, given: dict[str, Any], *actions: str) -> tuple[str, list[Step]]:
    environment: Any = cfg.build()
    try:
        first = await environment.reset(given)
        return first, [checked_step(await environment.step(action)) for action in actions]
    finally:
        await environment.close()


class TestServer:
    """Against the library."""

    pytestmark = real

    def test_a_field_of_the_observation_is_what_the_policy_sees(self, url: str):
        cfg = OpenEnvEnvironment.Config(url=url, shown="hint")
        first, steps = asyncio.run(episode(cfg, row(reset={"secret": 9}), "3", '{"message": "12"}', "9"))
        assert first == "Guess, episode 3."
        assert steps == [Step("higher", 0.25), Step("lower", 0.25), Step("yes", 1.0, True)]

    def test_episodes_side_by_side_have_worlds_of_their_own(self, url: str):
        cfg = OpenEnvEnvironment.Config(url=url, shown="hint")

        async def both() -> Any:
            games = (episode(cfg, row(reset={"secret": n}), "5", str(n)) for n in (4, 6))
            return await asyncio.gather(*games)

        (_, low), (_, high) = asyncio.run(both())
        assert [step.observation for step in low] == ["lower", "yes"]
        assert [step.observation for step in high] == ["higher", "yes"]

    def test_what_the_server_refuses_is_an_error_with_its_words(self, url: str):
        with pytest.raises(RuntimeError, match="answered step with .*no such number"):
            asyncio.run(episode(OpenEnvEnvironment.Config(url=url), row(), "crash"))
        with pytest.raises(RuntimeError, match="the observation has no 'clue'; it has .*hint"):
            asyncio.run(episode(OpenEnvEnvironment.Config(url=url, shown="clue"), row()))


def test_a_text_of_somebodys_needs_consent_for_the_server():
    assert list(reach(OpenEnvEnvironment.Config(url="http://127.0.0.1:8000"))) == ["http://127.0.0.1:8000"]


def test_a_server_that_is_not_there_ends_the_episode():
    with pytest.raises(OSError, match="Cannot connect to host 127.0.0.1:9"):
        asyncio.run(episode(OpenEnvEnvironment.Config(url="http://127.0.0.1:9"), row()))
