"""Durable agents of Pydantic AI: each model request and each tool call of a run is a step of the workflow.

It implements the backend of `pydantic_ai.durable_exec`. The agent runs as a task on the event loop of the process, and
hands each call to the thread of its pass, which runs the calls of one turn of the loop as branches. A tool call is
named by its tool and its call id, so the order in which parallel calls arrive does not matter.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import queue
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar, cast

from pydantic import Field, create_model
from pydantic_ai.capabilities import AbstractCapability, WrapRunHandler
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    BoundDurableOperation,
    DurabilityEngineSpec,
    DurableOperation,
    DurableOperationBackend,
    DurableOperationId,
    DynamicToolsetCallToolParams,
    JournalCallableOperationBackend,
    RoleBasedOperationConfig,
    ToolsetCallToolId,
    ToolsetCallToolParams,
)
from pydantic_ai.exceptions import UsageLimitExceeded, UserError
from pydantic_ai.messages import ModelResponse
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, RunContext, ToolDenied

from celery_durable.errors import ConfigInvalid, EventTimeout, NonRetryableError, StepMisuse
from celery_durable.event_loop import STOP_SECONDS, event_loop
from celery_durable.runner.step_attempt import current_run
from celery_durable.step import Step, StepFuture
from celery_durable.step.current import running_attempt
from celery_durable.values import UNSET, StepConfig

__all__ = ["CeleryDurability", "RequestInput", "run_agent"]

T = TypeVar("T")

_CONFIG_KEY = "celery_durable"
_TURN, _END = object(), object()
"""The loop has made a turn; the agent has ended."""


class _AgentRun:
    """The run of an agent in a pass. ``do`` is called on the event loop; ``serve`` runs steps on the pass's thread."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.agents: set[str] = set()
        """The names of the agents that run now."""
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def do(self, submit: Callable[[Step], StepFuture[T]]) -> T:
        """Have the pass's thread run a branch, beside those that come in the same turn of the loop."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((submit, future))
        return await future

    def serve(self, run: Callable[[], Awaitable[T]]) -> T:
        ended: list[tuple[T | None, BaseException | None]] = []

        async def guarded() -> tuple[T | None, BaseException | None]:
            _agent_run.set(self)
            try:
                return await event_loop.call(run), None
            except BaseException as exc:  # noqa: BLE001  # raised on the pass's thread
                return None, exc

        def report(result: tuple[T | None, BaseException | None]) -> None:
            ended.append(result)
            self._calls.put(_END)

        task = event_loop.start(guarded, report, name="the agent")
        try:
            while calls := self._take_calls():
                self._answer(calls)
        except BaseException:  # a suspension, or the pass is interrupted: the agent's task must end before the pass
            task.cancel()
            self._drain()
            raise
        value, error = ended[0]
        if error is not None:
            raise error
        return cast("T", value)

    def _take_calls(self) -> list[_Call]:
        """Wait for a call, and return it with those of the same turn; none if the agent has ended."""
        calls: list[_Call] = []
        while (call := self._calls.get()) is not _TURN:
            if call is _END:
                return []
            if not calls:
                _, future = call
                future.get_loop().call_soon_threadsafe(self._calls.put, _TURN)
            calls.append(call)
        return calls

    def _answer(self, calls: list[_Call]) -> None:
        """Run these calls as branches, and pass the results to the agent when all have ended, in one turn of its loop.

        So its next calls come in the same order on each replay.
        """
        results: dict[asyncio.Future[Any], object] = {}
        branches: dict[asyncio.Future[Any], StepFuture[Any]] = {}
        for submit, future in calls:
            try:
                branches[future] = submit(self.step)
            except Exception as exc:  # noqa: BLE001  # raised in the agent
                results[future] = exc
        try:
            gathered = self.step.gather(*branches.values(), return_exceptions=True)
        except Exception as exc:  # noqa: BLE001  # raised in the agent
            gathered = [exc] * len(branches)
        results.update(zip(branches, gathered, strict=True))
        next(iter(results)).get_loop().call_soon_threadsafe(_resolve, results)

    def _drain(self) -> None:
        try:
            while self._calls.get(timeout=STOP_SECONDS) is not _END:
                pass
        except queue.Empty:  # it ignores its cancellation; nothing that it does is recorded
            pass


_Call = tuple[Callable[[Step], StepFuture[Any]], asyncio.Future[Any]]


def _resolve(results: dict[asyncio.Future[Any], object]) -> None:
    for future, result in results.items():
        if future.done():  # its task was cancelled
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


_agent_run: contextvars.ContextVar[_AgentRun | None] = contextvars.ContextVar("celery_durable_agent", default=None)


def run_agent(step: Step, run: Callable[[], Awaitable[T]]) -> T:
    """Run an agent in a workflow, and wait for its result.

    Args:
        step: The workflow's step object.
        run: Returns the run, as ``lambda: agent.run("...")`` does. The agent has the capability `CeleryDurability`.

    Returns:
        What the run returns.

    Raises:
        StepFailed: A model request or a tool call failed.
        StepMisuse: It was called in an async function.
    """
    return _AgentRun(step).serve(run)


def _current_run() -> _AgentRun:
    found = _agent_run.get()
    if found is None:
        raise StepMisuse("An agent's step was called outside of run_agent(step, ...).")
    return found


class _Backend(JournalCallableOperationBackend[StepConfig]):
    """Runs each operation as a step."""

    def bind(self, operation: DurableOperation[Any, Any, Any]) -> BoundDurableOperation[Any, Any, Any]:
        async def handle(params: Any) -> Any:
            result = await operation.handler(params)
            if isinstance(result, ModelResponse):
                _log_usage(_current_run().step, result)
            return result

        return _Operation(operation, super().bind(dataclasses.replace(operation, handler=handle)))

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],  # noqa: ARG002  # upstream's signature
        config: StepConfig,
    ) -> object:
        call, context = _tool_call.get(), contextvars.copy_context()
        if call is not None:
            is_mcp_call = isinstance(operation_id, ToolsetCallToolId) and operation_id.toolset_kind == "mcp"
            tool = f":{call.name}" if is_mcp_call else ""  # upstream names the tool of any other call
            name = f"{name}{tool} {call.ctx.tool_call_id}"
            if call.ctx.tool_call_approved and config.on_lost is UNSET:
                config = dataclasses.replace(config, on_lost="fail")
        config = dataclasses.replace(config, repeat=True)

        async def run_body() -> object:
            # In the agent's context, but as a step's function: what it starts is inside of this step.
            context.run(running_attempt.set, running_attempt.get())
            return await asyncio.get_running_loop().create_task(_call_body(body), context=context)

        return await _current_run().do(lambda step: step.submit(name, config, run_body))


async def _call_body(body: Callable[[], Awaitable[object]]) -> object:
    try:
        return await body()
    except (UserError, UsageLimitExceeded) as exc:
        raise _as_final(exc) from exc


def _as_final(error: Exception) -> NonRetryableError:
    """Return what fails the step at once: another attempt would end in the same way, and may be paid again."""
    return NonRetryableError(str(error), type(error).__name__)


_ToolCall = ToolsetCallToolParams | DynamicToolsetCallToolParams
_tool_call: contextvars.ContextVar[_ToolCall | None] = contextvars.ContextVar("celery_durable_tool_call", default=None)


@dataclass
class _Operation(BoundDurableOperation[Any, Any, Any]):
    """A bound operation that knows its tool call."""

    declared: DurableOperation[Any, Any, Any]
    bound: BoundDurableOperation[Any, Any, Any]

    @property
    def operation(self) -> DurableOperation[Any, Any, Any]:
        return self.declared

    async def __call__(self, params: Any, *, config: object | None = None) -> Any:
        token = _tool_call.set(params if isinstance(params, _ToolCall) else None)
        try:
            return await self.bound(params, config=config)
        finally:
            _tool_call.reset(token)


def _log_usage(step: Step, response: ModelResponse) -> None:
    try:
        cost = str(response.cost().total_price)
    except (LookupError, AssertionError):  # the price of this model is not known, or it has no name
        cost = None
    step.log.info(
        "Model request",
        category="agent",
        model=response.model_name,
        input_tokens=response.usage.input_tokens,
        output_tokens=response.usage.output_tokens,
        cost_usd=cost,
    )


@dataclass(init=False)
class CeleryDurability(BaseDurabilityCapability[Any]):
    """The capability that makes each model request and each tool call of an agent a step, inside `run_agent`.

    A tool's ``metadata={"celery_durable": StepConfig(...)}`` configures its steps, and False runs it outside of steps,
    again on each replay. A call that was approved has ``on_lost="fail"``, if the tool's `StepConfig` does not differ.

    Args:
        step_config: How the steps run, if a tool does not say otherwise.
        kwargs: As `pydantic_ai.durable_exec.BaseDurabilityCapability` takes them, such as ``models``.
    """

    engine_spec: ClassVar[DurabilityEngineSpec] = DurabilityEngineSpec(
        engine_name="celery_durable",
        durable_unit_noun="step",
        durable_container_noun="workflow",
        codec=JSON_CODEC,
        serialization_failure=_as_final,
        # A replay opens no connection, and a server that is down fails a step, which is retried.
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        tool_config_key=_CONFIG_KEY,
    )

    def __init__(self, *, step_config: StepConfig | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._step_config = step_config or StepConfig()

    async def wrap_run(self, ctx: RunContext[Any], *, handler: WrapRunHandler) -> Any:
        """Refuse a run whose steps a replay would repeat, or mix up with those of another run."""
        run, name = _agent_run.get(), self.name or ""
        if running_attempt.get() is not None or current_run.get() is None:
            return await super().wrap_run(ctx, handler=handler)
        if run is None:
            raise StepMisuse(
                f"The agent {name!r} was run in a workflow, outside of run_agent(), so each replay would repeat its "
                "requests: call run_agent(step, lambda: agent.run(...))."
            )
        if name in run.agents:
            raise StepMisuse(
                f"The agent {name!r} runs twice at the same time in one workflow, and a replay could mix up the steps "
                "of the two runs: await one after the other, or make an agent with another name."
            )
        run.agents.add(name)
        try:
            return await super().wrap_run(ctx, handler=handler)
        finally:
            run.agents.discard(name)

    @property
    def in_durable_context(self) -> bool:
        """Whether this runs inside of `run_agent`, and outside of its steps."""
        return _agent_run.get() is not None and running_attempt.get() is None

    def get_durable_operation_backend(self) -> DurableOperationBackend[StepConfig]:
        """Return the backend that runs operations as steps."""
        config = self._step_config
        roles = RoleBasedOperationConfig(
            model=config, event=config, capability=config, tool=config, resolve_tool=self._find_config
        )
        return _Backend(agent_name=self.name, default_model_id=self.default_model_id, config=roles)

    def _find_config(self, _: DurableOperationId, tool: Any, name: str) -> StepConfig | Literal[False]:
        if tool is None:
            return self._step_config
        given = (tool.tool_def.metadata or {}).get(_CONFIG_KEY, self._step_config)
        if given is False:
            return False
        if not isinstance(given, StepConfig):
            raise ConfigInvalid(f"metadata[{_CONFIG_KEY!r}] of the tool {name}", given, "use a StepConfig, or False")
        return given


@dataclass(kw_only=True)
class RequestInput(AbstractCapability[Any]):
    """Asks a person to approve the tool calls that require it. The workflow waits meanwhile, without a worker.

    The question is ``{"<tool> <call id>": arguments}``, and the answer ``{"<call id>": true}``, with an entry for each
    call. Without an answer in time, the calls are denied, and the model is told so.

    Args:
        to: Whom it asks, as in `Step.wait_for_event`.
        timeout: How long it waits.
        name: The name of the waits, and the type of their events.
    """

    to: str | None = None
    timeout: timedelta = timedelta(days=1)
    name: str = "approval"

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[Any], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        """Ask, and wait for the answer."""
        del ctx
        if not requests.approvals:
            return None
        if _agent_run.get() is None:
            raise UserError("RequestInput of celery_durable asks in a workflow only: run the agent by run_agent().")
        calls = {call.tool_call_id: call for call in requests.approvals}
        fields: dict[str, Any] = {f"call_{n}": (bool, Field(alias=each)) for n, each in enumerate(calls)}
        decision: Any = create_model("Decision", __config__={"extra": "forbid"}, **fields)
        question = {f"{call.tool_name} {each}": call.args_as_dict() for each, call in calls.items()}
        name = f"{self.name} {' '.join(calls)}"
        try:
            event = await _current_run().do(
                lambda step: step.submit_wait_for_event(
                    name, self.name, timeout=self.timeout, schema=decision, ask=question, to=self.to
                )
            )
        except EventTimeout as late:
            return requests.build_results(approvals={each: ToolDenied(str(late)) for each in calls})
        return requests.build_results(approvals=event.payload.model_dump(by_alias=True))
