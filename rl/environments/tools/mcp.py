"""Tools of MCP servers: programs on this machine that are spoken to by their standard streams, or by HTTP.

    calculator = MCPServer.Config(command=("python", "server.py"))
    tools = ToolEnvironment.Config(tools=mcp_tools(calculator), calls=JsonCalls.Config())

`mcp_tools` asks a server once, where an experiment is written; names and schemas are then part of its config. Each
process that draws keeps one server for all its episodes. A server that has ended is started again by the next call.
"""

import asyncio
import json
import os
import re
import shlex
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, override
from urllib.parse import urlsplit

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, to_text
from mesh.errors import UserError, did_you_mean, install_hint
from rl.environments.tools.schema import ArgumentError
from rl.environments.tools.tool import Tool

_ALIVE_S = 1.0  # seconds in which a server says what it has, after a call that failed


class MCPServer(Configurable):
    """A server's connection, in a thread of its own; `call` may be used by any thread."""

    class Config(ConfigBase["MCPServer"]):
        command: tuple[str, ...] = ()  # program and arguments, which speaks MCP on its standard streams
        url: str = ""  # address of a server that speaks MCP over HTTP, in place of a command
        variables: tuple[str, ...] = ()  # names of environment variables that the command gets, besides PATH and HOME
        start_deadline_s: float = 30.0  # seconds until it has answered for the first time

        @override
        def check_fields(self) -> None:
            self.require("command", bool(self.command) != bool(self.url), "a command, or a url in its place")
            known = not self.url or urlsplit(self.url).scheme in ("http", "https")
            self.require("url", known, "an address such as http://127.0.0.1:8000/mcp")
            self.require("start_deadline_s", self.start_deadline_s > 0, "seconds, more than 0")

        @override
        def reaches(self) -> tuple[str, ...]:
            if self.url:
                parts = urlsplit(str(self.url))
                return (f"{parts.scheme}://{parts.netloc}".lower(),)
            run = f"run:{shlex.join(self.command)}"
            return tuple(f"{name}@{run}" for name in self.variables) or (run,)

        def place(self) -> str:
            """Return the address or the command, for messages."""
            return self.url or shlex.join(self.command)

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._loop = asyncio.new_event_loop()
        self._client: asyncio.Future[Any] | None = None  # connected, or about to be
        self._holder: asyncio.Task[None] | None = None
        threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()

    def call(self, ask: Callable[[Any], Awaitable[Any]], deadline_s: float) -> Future[Any]:
        """Return what `ask(client)` gives, on a connection that is made if there is none.

        The future raises ArgumentError: there was no answer in time, or the server has ended.
        """
        return asyncio.run_coroutine_threadsafe(self._answer(ask, deadline_s), self._loop)

    def tools(self) -> list[Any]:
        """Return the tools that the server has now (UserError: it cannot be started, or does not answer)."""
        try:
            return self.call(lambda client: client.list_tools(), self._cfg.start_deadline_s).result().tools
        except ArgumentError as error:
            raise UserError(f"MCPServer: {error}") from error

    def close(self) -> None:
        """End the connection, and the program that was started for it."""
        asyncio.run_coroutine_threadsafe(self._drop(self._client), self._loop).result(self._cfg.start_deadline_s)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _answer(self, ask: Callable[[Any], Awaitable[Any]], deadline_s: float) -> Any:
        if (connected := self._client) is None:
            self._client = connected = self._loop.create_future()
            self._holder = asyncio.create_task(self._hold(connected))
        try:
            client = await asyncio.wait_for(asyncio.shield(connected), self._cfg.start_deadline_s)
        except Exception as error:
            await self._drop(connected)
            why = f"no answer within {self._cfg.start_deadline_s:g} s" if isinstance(error, TimeoutError) else error
            raise ArgumentError(f"the server {self._cfg.place()} cannot be used: {why}") from error
        try:
            return await asyncio.wait_for(ask(client), deadline_s)
        except Exception as error:
            why = f"no result within {deadline_s:g} s" if isinstance(error, TimeoutError) else str(error)
            if not await _answers(client):
                await self._drop(connected)
                why += "; the server is started again"
            raise ArgumentError(why) from error

    async def _hold(self, connected: asyncio.Future[Any]) -> None:
        """Keep a client open until this task is cancelled: its context must end in the task in which it began."""
        try:
            async with _client_of(self._cfg) as client:
                connected.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not connected.done():
                connected.set_exception(error.exceptions[0] if isinstance(error, ExceptionGroup) else error)

    async def _drop(self, connected: asyncio.Future[Any] | None) -> None:
        """End a connection, unless another one has taken its place."""
        if self._holder is not None and connected is self._client:
            self._client, holder = None, self._holder
            holder.cancel()
            await asyncio.wait([holder])


