"""The library verifiers itself: its tasksets play our policy, and its training client reads our endpoint.

It runs by an interpreter of its own, which AXL_VERIFIERS_PYTHON names: an environment with `verifiers==0.4.0` and `uv`.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.environments.environment import Ask
from rl.protocol.messages import Rollout
from rl.serving.agents import verifiers_program
from rl.serving.agents.program import AgentProgram
from tests.rl.serving.agents.test_program import (  # noqa: F401
    TOKENIZER,
    engine,
    one_engine,
    play,
    tokenizer,
)
from tests.rl.serving.running import MODEL, running

PYTHON = os.environ.get("AXL_VERIFIERS_PYTHON", "")
TASKSET = f"{Path(__file__).with_name('verifiers_sums.py')}:sums"
VARIABLES = ("SSL_CERT_FILE",)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON, reason="AXL_VERIFIERS_PYTHON names no interpreter with verifiers 0.4"),
]
SHOWN = (
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\n{% endfor %}assistant: {# <tool_call> #}"
)


def program(**changes: Any) -> AgentProgram.Config:
    command = (PYTHON, verifiers_program.__file__, TASKSET)
    return AgentProgram.Config(command=command, variables=VARIABLES, **changes)


def test_a_taskset_with_a_tool_plays_the_policy(tmp_path: Path):
    """Answers are given here in place of the policy, which would have to be able to add."""
    (tmp_path / "shown.jinja").write_text(SHOWN)
    own = TOKENIZER.clone(chat_template=str(tmp_path / "shown.jinja")).build()
    cfg = program()
    environment: Any = cfg.build(shared=(shared := cfg.share_with(own)))

    def say(text: str) -> Rollout:
        tokens = np.asarray([*own.encode(text), own.stop_ids[0]], np.int32)
        size = len(tokens)
        given = np.zeros(size, np.float32), np.zeros(size, np.int32), np.ones(size, bool)
        return Rollout(0, 0, tokens, *given, "stop")

    async def episode() -> tuple[str, str, Any]:
        first = await environment.reset({"task": 3})
        assert isinstance(first, Ask)
        asked = own.decode(first.tokens.tolist())
        (name,) = set(re.findall(r'"name": "(\w*add)"', asked))
        call = json.dumps({"name": name, "arguments": {"a": 2, "b": 3}})
        second = (await environment.step(say(f"<tool_call>{call}</tool_call>"))).observation
        return asked, own.decode(second.tokens.tolist()), await environment.step(say("5"))

    try:
        asked, answered, last = asyncio.run(episode())
        assert "user: What is 2+3?" in asked and "Add two integers." in asked
        assert answered.startswith(asked) and "tool: " in answered and "5" in answered[len(asked) + 60 :]
        assert last.done and last.reward == 1.5
        assert environment.figures() == {"requests": 2, "reward_right": 1.0, "reward_said": 0.5}
    finally:
        environment.close()
        shared.close()


def test_its_episodes_are_rollouts_of_the_engine(engine: Any):  # noqa: F811
    _, (rollout,) = play(engine, program(), samples=1)
    episode = rollout.episode
    assert episode is not None and (episode.ended, episode.error) == ("done", "")
    assert sum(turn.reward for turn in episode.turns) in (0.0, 0.5, 1.5)
    assert np.all(rollout.logprobs[rollout.action_mask] < 0) and "reward_right" in dict(episode.figures)


@pytest.mark.numerics
def test_its_training_client_reads_our_tokens_and_log_probabilities(engine: Any, tmp_path: Path):  # noqa: F811
    folder = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER.path, folder)
    (folder / "chat_template.jinja").write_text(SHOWN)
    with running(engine, tokenizer=tokenizer) as served:
        script = str(Path(__file__).with_name("verifiers_client.py"))
        ran = subprocess.run(
            [PYTHON, script, served.url, MODEL, str(folder)], capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        tokens = json.loads(ran.stdout)["tokens"]
        sampling = {"max_tokens": 8, "seed": 5, "logprobs": 1, "temperature": 1.0}
        body = {"model": MODEL, "token_ids": tokens["prompt_ids"], "sampling_params": sampling}
        choice = served.post("/inference/v1/generate", body)[1]["choices"][0]
        assert tokens["completion_ids"][: len(choice["token_ids"])] == choice["token_ids"]
        found = [one["logprob"] for one in choice["logprobs"]["content"]]
        np.testing.assert_allclose(tokens["completion_logprobs"], found, atol=1e-5)
