"""Workers, tools and verifiers that are killed in the middle of programs: the rollouts are the same to the bit.

Four characters of an action are a call of Python in the sandbox, which a watch starts at the first of them. Each action
is followed by what a child of the sample, drawn by the base, says of it. Plans have nodes, which are trained on.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, override

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from rl.environments.calls import Call, CallForm
from rl.environments.environment import Consult, Step
from rl.environments.streaming.events import ArgumentPart, Event, Finished, Started
from rl.environments.streaming.reader import PartialExecution
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.python import PythonTool
from rl.experiment import RLExperiment
from rl.objective import NodeAdvantage
from rl.rollout.engine import RolloutEngine
from rl.runtime.policies.runs import open_policy_runs
from rl.runtime.ray.runtime import run_ray
from rl.verification.sandbox.sandbox import Sandbox
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier
from tests.rl.rollout.agent_loops.graph.test_training import plans
from tests.rl.runtime.policies.role_games import duel
from tests.rl.runtime.policies.test_roles import run as undisturbed
from tests.rl.runtime.ray.experiments import (
    assert_same_outcome,
    checksums,
    events,
    metrics,
    parameters,
    run_here,
    slow_share,
)
from tests.rl.runtime.ray.test_preemption import Scenario
from tests.rl.verification.processes import descendants

pytestmark = [pytest.mark.full, pytest.mark.timeout(900), pytest.mark.usefixtures("shared_session")]

TURNS, STEPS = 3, 8
CODE = "import time\ntime.sleep(0.03)\nseen = [*globals().get('seen', []), {}]\nsum(seen)"


class Fours(CallForm):
    """Every four characters are a call of Python, of which the first one is the argument."""

    class Config(CallForm.Config):
        pass

    def __init__(self, cfg: Config):
        del cfg

    @override
    def calls(self, action: str) -> list[Call]:
        return [Call("python", text=CODE.format(ord(one))) for one in action[::4]]

    @override
    def events(self, action: str) -> list[Event]:
        return [event for number in range((len(action) + 3) // 4) for event in self._events(action, number)]

    def _events(self, action: str, number: int) -> list[Event]:
        first, source = 4 * number + 1, action[4 * number :][:4]
        lines = CODE.format(ord(source[0])).splitlines(keepends=True)
        parts = [ArgumentPart(number, "", line, first) for line in lines]
        finished = [Finished(number, source, first + 3)] if len(source) == 4 else []
        return [Started(number, "python", first), *parts, *finished]

    @override
    def results(self, results: Sequence[str]) -> str:
        return f"<{results[-1]}>"

    @override
    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        raise NotImplementedError


class Discussed(ToolEnvironment):
    """The base says something of each action; the last one is judged."""

    class Config(ToolEnvironment.Config):
        pass

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._turn, self._seen = 0, ""

    @override
    async def step(self, action: str) -> Any:
        self._turn += 1
        self._seen = (await super().step(action)).observation
        return Consult("base", f"{self._turn}{self._seen}?"[:8], 3)

    @override
    def hear(self, answer: str) -> Step:
        return Step(f"{self._seen}{len(answer)}", done=self._turn == TURNS)


def programs() -> RLExperiment.Config:
    cfg: Any = duel({"a": {}})
    python = PythonTool.Config(sandbox=Sandbox.Config(processes=4, deadline_s=60.0))  # the machine may be busy
    game = Discussed.Config(
        tools=(python,), calls=Fours.Config(), partial=PartialExecution.Config(recheck_every=0),
        consults=("base",), max_turn_tokens=6, deadline_s=240.0,
    )  # fmt: skip
    for family in cfg.tasks.families:
        family.environment = game
    cfg.set(max_new_tokens=60, num_steps=STEPS, workers=1, evaluation=None)
    cfg.engine = RolloutEngine.Config(max_num_seqs=4, steps_per_dispatch=1)
    cfg.verifier = Verifier.Config(scorer=FunctionScorer.Config(function=slow_share), processes=1)
    return cfg


class Killed(Scenario):
    def below(self) -> list[int]:
        """Return the processes below the worker: the sandbox and, while an episode goes on, its boxes."""
        return descendants(events(self.path, "start", "worker-0")[-1]["pid"])

    def plays(self) -> bool:
        return len(self.below()) > 3

    def kill_tools(self) -> None:
        for pid in self.below():
            with suppress(ProcessLookupError):  # it went with another
                os.kill(pid, signal.SIGKILL)


def run(path: Path, scenario: Any) -> Path:
    cfg = programs()
    experiment = cfg.build()
    with RunDirectory.open(path, to_text(cfg)) as opened, open_policy_runs(experiment, opened):
        run_ray(experiment, opened, lambda: False, scenario, lambda line: None)
    return path / "policies" / "a"


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the metrics without those of calls that ran ahead: how many do is a matter of time."""
    return [{name: one for name, one in row.items() if "partial" not in name} for row in metrics(path)]