class MCPTool(Tool):
    """A tool of a server. What it answers is text; the server's own error is the policy's to read."""

    class Config(Tool.Config):
        server: MCPServer.Config = REQUIRED
        remote: str = ""  # name that the server has for it; "": `name`
        parameters: dict[str, Any] = REQUIRED
        deadline_s: float = 5.0  # seconds of a call; less than the environment's

        @override
        def check_fields(self) -> None:  # the server alone knows what its schema allows
            self.require("name", self.name.isidentifier(), "a name of letters, digits and underscores")
            self.require("deadline_s", self.deadline_s > 0, "seconds, more than 0")

        @override
        def schema(self) -> dict[str, Any]:
            return self.parameters

    _servers: dict[str, tuple[MCPServer, int]] = {}  # servers of this process, and how many tools use them

    def __init__(self, cfg: Config):
        self._cfg, self._name = cfg, to_text(cfg.server)
        server, users = self._servers.get(self._name) or (cfg.server.build(), 0)
        self._servers[self._name], self._server = (server, users + 1), server
        names = [tool.name for tool in server.tools()]
        if (name := cfg.remote or cfg.name) not in names:
            self.shutdown()
            raise UserError(f"MCPTool: {cfg.server.place()} has no tool {name!r}{did_you_mean(name, names)}")

    @override
    async def call(self, **arguments: Any) -> str:
        name, deadline_s = self._cfg.remote or self._cfg.name, self._cfg.deadline_s
        return _text(await asyncio.wrap_future(self._server.call(lambda c: c.call_tool(name, arguments), deadline_s)))

    @override
    def shutdown(self) -> None:
        _, users = self._servers[self._name]
        self._servers[self._name] = self._server, users - 1
        if users == 1:
            del self._servers[self._name]
            self._server.close()


def mcp_tools(server: MCPServer.Config, *, prefix: str = "", deadline_s: float = 5.0) -> tuple[MCPTool.Config, ...]:
    """Return the tools that a server has now, which is started for that and ended.

    Args:
        server: command or address.
        prefix: beginning of their names, where those of several servers are alike.
        deadline_s: seconds of a call.

    Raises:
        UserError: the server cannot be started, or has no tools.
    """
    connection: MCPServer = server.build()
    try:
        found = connection.tools()
    finally:
        connection.close()
    if not found:
        raise UserError(f"MCPServer: {server.place()} has no tools")
    return tuple(
        MCPTool.Config(
            server=server,
            name=prefix + re.sub(r"\W", "_", tool.name),
            remote=tool.name,
            description=(tool.description or "").strip(),
            parameters=dict(tool.input_schema),
            deadline_s=deadline_s,
        )
        for tool in found
    )


def _client_of(cfg: MCPServer.Config) -> Any:
    try:
        import mcp
    except ImportError as error:
        raise UserError(f"tools of MCP servers need the package mcp: {install_hint('mcp')}") from error
    if cfg.url:
        return mcp.Client(cfg.url)
    program, *arguments = cfg.command
    given = {name: os.environ[name] for name in cfg.variables if name in os.environ}
    return mcp.Client(mcp.stdio_client(mcp.StdioServerParameters(command=program, args=arguments, env=given)))


async def _answers(client: Any) -> bool:
    try:
        await asyncio.wait_for(client.list_tools(cache_mode="bypass"), _ALIVE_S)
    except Exception:
        return False
    return True


def _text(result: Any) -> str:
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    text = "\n".join(parts)
    if result.is_error:
        raise ArgumentError(text or "the tool failed")
    return text or json.dumps(result.structured_content, ensure_ascii=False)
