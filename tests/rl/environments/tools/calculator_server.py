"""An MCP server for tests: `python calculator_server.py [PORT]`, on its standard streams or by HTTP on loopback."""

import os
import sys
import time
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool(name="word-count")
def count(texts: list[str], options: dict[str, Any] | None = None) -> str:
    return " ".join(str(len(text.split())) for text in texts) + (f" {options}" if options else "")


@server.tool()
def process() -> int:
    return os.getpid()


@server.tool()
def refuse() -> str:
    raise ToolError("not on Sundays")


@server.tool()
def long(characters: int) -> str:
    return "x" * characters


@server.tool()
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


@server.tool()
def secret() -> str:
    return os.environ.get("MCP_TEST_SECRET", "none")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
