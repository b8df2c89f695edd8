"""``python -m tests.contrib.mcp_server FILE``: an MCP server that notes its starts and calls."""

from __future__ import annotations

import sys
from pathlib import Path

from mcp.server import MCPServer

noted = Path(sys.argv[1])
server = MCPServer("bank")


def note(line: str) -> None:
    with noted.open("a") as file:
        file.write(f"{line}\n")


@server.tool()
def balance(account: str) -> int:
    note(f"balance {account}")
    return 500


@server.tool()
def close(account: str) -> str:
    note(f"close {account}")
    return f"closed {account}"


if __name__ == "__main__":
    note("start")
    server.run()
