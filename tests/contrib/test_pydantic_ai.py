"""Agents of Pydantic AI in a workflow: the names of their steps, what a tool's metadata says, and what is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import FunctionModel

from celery_durable import Status, Step, StepConfig, WorkflowEvent, current_step, durable_workflow
from celery_durable.contrib.pydantic_ai import CeleryDurability, RequestInput, run_agent
from celery_durable.testing import DurableHarness, assert_crash_safe
from tests.support.flows import flow_of
from tests.support.world import World

calls: Counter[str] = Counter()


def scripted(messages: list[Any], info: Any) -> ModelResponse:
    """Call every tool, all at once, and then end."""
    returned = [part.content for each in messages for part in each.parts if isinstance(part, ToolReturnPart)]
    if returned:
        return ModelResponse(parts=[TextPart(" ".join(map(str, returned)))])
    return ModelResponse(parts=[ToolCallPart(each.name, {}, f"id-{each.name}") for each in info.function_tools])


async def first() -> str:
    calls["first"] += 1
    return current_step().name


async def outside() -> str:
    calls["outside"] += 1
    return "outside"


def send() -> str:
    calls["send"] += 1
    return "sent"


def make_agent(name: str) -> Agent[None, str]:
    return Agent(FunctionModel(scripted), name=name, capabilities=[CeleryDurability(), RequestInput()])


agent = make_agent("mixed")
agent.tool_plain(first)
agent.tool_plain(metadata={"celery_durable": False})(outside)
agent.tool_plain(requires_approval=True, metadata={"celery_durable": StepConfig(on_lost="resend")})(send)

broken = make_agent("broken")
broken.tool_plain(metadata={"celery_durable": {"retries": 3}})(first)

trio = make_agent("trio")


@trio.tool_plain
async def one() -> str:
    calls["one"] += 1
    return "one"


@trio.tool_plain
async def two() -> str:
    calls["two"] += 1
    return "two"


@trio.tool_plain
def three() -> str:
    calls["three"] += 1
    return "three"


inner = make_agent("inner")
outer = make_agent("outer")


@outer.tool_plain
async def delegate() -> str:
    return (await inner.run("do it")).output


inner.tool_plain(first)


@durable_workflow
def mixed(event: WorkflowEvent[str], step: Step) -> str:
    return run_agent(step, lambda: agent.run(event.payload)).output


@durable_workflow
def misconfigured(event: WorkflowEvent[str], step: Step) -> str:
    return run_agent(step, lambda: broken.run(event.payload)).output


@durable_workflow
def nested(event: WorkflowEvent[str], step: Step) -> str:
    return run_agent(step, lambda: outer.run(event.payload)).output


@durable_workflow
def three_tools(event: WorkflowEvent[str], step: Step) -> str:
    return run_agent(step, lambda: trio.run(event.payload)).output


pytestmark = pytest.mark.durable(workflows=[mixed, misconfigured, nested, three_tools])


@pytest.fixture(autouse=True)
def witness() -> None:
    calls.clear()


def test_the_names_of_the_steps_stay(durable_harness: DurableHarness) -> None:
    # Runs that are in progress find their steps by these names: a change would repeat them.
    handle = durable_harness.instance(mixed, mixed.create("go", id="m-1").id)
    durable_harness.run_until_idle()
    handle.answer("approval id-send", {"id-send": True}, by="ada")
    durable_harness.run_until_idle()
    tool = "mixed__function_toolset__<agent>.call_tool"
    assert list(handle.statuses()) == [
        "mixed__model.request",
        f"{tool}:first id-first",
        "approval id-send",
        f"{tool}:send id-send",
        "mixed__model.request\x1f2",
    ]
    assert handle.result() == f"{tool}:first id-first outside sent"


def test_a_tool_without_a_step_runs_on_each_replay(durable_harness: DurableHarness) -> None:
    handle = durable_harness.instance(mixed, mixed.create("go", id="m-2").id)
    durable_harness.run_until_idle()
    handle.answer("approval id-send", {"id-send": True}, by="ada")
    durable_harness.run_until_idle()
    assert calls == {"first": 1, "outside": 2, "send": 1}


def test_a_tool_may_be_called_again_although_it_requires_approval(durable_harness: DurableHarness) -> None:
    durable_harness.faults.crash_in_step("mixed__function_toolset__<agent>.call_tool:send id-send", when="after")
    handle = durable_harness.instance(mixed, mixed.create("go", id="m-3").id)
    durable_harness.run_until_idle()
    handle.answer("approval id-send", {"id-send": True}, by="ada")
    durable_harness.advance("1 hour")
    assert (handle.status().status, calls["send"]) == (Status.COMPLETE, 2)


def test_metadata_that_is_no_config_names_the_tool(durable_harness: DurableHarness) -> None:
    handle = durable_harness.instance(misconfigured, misconfigured.create("go", id="b-1").id)
    durable_harness.run_until_idle()
    error = handle.status().error
    assert (error.name, "the tool first" in error.message) == ("ConfigInvalid", True)


def test_an_agent_that_a_tool_runs_is_part_of_the_tools_step(durable_harness: DurableHarness) -> None:
    handle = durable_harness.instance(nested, nested.create("go", id="n-1").id)
    durable_harness.run_until_idle()
    tool = "outer__function_toolset__<agent>.call_tool:delegate id-delegate"
    assert (handle.result(), list(handle.statuses())) == (
        tool,
        ["outer__model.request", tool, "outer__model.request\x1f2"],
    )


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_tools_of_one_response_run_at_the_same_time(world: World) -> None:
    together, meeting = asyncio.Barrier(3), make_agent("meeting")

    async def meet() -> str:
        async with asyncio.timeout(10):
            await together.wait()
        return "met"

    for name in ("one", "two", "three"):
        meeting.tool_plain(name=name)(meet)
    assert flow_of(world, lambda step: run_agent(step, lambda: meeting.run("go")).output).run().output == "met met met"


@pytest.mark.parametrize("dies_in", ["one", "two", "three"])
def test_a_crash_repeats_no_tool_that_was_recorded(durable_harness: DurableHarness, dies_in: str) -> None:
    durable_harness.faults.crash_in_step(
        f"trio__function_toolset__<agent>.call_tool:{dies_in} id-{dies_in}", when="after"
    )
    handle = durable_harness.instance(three_tools, three_tools.create("go", id="t-1").id)
    durable_harness.advance("1 hour")
    assert (handle.result(), calls) == ("one two three", {"one": 1, "two": 1, "three": 1} | {dies_in: 2})


def test_parallel_tools_and_an_approval_are_crash_safe() -> None:
    assert_crash_safe(mixed, "go", events=[("approval", {"id-send": True})])
