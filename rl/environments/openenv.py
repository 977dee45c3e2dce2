"""Environments behind an OpenEnv server, over its WebSocket: one connection an episode, by its own protocol.

https://github.com/meta-pytorch/OpenEnv: `reset` and `step` are messages, answered by observation, reward and end.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, override
from urllib.parse import urlsplit

from axlearn_like.config import REQUIRED
from mesh.errors import UserError, install_hint
from rl.environments.calls import json_or
from rl.environments.environment import Environment, Row, Step

_MAX_MESSAGE = 1 << 24  # bytes of an observation


class OpenEnvEnvironment(Environment):
    """An environment of a server. Actions are the text of the policy, or the JSON object in it, in one field."""

    class Config(Environment.Config):
        url: str = REQUIRED  # address of the server, such as http://127.0.0.1:8000
        field: str = "message"  # field of an action that has the policy's text, where that is no JSON object
        shown: str = ""  # field of an observation that the policy sees; "": all of it, as JSON
        # Function from the policy's text to the fields of an action, in place of `field`.
        read: Callable[[str], Mapping[str, Any]] | None = None

        @override
        def check_fields(self) -> None:
            super().check_fields()
            known = repr(self.url) == "REQUIRED" or urlsplit(self.url).scheme in ("http", "https")
            self.require("url", known, "an address such as http://127.0.0.1:8000")

        @override
        def reaches(self) -> tuple[str, ...]:
            parts = urlsplit("" if repr(self.url) == "REQUIRED" else self.url)
            return (f"{parts.scheme}://{parts.netloc}".lower(),)

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._url, self._field, self._shown, self._read = cfg.url, cfg.field, cfg.shown, cfg.read
        self._session: Any = None
        self._socket: Any = None

    @override
    async def reset(self, row: Row) -> str:
        try:
            import aiohttp
        except ImportError as error:
            raise UserError(f"OpenEnv needs aiohttp: {install_hint('openenv')}") from error
        self._session = aiohttp.ClientSession()
        address = re.sub(r"^http", "ws", self._url.rstrip("/")) + "/ws"
        self._socket = await self._session.ws_connect(address, max_msg_size=_MAX_MESSAGE)
        given = {"seed": row["seed"], "episode_id": str(row["problem_id"]), **row.get("reset", {})}
        return self._text((await self._ask("reset", given)).get("observation", {}))

    @override
    async def step(self, action: str) -> Step:
        found = await self._ask("step", self._action(action))
        reward, done = found.get("reward"), bool(found.get("done"))
        return Step(self._text(found.get("observation", {})), float(reward or 0.0), done)

    @override
    async def close(self) -> None:
        try:
            if self._socket is not None and not self._socket.closed:
                await self._socket.send_str(json.dumps({"type": "close"}))
                await self._socket.close()
        finally:
            if self._session is not None:
                await self._session.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the answer to a message (RuntimeError: the server says that something is wrong)."""
        await self._socket.send_str(json.dumps({"type": kind, "data": dict(data)}))
        answer = json.loads(await self._socket.receive_str())
        if answer.get("type") != "observation":
            raise RuntimeError(f"the server answered {kind} with {json.dumps(answer)[:300]}")
        return answer["data"]

    def _action(self, text: str) -> Mapping[str, Any]:
        if self._read is not None:
            return self._read(text)
        found = json_or(text, None)
        return found if isinstance(found, dict) else {self._field: text}

    def _text(self, observation: Mapping[str, Any]) -> str:
        """Return what the policy sees of an observation."""
        if not self._shown:
            return json.dumps(observation, ensure_ascii=False)
        if self._shown not in observation:
            raise RuntimeError(f"the observation has no {self._shown!r}; it has {', '.join(observation) or 'nothing'}")
        value = observation[self._shown]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
