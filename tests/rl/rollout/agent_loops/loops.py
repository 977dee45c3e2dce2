"""Parts of the tests of agent loops: a request of one loop, and a loop of given commands."""

from collections.abc import Generator
from typing import Any

from rl.rollout.agent_loops.commands import AgentLoop, Command, Completion
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import RequestOutput, StopConditions
from tests.rl.rollout.small import drain, request

Commands = Generator[Command, Any, None]
WHOLE = StopConditions()  # full length


def run(engine: RolloutEngine, agent_loop: AgentLoop, number: int = 3, **fields: Any) -> RequestOutput:
    fields = {"samples": 1, "stop": WHOLE, **fields}
    submitted = engine.submit(request(number, agent_loop=agent_loop, **fields))
    return drain(engine)[submitted]


def commands(*steps: Command) -> AgentLoop:
    def agent_loop(completion: Completion) -> Commands:
        yield from (step for step in steps)  # unlike a tuple's, its iterator takes answers

    return agent_loop
