"""Tools of real MCP servers, in processes of their own: schemas, calls, errors, deadlines, and a server that dies."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axlearn_like.config import ConfigError, from_text, reach, to_text
from mesh.errors import UserError
from rl.environments.calls import JsonCalls
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.mcp import MCPServer, MCPTool, mcp_tools
from rl.protocol.messages import Problem

PROGRAM = str(Path(__file__).with_name("calculator_server.py"))
SERVER = MCPServer.Config(command=(sys.executable, PROGRAM))


@pytest.fixture(scope="module")
def tools() -> tuple[MCPTool.Config, ...]:
    return mcp_tools(SERVER, deadline_s=2.0)


def play(tools: tuple[MCPTool.Config, ...], *calls: tuple[str, object]) -> tuple[list[str], dict[str, float]]:
    """Return what the policy sees for calls of one episode; a number is the seconds to wait in place of a call."""
    cfg = ToolEnvironment.Config(tools=tools, calls=JsonCalls.Config(), max_result=60)
    shared = cfg.share()
    environment = cfg.build(shared=shared)

    async def episode() -> list[str]:
        environment.reset({})
        found = []
        for name, arguments in calls:
            action = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
            found.append((await environment.step(action)).observation)
            if name == "process":
                os.kill(int(found[-1]), signal.SIGKILL)
        await environment.close()
        return found

    try:
        return asyncio.run(episode()), dict(environment.figures())
    finally:
        shared.close()


@pytest.mark.slow
def test_a_servers_tools_are_shown_by_their_own_schemas(tools: tuple[MCPTool.Config, ...]):
    assert [tool.name for tool in tools][:2] == ["add", "word_count"] and tools[1].remote == "word-count"
    problem = ToolEnvironment.Config(tools=tools, calls=JsonCalls.Config()).prepare(Problem(0, "f", "q", "a", {}))
    assert problem.tools is not None
    function = problem.tools[0]["function"]
    assert (function["name"], function["description"]) == ("add", "Add two integers.")
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    assert function["parameters"]["required"] == ["a", "b"]


@pytest.mark.slow
def test_calls_are_answered_and_errors_are_observations(tools: tuple[MCPTool.Config, ...]):
    seen, figures = play(
        tools,
        ("add", {"a": 2, "b": 3}),
        ("word_count", {"texts": ["a b", "c"], "options": {"x": 1}}),
        ("add", {"a": "two", "b": 3}),
        ("add", {"a": 2}),
        ("refuse", {}),
        ("long", {"characters": 100}),
        ("sleep", {"seconds": 30.0}),
        ("add", {"a": 4, "b": 5}),
        ("ad", {}),
    )
    assert seen == [
        "5",
        "2 1 {'x': 1}",
        "error: a is 'two'; expected integer",
        "error: missing b",
        "error: Error executing tool refuse: not on Sundays",
        "x" * 60 + "...",
        "error: no result within 2 s",
        "9",
        "error: no tool 'ad'; did you mean 'add'?",
    ]
    assert (figures["tool_calls"], figures["tool_errors"]) == (9, 5)


@pytest.mark.slow
def test_a_server_that_is_killed_within_an_episode_is_started_again(tools: tuple[MCPTool.Config, ...]):
    add = ("add", {"a": 2, "b": 3})
    seen, figures = play(tools, ("process", {}), add, add, ("process", {}))
    first, error, again, second = seen
    assert error == "error: Connection closed; the server is started again"
    assert again == "5" and first != second and figures["tool_errors"] == 1  # none is made twice: it may have effects


@pytest.mark.slow
def test_no_server_is_left_when_the_episodes_are_over(tools: tuple[MCPTool.Config, ...]):
    cfg = ToolEnvironment.Config(tools=tools, calls=JsonCalls.Config())
    boxes = [cfg.share(), cfg.share()]

    def pid() -> int:
        return int(asyncio.run(boxes[-1].tools["process"][1].call()))

    first = pid()
    boxes.pop().close()
    assert pid() == first  # all tools of a process have one server
    boxes.pop().close()
    for _ in range(100):
        if not Path(f"/proc/{first}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.slow
def test_by_http_on_loopback():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, PROGRAM, str(port)], stderr=subprocess.DEVNULL)
    try:
        server = MCPServer.Config(url=f"http://127.0.0.1:{port}/mcp")
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        found = mcp_tools(server, prefix="far_")
        assert play(found, ("far_add", {"a": 2, "b": 3}), ("far_word_count", {"texts": ["a b"]}))[0] == ["5", "2"]
        assert list(reach(found[0])) == [f"http://127.0.0.1:{port}"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_command_gets_the_variables_that_are_named_and_no_others(
    tools: tuple[MCPTool.Config, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MCP_TEST_SECRET", "key")
    named = SERVER.clone(variables=("MCP_TEST_SECRET",))
    (tool,) = (tool for tool in tools if tool.name == "secret")
    assert [play((tool.clone(server=one),), ("secret", {}))[0] for one in (SERVER, named)] == [["none"], ["key"]]
    assert list(reach(named)) == [f"MCP_TEST_SECRET@run:{sys.executable} {PROGRAM}"]


@pytest.mark.slow
def test_what_cannot_be_used_is_named(tools: tuple[MCPTool.Config, ...]):
    with pytest.raises(UserError, match=r"the server no-such-program x cannot be used: .*no-such-program"):
        mcp_tools(MCPServer.Config(command=("no-such-program", "x")))
    with pytest.raises(UserError, match=r"no answer within 0.5 s"):
        mcp_tools(MCPServer.Config(command=("sleep", "60"), start_deadline_s=0.5))
    with pytest.raises(UserError, match=r"has no tool 'ad'; did you mean 'add'"):
        tools[0].clone(remote="ad").build()
    with pytest.raises(ConfigError, match="expected a command, or a url in its place"):
        MCPServer.Config().build()


@pytest.mark.slow
def test_a_text_of_somebodys_starts_no_program(tools: tuple[MCPTool.Config, ...], tmp_path: Path):
    command = ("touch", str(tmp_path / "made"))
    mine = tools[1].clone(server=SERVER.clone(command=command))
    stranger = from_text(to_text(mine))
    assert stranger == mine  # schemas are part of a run's config, which needs no server to be read
    with pytest.raises(ConfigError, match=r"starts the program touch .*--allow"):
        stranger.build()
    assert not (tmp_path / "made").exists()
