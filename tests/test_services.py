"""What a test does where a program or a driver is not installed."""

from __future__ import annotations

import pytest

from tests.services import TOOLS, missing_tool


@pytest.mark.parametrize("required", ["", "pgbouncer", "0"])
def test_a_tool_that_is_missing_is_skipped_loudly(monkeypatch: pytest.MonkeyPatch, required: str) -> None:
    monkeypatch.setenv("DURABLE_REQUIRE_TOOLS", required)
    with pytest.raises(pytest.skip.Exception) as caught:
        missing_tool("promtool")
    assert caught.value.msg == "NOT TESTED WITH PROMTOOL: it is not installed (apt-get install prometheus)"


@pytest.mark.parametrize("required", ["1", "promtool", "pgbouncer,promtool"])
def test_a_required_tool_that_is_missing_fails(monkeypatch: pytest.MonkeyPatch, required: str) -> None:
    monkeypatch.setenv("DURABLE_REQUIRE_TOOLS", required)
    with pytest.raises(pytest.fail.Exception, match="NOT TESTED WITH PROMTOOL: it is not installed"):
        missing_tool("promtool")


def test_the_gate_requires_servers_and_no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_REQUIRE_SERVICES", "1")
    monkeypatch.delenv("DURABLE_REQUIRE_TOOLS", raising=False)
    for tool in TOOLS:
        with pytest.raises(pytest.skip.Exception):
            missing_tool(tool)
