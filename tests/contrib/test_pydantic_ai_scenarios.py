"""What Pydantic AI promises of an agent, kept in a workflow: each scenario runs, and is then replayed as a whole."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    AgentRunResult,
    BinaryContent,
    CancellationToken,
    DeferredToolRequests,
    DeferredToolResults,
    FunctionToolset,
    ModelRetry,
    RunContext,
    ToolReturn,
    UsageLimits,
)
from pydantic_ai.exceptions import ApprovalRequired, CallDeferred, ModelHTTPError, UserError
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.toolsets import ExternalToolset

from celery_durable import Step, StepConfig, StepFailed, WorkflowEvent, durable_workflow
from celery_durable.contrib.pydantic_ai import CeleryDurability, RequestInput, run_agent
from celery_durable.event_loop import event_loop
from celery_durable.testing import DurableHarness, assert_crash_safe
from celery_durable.testing.harness import HarnessInstance

calls: Counter[str] = Counter()
Scenario = Callable[[Step], Any]
_scenarios: dict[str, Scenario] = {}


@durable_workflow
def plays(event: WorkflowEvent[str], step: Step) -> Any:
    output = _scenarios[event.payload](step)
    step.sleep("until it is replayed", 60)
    return output


pytestmark = pytest.mark.durable(workflows=[plays])


@pytest.fixture(autouse=True)
def witness() -> None:
    calls.clear()


def scripted(*answers: str | Sequence[ToolCallPart]) -> FunctionModel:
    """A model that gives these answers, one per request, whatever it is asked."""

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        del info
        calls["request"] += 1
        this = answers[sum(isinstance(each, ModelResponse) for each in messages)]
        return ModelResponse(parts=[TextPart(this)] if isinstance(this, str) else list(this))

    return FunctionModel(answer)


def make_agent(*answers: str | Sequence[ToolCallPart], **options: Any) -> Agent[Any, Any]:
    config = options.pop("step_config", None)
    capabilities = [CeleryDurability(step_config=config), *options.pop("capabilities", [])]
    return Agent(scripted(*answers), name="tested", capabilities=capabilities, **options)


def call(tool: str, call_id: str, **args: Any) -> ToolCallPart:
    return ToolCallPart(tool, args, call_id)


def returned(messages: list[ModelMessage]) -> list[Any]:
    return [part.content for each in messages for part in each.parts if isinstance(part, ToolReturnPart)]


def play(harness: DurableHarness, scenario: Scenario) -> HarnessInstance[Any]:
    _scenarios[scenario.__name__] = scenario
    instance = harness.instance(plays, plays.create(scenario.__name__, id="p-1").id)
    harness.run_until_idle()
    harness.advance("1 hour")
    return instance


def names(instance: HarnessInstance[Any]) -> list[str]:
    """The steps of an instance, without what their names have in common."""
    tools = "tested__function_toolset__<agent>.call_tool:"
    return [step.name.removeprefix(tools).removeprefix("tested__") for step in instance.history().steps][:-1]


# --- what holds -------------------------------------------------------------------------------------------------------


def test_a_tool_that_asks_the_model_to_retry_is_not_a_failed_attempt(durable_harness: DurableHarness) -> None:
    agent = make_agent(
        [call("guess", "c1", n=1)], [call("guess", "c2", n=2)], "done", step_config=StepConfig(retries=3)
    )

    @agent.tool_plain
    def guess(n: int) -> str:
        calls["guess"] += 1
        if n == 1:
            raise ModelRetry("higher")
        return "right"

    instance = play(durable_harness, lambda step: run_agent(step, lambda: agent.run("guess")).output)
    assert (instance.result(), calls) == ("done", {"request": 3, "guess": 2})
    assert {step.attempts for step in instance.history().steps[:-1]} == {1}


def test_an_output_validator_may_ask_the_model_again(durable_harness: DurableHarness) -> None:
    class Answer(BaseModel):
        number: int

    agent = make_agent(*([call("final_result", f"c{n}", number=n)] for n in (1, 2)), output_type=Answer)

    @agent.output_validator
    def check(answer: Answer) -> Answer:
        if answer.number == 1:
            raise ModelRetry("not 1")
        return answer

    instance = play(durable_harness, lambda step: run_agent(step, lambda: agent.run("go")).output.number)
    assert (instance.result(), names(instance)) == (2, ["model.request"] * 2)


def test_usage_and_its_limits_are_those_of_the_whole_run(durable_harness: DurableHarness) -> None:
    agent = make_agent([call("look", "c1")], [call("look", "c2")], "done")
    agent.tool_plain(name="look")(lambda: "seen")
    limits = UsageLimits(request_limit=2)

    def limited(step: Step) -> Any:
        usage = run_agent(step, lambda: agent.run("go")).usage
        run_agent(step, lambda: agent.run("go", usage_limits=limits))
        return usage

    instance = play(durable_harness, limited)
    assert (instance.status().error.name, calls["request"]) == ("UsageLimitExceeded", 5)


class Shop:
    def find(self) -> str:
        return "order 42"


def test_messages_of_one_run_begin_the_next_and_dependencies_stay_objects(durable_harness: DurableHarness) -> None:
    agent = make_agent([call("find", "c1")], "first", "second", deps_type=Shop)

    @agent.tool
    def find(ctx: RunContext[Shop]) -> str:
        return ctx.deps.find()

    def talk(step: Step) -> Any:
        shop = Shop()
        first = run_agent(step, lambda: agent.run("find it", deps=shop))
        second = run_agent(step, lambda: agent.run("and now?", deps=shop, message_history=first.all_messages()))
        return [second.output, returned(second.all_messages())]

    assert play(durable_harness, talk).result() == ["second", ["order 42"]]


def test_calls_that_are_answered_elsewhere_come_back_to_the_workflow(durable_harness: DurableHarness) -> None:
    external = ExternalToolset([ToolDefinition(name="ask_bank")], id="bank")
    first = [call("ask_bank", "c1"), call("send_fax", "c2")]
    agent = make_agent(first, "done", output_type=[str, DeferredToolRequests], toolsets=[external])

    @agent.tool_plain
    def send_fax() -> str:
        raise CallDeferred

    def defer(step: Step) -> Any:
        asked = run_agent(step, lambda: agent.run("go"))
        results = DeferredToolResults(calls={each.tool_call_id: "answered" for each in asked.output.calls})
        history = asked.all_messages()
        done = run_agent(step, lambda: agent.run(message_history=history, deferred_tool_results=results))
        return [done.output, returned(done.all_messages())]

    assert play(durable_harness, defer).result() == ["done", ["answered", "answered"]]


def refunds_much() -> Agent[Any, Any]:
    agent = make_agent([call("refund", "c1", cents=900)], "done", capabilities=[RequestInput()])

    @agent.tool
    def refund(ctx: RunContext[None], cents: int) -> str:
        calls["asked for"] += 1
        if cents > 500 and not ctx.tool_call_approved:
            raise ApprovalRequired
        calls["refund"] += 1
        return "refunded"

    return agent


def test_a_tool_may_require_approval_of_some_calls(durable_harness: DurableHarness) -> None:
    agent = refunds_much()
    instance = play(durable_harness, lambda step: run_agent(step, lambda: agent.run("go")).output)
    instance.answer("approval c1", {"c1": True}, by="ada")
    durable_harness.advance("1 hour")
    assert (instance.result(), calls["refund"]) == ("done", 1)


def test_a_call_that_was_approved_is_not_repeated_if_its_end_is_unknown(durable_harness: DurableHarness) -> None:
    agent = refunds_much()
    tool = "tested__function_toolset__<agent>.call_tool:refund c1"
    instance = play(durable_harness, lambda step: run_agent(step, lambda: agent.run("go")).output)
    durable_harness.faults.crash_in_step(tool, when="after")
    instance.answer("approval c1", {"c1": True}, by="ada")
    durable_harness.advance("1 hour")
    assert (instance.status().error.name, calls["refund"]) == ("OutcomeUnknown", 1)


def test_rich_results_survive_their_step(durable_harness: DurableHarness) -> None:
    picture = BinaryContent(b"\x00\x01", media_type="image/png")
    agent = make_agent([call("look", "c1"), call("draw", "c2")], "done")

    @agent.tool_plain
    def look() -> ToolReturn:
        return ToolReturn(return_value={"seen": [1, 2]}, content=["it is", picture], metadata={"source": "eye"})

    agent.tool_plain(name="draw")(lambda: picture)

    def see(step: Step) -> Any:
        messages = run_agent(step, lambda: agent.run(["look at", picture])).all_messages()
        seen, drawn, shown = messages[2].parts
        return [seen.content, seen.metadata, drawn.content.data == picture.data, shown.content[1].data == picture.data]

    assert play(durable_harness, see).result() == [{"seen": [1, 2]}, {"source": "eye"}, True, True]


def test_a_request_that_fails_is_an_attempt(durable_harness: DurableHarness) -> None:
    def busy(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        calls["request"] += 1
        if calls["request"] < 3:
            raise ModelHTTPError(503, "scripted")
        return ModelResponse(parts=[TextPart("done")])

    agent = Agent(FunctionModel(busy), name="tested", capabilities=[CeleryDurability()])
    instance = play(durable_harness, lambda step: run_agent(step, lambda: agent.run("go")).output)
    assert (instance.result(), instance.history().steps[0].attempts) == ("done", 3)


def test_a_workflow_may_handle_the_failure_of_a_tool(durable_harness: DurableHarness) -> None:
    agent = make_agent([call("fetch", "c1")], "done")

    @agent.tool_plain(metadata={"celery_durable": StepConfig(retries=1)})
    async def fetch() -> str:
        raise OSError("no route")

    def handled(step: Step) -> Any:
        try:
            return run_agent(step, lambda: agent.run("go")).output
        except StepFailed as failed:
            return [failed.error_name, failed.attempts]

    assert play(durable_harness, handled).result() == ["OSError", 2]


async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
    calls["request"] += 1
    for word in ("so", " it", " goes"):
        yield word


def test_a_stream_is_one_step_and_its_handler_hears_it_live(durable_harness: DurableHarness) -> None:
    async def listen(ctx: RunContext[None], events: Any) -> None:
        async for _ in events:
            calls["event"] += 1

    listening = CeleryDurability(event_stream_handler=listen)
    agent = Agent(FunctionModel(stream_function=stream), name="tested", capabilities=[listening])

    def stream_twice(step: Step) -> Any:
        async def read() -> str:
            async with agent.run_stream("go") as run:
                return "".join([text async for text in run.stream_text(delta=True)])

        return [run_agent(step, read), run_agent(step, lambda: agent.run("go")).output]

    instance = play(durable_harness, stream_twice)
    assert instance.result() == ["so it goes"] * 2
    assert (calls["request"], names(instance)) == (2, ["model.request_stream"] * 2)
    assert calls["event"] > 4
    assert len([line for line in instance.logs() if line.category == "agent"]) == 2


def test_two_agents_may_run_at_the_same_time(durable_harness: DurableHarness) -> None:
    one, two = (Agent(FunctionModel(echo), name=name, capabilities=[CeleryDurability()]) for name in ("one", "two"))

    def run_both(step: Step) -> Any:
        async def both() -> list[str]:
            return [each.output for each in await asyncio.gather(one.run("first"), two.run("second"))]

        return run_agent(step, both)

    assert play(durable_harness, run_both).result() == ["first", "second"]
    assert_crash_safe(plays, "run_both", schedules=20)


def echo(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    return ModelResponse(parts=[TextPart(messages[0].parts[0].content)])


def test_a_registered_model_may_replace_the_agents_own(durable_harness: DurableHarness) -> None:
    durability = CeleryDurability(models={"cheap": scripted("cheap")})
    agent = Agent(scripted("dear"), name="tested", capabilities=[durability])
    instance = play(durable_harness, lambda step: run_agent(step, lambda: agent.run("go", model="cheap")).output)
    assert (instance.result(), names(instance)) == ("cheap", ["model.request.cheap"])


def run_now(agent: Agent, prompt: str) -> AgentRunResult[Any]:
    """Run an agent as `agent.run_sync` does, but close the event loop."""
    return asyncio.run(agent.run(prompt))


def test_an_agent_outside_of_workflows_is_as_without_the_capability() -> None:
    agent = make_agent([call("look", "c1")], "done")
    agent.tool_plain(name="look", metadata={"celery_durable": StepConfig(retries=3)})(lambda: "seen")
    assert returned(run_now(agent, "go").all_messages()) == ["seen"]


def test_nothing_of_a_run_that_waits_stays_on_the_loop(durable_harness: DurableHarness) -> None:
    agent, cleaner = refunds_much(), Agent(FunctionModel(echo), name="cleaner", capabilities=[CeleryDurability()])

    async def clean_up_afterwards() -> str:
        try:
            return (await agent.run("go")).output
        finally:
            await cleaner.run("clean up")

    async def count_tasks() -> int:
        return len(asyncio.all_tasks())

    instance = play(durable_harness, lambda step: run_agent(step, clean_up_afterwards))
    assert event_loop.run(count_tasks, name="a test") == 1
    instance.answer("approval c1", {"c1": True}, by="ada")
    durable_harness.advance("1 hour")
    assert instance.result() == "done"


# --- what is refused --------------------------------------------------------------------------------------------------


def play_refused(harness: DurableHarness, scenario: Scenario) -> tuple[str, str]:
    error = play(harness, scenario).status().error
    return error.name, error.message


def test_a_run_outside_of_run_agent_is_refused(durable_harness: DurableHarness) -> None:
    agent = make_agent("done")
    assert play_refused(durable_harness, lambda step: run_now(agent, "go").output) == (
        "StepMisuse",
        "The agent 'tested' was run in a workflow, outside of run_agent(), so each replay would repeat its requests: "
        "call run_agent(step, lambda: agent.run(...)).",
    )
    assert not calls


def test_an_agent_that_runs_twice_at_the_same_time_is_refused(durable_harness: DurableHarness) -> None:
    agent = make_agent("done")

    async def both() -> list[Any]:
        return await asyncio.gather(agent.run("first"), agent.run("second"))

    assert play_refused(durable_harness, lambda step: run_agent(step, both)) == (
        "StepMisuse",
        "The agent 'tested' runs twice at the same time in one workflow, and a replay could mix up the steps of the "
        "two runs: await one after the other, or make an agent with another name.",
    )


def test_a_run_in_a_step_is_part_of_that_step(durable_harness: DurableHarness) -> None:
    agent = make_agent("done")

    async def ask() -> str:
        return (await agent.run("go")).output

    instance = play(
        durable_harness, lambda step: [step.do("ask", ask), step.do("sync", lambda: run_now(agent, "").output)]
    )
    assert (instance.result(), names(instance), calls["request"]) == (["done"] * 2, ["ask", "sync"], 2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"toolsets": [FunctionToolset([lambda: "x"], id="late")]}, "cannot be added at runtime"),
        ({"model": TestModel()}, "was not registered with `CeleryDurability`"),
        ({"cancellation_token": CancellationToken()}, "Cancel the durable workflow"),
    ],
)
def test_what_a_replay_could_not_repeat_is_refused(
    durable_harness: DurableHarness, options: dict[str, Any], problem: str
) -> None:
    agent = make_agent("done")
    name, message = play_refused(
        durable_harness, lambda step: run_agent(step, lambda: agent.run("go", **options)).output
    )
    assert (name, problem in message) == ("UserError", True)


def test_what_another_attempt_cannot_mend_is_attempted_once(durable_harness: DurableHarness) -> None:
    models = {tool: TestModel(call_tools=[tool]) for tool in ("enqueue", "show", "delegate")}
    agent = Agent(TestModel(), name="tested", capabilities=[CeleryDurability(models=models)])
    inner = make_agent("done")

    @agent.tool
    def enqueue(ctx: RunContext[None]) -> None:
        ctx.enqueue("later")

    @agent.tool_plain
    def show() -> object:
        calls["show"] += 1
        return object()

    @agent.tool_plain
    async def delegate() -> str:
        calls["delegate"] += 1
        return (await inner.run("go", usage_limits=UsageLimits(request_limit=0))).output

    def fail_three_times(step: Step) -> Any:
        failures = []
        for model in models:
            try:
                run_agent(step, lambda model=model: agent.run("go", model=model))
            except StepFailed as failed:
                failures.append([failed.error_name, failed.attempts])
        return failures

    assert play(durable_harness, fail_three_times).result() == [
        ["UserError", 1],
        ["PydanticSerializationError", 1],
        ["UsageLimitExceeded", 1],
    ]
    assert (calls["show"], calls["delegate"]) == (1, 1)


def test_an_agent_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match="unique `name`"):
        Agent(TestModel(), capabilities=[CeleryDurability()])
