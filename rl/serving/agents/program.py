"""An agent as a program: started for each episode, it asks the policy over OpenAI's protocol, and ends.

It gets the row on its standard input as JSON, and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Its answers come
from the policy's own draws of the rollout, so that what is trained on is what it has seen, token by token.
"""

import dataclasses
import json
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

from axlearn_like.config import REQUIRED
from axlearn_like.run.child_group import ChildGroup
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError, install_hint
from rl.environments.environment import Ask, Environment, Row, Step
from rl.protocol.messages import Problem, Rollout

if TYPE_CHECKING:
    from rl.serving.agents.endpoint import AgentEndpoint

_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")  # variables that every program gets
_WORDS = 380  # characters of its output that an error quotes


class AgentProgram(Environment):
    """The environment of an agent: its requests are observations, and the policy's turns are their answers.

    The reward is what the program sends to AXL_REWARD_URL, and with `verify` the verifier's score of the last answer.
    """

    class Config(Environment.Config):
        command: tuple[str, ...] = REQUIRED  # program and arguments
        variables: tuple[str, ...] = ()  # names of environment variables that it gets, besides PATH, HOME and others
        max_turns: int = 32
        deadline_s: float = 120.0  # seconds from an answer to the next request, or to the program's end

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("command", bool(self.command), "a program and its arguments")

        @override
        def reaches(self) -> tuple[str, ...]:
            command = () if repr(self.command) == "REQUIRED" else self.command
            run = f"run:{shlex.join(command)}"
            return tuple(f"{name}@{run}" for name in self.variables) or (run,)

        @override
        def prepare(self, problem: Problem) -> Problem:
            return dataclasses.replace(problem, asked_by_environment=True)

        @override
        def share_with(self, tokenizer: Tokenizer) -> "AgentEndpoint":
            try:
                from rl.serving.agents.endpoint import AgentEndpoint
            except ImportError as error:
                raise UserError(f"agents need a web server: {install_hint('serve')}") from error
            return AgentEndpoint(tokenizer)

    def __init__(self, cfg: Config, *, shared: "AgentEndpoint"):
        super().__init__(cfg, shared=shared)
        self._command, self._variables, self._verify = cfg.command, cfg.variables, cfg.verify
        self._url, self._session = shared.open()
        self._folder = tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True)
        self._process: ChildGroup | None = None

    @override
    async def reset(self, row: Row) -> Ask:  # pyright: ignore[reportIncompatibleMethodOverride]
        folder = Path(self._folder.name)
        (folder / "row.json").write_text(json.dumps(dict(row), default=str))
        given = {name: os.environ[name] for name in (*_PASSED, *self._variables) if name in os.environ}
        asked = {"OPENAI_BASE_URL": f"{self._url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "policy"}
        with open(folder / "row.json", "rb") as said, open(folder / "output.txt", "wb") as output:
            self._process = ChildGroup(
                self._command,
                stdin=said,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**given, **asked, "AXL_REWARD_URL": f"{self._url}/reward"},
                grace=0.0,
            )
        threading.Thread(target=self._watch, args=(self._process,), name="agent", daemon=True).start()
        if isinstance(event := await self._session.next(), Ask):
            return event
        raise RuntimeError(f"the agent ended with status {event.status} and asked nothing; {self._words()}")

    @override
    async def step(self, action: Any) -> Step:
        assert isinstance(action, Rollout)
        self._session.answer(action)
        if isinstance(event := await self._session.next(), Ask):
            return Step(event)
        if self._session.reward is None and (event.status or not self._verify):
            expected = "expected a reward at AXL_REWARD_URL, or verify=True"
            raise RuntimeError(f"the agent ended with status {event.status}; {expected}; {self._words()}")
        return Step(reward=self._session.reward or 0.0, done=True)

    @override
    def figures(self) -> Mapping[str, float]:
        return {"requests": self._session.requests, **self._session.metrics}

    @override
    def close(self) -> None:
        self.shared.forget(self._url)
        if self._process is not None:
            self._process.kill_group()
        self._folder.cleanup()

    def _watch(self, process: ChildGroup) -> None:
        self._session.end(process.wait())

    def _words(self) -> str:
        said = (Path(self._folder.name) / "output.txt").read_bytes()[-_WORDS:].decode(errors="replace").strip()
        return f"its last words: {said}" if said else "it said nothing"
