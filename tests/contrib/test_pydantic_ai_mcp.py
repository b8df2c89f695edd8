"""Agents with a server of the Model Context Protocol: each of its calls is a step, and a replay does not need it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import FunctionModel

from celery_durable import Step, StepConfig, WorkflowEvent, durable_workflow
from celery_durable.contrib.pydantic_ai import CeleryDurability, run_agent
from celery_durable.testing import DurableHarness

pytest.importorskip("fastmcp")
from fastmcp.client.transports import StdioTransport
from pydantic_ai.mcp import MCPToolset

ROOT = Path(__file__).parents[2]


class Bank:
    """The agent of a test, whose server runs in a process of its own."""

    agent: Agent[None, str]


def scripted(messages: list[Any], info: Any) -> ModelResponse:
    """Ask for two balances at once, close one account, and end."""
    returned = [part.content for each in messages for part in each.parts if isinstance(part, ToolReturnPart)]
    if not returned:
        return ModelResponse(parts=[ToolCallPart("balance", {"account": each}, f"c-{each}") for each in "ab"])
    if len(returned) == 2:
        return ModelResponse(parts=[ToolCallPart("close", {"account": "a"}, "c-close")])
    return ModelResponse(parts=[TextPart(str(returned))])


@durable_workflow
def bank(event: WorkflowEvent[None], step: Step) -> str:
    answer = run_agent(step, lambda: Bank.agent.run("close the account")).output
    step.sleep("until it is replayed", 60)
    return answer


pytestmark = pytest.mark.durable(workflows=[bank])

BALANCE, CLOSE = ("banker__mcp_server__bank.call_tool:" + each for each in ("balance", "close"))


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """What the server notes."""
    file = tmp_path / "noted"
    file.touch()
    transport = StdioTransport(
        sys.executable, ["-m", "tests.contrib.mcp_server", str(file)], cwd=str(ROOT), keep_alive=False
    )
    config = StepConfig(retries=3)
    toolsets = [MCPToolset(transport, id="bank", init_timeout=60)]
    durability = CeleryDurability(step_config=config)
    Bank.agent = Agent(FunctionModel(scripted), name="banker", toolsets=toolsets, capabilities=[durability])
    return file


def test_each_call_is_a_step_and_a_replay_starts_no_server(durable_harness: DurableHarness, noted: Path) -> None:
    handle = durable_harness.instance(bank, bank.create(id="b-1").id)
    durable_harness.advance("1 hour")
    assert handle.result() == "[500, 500, 'closed a']"
    listing = "banker__mcp_server__bank.get_tools"
    assert [step.name for step in handle.history().steps] == [
        *(listing, "banker__model.request", f"{BALANCE} c-a", f"{BALANCE} c-b"),
        *("banker__model.request", f"{CLOSE} c-close", "banker__model.request", "until it is replayed"),
    ]
    assert Counter(noted.read_text().splitlines()) == {"start": 1, "balance a": 1, "balance b": 1, "close a": 1}


def test_a_crash_repeats_the_open_call_alone(durable_harness: DurableHarness, noted: Path) -> None:
    durable_harness.faults.crash_in_step(f"{CLOSE} c-close", when="after")
    handle = durable_harness.instance(bank, bank.create(id="b-2").id)
    durable_harness.advance("1 hour")
    assert handle.result() == "[500, 500, 'closed a']"
    found = Counter(noted.read_text().splitlines())
    del found["start"]
    assert found == {"balance a": 1, "balance b": 1, "close a": 2}


def test_a_server_that_is_down_fails_attempts_of_steps(durable_harness: DurableHarness, noted: Path) -> None:
    folder = noted.parent
    noted.unlink()
    folder.rename(away := folder.with_name("away"))  # the server cannot start
    handle = durable_harness.instance(bank, bank.create(id="b-3").id)
    durable_harness.run_until_idle()
    assert handle.statuses() == {"banker__mcp_server__bank.get_tools": "waiting"}
    away.rename(folder)
    durable_harness.advance("1 hour")
    assert handle.result() == "[500, 500, 'closed a']"
