"""A task of a verifiers taskset as an agent's program: `PYTHON verifiers_program.py FILE.py:TASKSET [HARNESS]`.

PYTHON is that of an environment with verifiers 0.4; nothing of this project is imported. TASKSET is a class or a
function without arguments that gives a taskset; the row's `task`, else its `problem_id`, is the number of a task. The
library and its harness run as they are, in subprocesses of this machine, and ask the policy at OPENAI_BASE_URL; the
trace's reward is the episode's.
"""

import asyncio
import importlib
import itertools
import json
import os
import sys
import urllib.request
from typing import Any


def load(place: str) -> Any:
    """Return the taskset that a file makes; the library starts tool servers by the name of their module."""
    path, _, name = place.rpartition(":")
    folder, file = os.path.split(os.path.abspath(path))
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    return getattr(importlib.import_module(file.removesuffix(".py")), name)()


async def run(task: Any, harness: str) -> Any:
    """Return the trace of the policy's attempt at a task."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    cfg = vf.AgentConfig(
        model=os.environ["OPENAI_MODEL"],
        harness={"id": harness},
        runtime=vf.SubprocessConfig(),
        client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
    )
    async with vf.make_agent(cfg) as agent:
        return await agent.run(task)


def main() -> None:
    """Attempt the row's task, and give its reward."""
    place, *harness = sys.argv[1:]
    # The harness installs its packages with `uv`, which is beside this interpreter.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    row = json.load(sys.stdin)
    number = int(row["task"] if "task" in row else row["problem_id"])
    task = next(itertools.islice(iter(load(place)), number, None))
    trace = asyncio.run(run(task, *harness or ["null"]))
    if trace.errors:
        sys.exit(f"verifiers: {trace.errors[0].type}: {trace.errors[0].message}")
    rewards = {name: float(getattr(one, "value", one)) for name, one in trace.rewards.items()}
    body = json.dumps(
        {"reward": float(trace.reward), "metrics": {f"reward_{n}": value for n, value in rewards.items()}}
    )
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["AXL_REWARD_URL"], body.encode(), headers)).read()


if __name__ == "__main__":
    main()