def test_kill_9_of_workers_tools_and_verifiers_in_the_middle_of_programs(tmp_path: Path) -> None:
    assert undisturbed(tmp_path / "here", programs()) is not None
    scenario = Killed(tmp_path / "run")
    scenario.when(lambda: scenario.step >= 1 and scenario.plays(), lambda: scenario.send("worker-0", signal.SIGKILL))
    back = lambda: scenario.starts("worker-0") == 2 and scenario.step >= 3  # noqa: E731
    scenario.when(lambda: back() and scenario.plays(), scenario.kill_tools)
    scenario.when(lambda: scenario.step >= 5 and scenario.plays(), lambda: scenario.send("verifier", signal.SIGKILL))
    found = run(tmp_path / "run", scenario)
    expected = tmp_path / "here" / "policies" / "a"
    assert scenario.acts == [] and scenario.starts("verifier") == 2 and events(found, "lease_expired")
    assert rows(found) == rows(expected) and len(rows(found)) == STEPS
    assert parameters(found) == parameters(expected) and checksums(found) == checksums(expected)
    assert all(row["episode/turns"] == TURNS and row["episode/failures"] == 0 for row in metrics(found))
    names = {name for row in events(found, "program") for name, _ in row["lanes"]}
    assert {"sample 0", "sample 0: tools", "child 1", f"child {TURNS}"} <= names
    assert sum(row["episode/partial_calls"] for row in metrics(found)) > 0
    assert all(row["episode/tool_errors"] == 0 for row in metrics(found))


def planned() -> RLExperiment.Config:
    verifier = Verifier.Config(scorer=FunctionScorer.Config(function=slow_share), processes=1)
    cfg = plans(num_steps=STEPS, workers=1, verifier=verifier)
    cfg.engine = RolloutEngine.Config(max_num_seqs=4, steps_per_dispatch=1)
    cfg.graph.path_cost = 0.001
    cfg.objective.advantage = NodeAdvantage.Config()
    return cfg


def test_kill_9_of_workers_and_verifiers_in_the_middle_of_plans(tmp_path: Path) -> None:
    expected = run_here(tmp_path / "here", planned())
    scenario, cfg = Scenario(tmp_path / "run"), planned()
    scenario.when(lambda: scenario.step >= 1, lambda: scenario.send("worker-0", signal.SIGKILL))
    back = lambda: scenario.starts("worker-0") == 2 and scenario.step >= 3  # noqa: E731
    scenario.when(back, lambda: scenario.send("verifier", signal.SIGKILL))
    late = lambda: scenario.starts("verifier") == 2 and scenario.step >= 5  # noqa: E731
    scenario.when(late, lambda: scenario.send("worker-0", signal.SIGKILL))
    with RunDirectory.open(scenario.path, to_text(cfg)) as opened:
        assert run_ray(cfg.build(), opened, lambda: False, scenario, lambda line: None) == STEPS
    assert scenario.acts == [] and scenario.starts("worker-0") == 3 and events(scenario.path, "lease_expired")
    assert_same_outcome(scenario.path, expected)
    found = metrics(scenario.path)
    assert [row["nodes"] for row in found] == [4 * 4 * 2] * STEPS
    assert all(row["episode/critical_path"] > 0 and row["episode/plan_errors"] == 0 for row in found)
