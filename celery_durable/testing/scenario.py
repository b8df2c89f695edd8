"""Scenarios: a test of workflows as a list of steps. Each step is an action or an assertion.

An example::

    approve = define_scenario(
        "an approved order ships",
        workflows=[order],
        steps=[
            initialize_and_run_until_idle(order, {"cents": 100}, id="o-1"),
            event_and_run_until_idle("approval", {"by": "eve"}),
            read(lambda ctx: ctx.instance().result(), assert_=lambda result: result == "shipped"),
        ],
    )
    run_scenario(approve)

Without ``id`` a step is about the instance that was created last. Every argument except a workflow may be a function
that gets the `Context` and is called when the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from celery_durable.model import CreateOptions
from celery_durable.testing.code import Code, Codes, listed
from celery_durable.testing.cooperative import Barrier
from celery_durable.testing.errors import HarnessMisuse, ScenarioFailed
from celery_durable.testing.harness import DurableHarness
from celery_durable.testing.instance import HarnessInstance
from celery_durable.values import Duration

__all__ = [
    "Context",
    "Scenario",
    "ScenarioStep",
    "advance_time_and_run_until_idle",
    "answer",
    "assert_",
    "cancel",
    "concurrent",
    "crash_at",
    "create",
    "create_batch",
    "define_scenario",
    "event",
    "event_and_run_until_idle",
    "hold",
    "initialize_and_run_until_idle",
    "pause",
    "read",
    "release",
    "restart",
    "restart_runner",
    "resume",
    "run_scenario",
    "run_until_idle",
    "terminate",
    "tick",
]

Given = Any
"""A value, or a function that gets the context and returns the value."""


class Context:
    """The state of a running scenario: its harness, its instances, and the values that its steps have stored."""

    def __init__(self, harness: DurableHarness) -> None:
        self.harness = harness
        self.stored: dict[str, Any] = {}
        self.barriers: dict[str, Barrier] = {}
        self.instances: list[HarnessInstance[Any]] = []

    def __getitem__(self, name: str) -> Any:
        """Return the value that a step has stored under this name."""
        if name not in self.stored:
            raise HarnessMisuse(f"Nothing is stored as {name!r}. Stored so far: {', '.join(self.stored) or 'nothing'}.")
        return self.stored[name]

    def instance(self, id: str | None = None) -> HarnessInstance[Any]:
        """Return an instance that the scenario has created, by default the last one."""
        found = [each for each in self.instances if id in (None, each.id)]
        if not found:
            what = "No instance was created yet" if id is None else f"This scenario has created no instance {id!r}"
            raise HarnessMisuse(f"{what}: use create() or initialize_and_run_until_idle() before.")
        return found[-1]


Act = Callable[[Context, dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class ScenarioStep:
    """One step: its name, its arguments and its function. The functions below make steps."""

    action: str
    given: Mapping[str, Any]
    act: Act = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario as data. ``setup`` gets the context before the first step, to create tables and mocks."""

    name: str
    workflows: tuple[Code, ...] | None
    steps: tuple[ScenarioStep, ...]
    setup: Callable[[Context], object] | None = None


def define_scenario(
    name: str,
    *,
    workflows: Codes | None = None,
    steps: Sequence[ScenarioStep],
    setup: Callable[[Context], object] | None = None,
) -> Scenario:
    """Define a scenario; nothing runs yet. ``workflows`` and the other options are as for `DurableHarness`."""
    return Scenario(name, None if workflows is None else tuple(listed(workflows)), tuple(steps), setup)


def run_scenario(scenario: Scenario, **options: Any) -> Context:
    """Run a scenario in a new harness with these ``options`` (seed, start, store_url, ...), and close the harness.

    Raises ScenarioFailed, which names the failed step and has its error as ``__cause__``.
    """
    with DurableHarness(scenario.workflows, **options) as harness:
        ctx = Context(harness)
        setup = [] if scenario.setup is None else [ScenarioStep("setup", {}, partial(_set_up, scenario.setup))]
        for number, step in enumerate([*setup, *scenario.steps], start=1 - len(setup)):
            _run(scenario, number, step, ctx)
    return ctx


def _set_up(setup: Callable[[Context], object], ctx: Context, _: object) -> None:
    setup(ctx)


def _run(scenario: Scenario, number: int, step: ScenarioStep, ctx: Context) -> None:
    try:
        step.act(ctx, _resolved(step, ctx))
    except Exception as exc:
        reason = str(exc) or type(exc).__name__
        if not isinstance(exc, AssertionError) and str(exc):
            reason = f"{type(exc).__name__}: {exc}"
        raise ScenarioFailed(scenario.name, number, step.action, reason) from exc


_AS_GIVEN = ("workflow", "fn", "assert_")


def _resolved(step: ScenarioStep, ctx: Context) -> dict[str, Any]:
    return {
        name: value(ctx) if callable(value) and not isinstance(value, type) and name not in _AS_GIVEN else value
        for name, value in step.given.items()
    }


# --- instances ----------------------------------------------------------------------------------


def create(
    workflow: str | Code, params: Given = None, *, id: Given = None, run_at: Given = None, labels: Given = None
) -> ScenarioStep:
    """Create an instance; nothing runs yet."""
    given = {"workflow": workflow, "params": params, "id": id, "run_at": run_at, "labels": labels}
    return ScenarioStep("create", given, _create)


def create_batch(workflow: str | Code, batch: Given) -> ScenarioStep:
    """Create several at once: a mapping of ids to params."""

    def act(ctx: Context, given: dict[str, Any]) -> None:
        handle = ctx.harness.workflow(given["workflow"])
        made = handle.create_batch([CreateOptions(id=key, params=value) for key, value in given["batch"].items()])
        ctx.instances += [HarnessInstance(handle, each.id) for each in made]

    return ScenarioStep("create_batch", {"workflow": workflow, "batch": batch}, act)


def initialize_and_run_until_idle(
    workflow: str | Code, params: Given = None, *, id: Given = None, labels: Given = None
) -> ScenarioStep:
    """Create an instance, and run until there is nothing to do at this time."""

    def act(ctx: Context, given: dict[str, Any]) -> None:
        _create(ctx, given)
        ctx.harness.run_until_idle()

    given = {"workflow": workflow, "params": params, "id": id, "labels": labels}
    return ScenarioStep("initialize_and_run_until_idle", given, act)


def event(type: Given, payload: Given = None, *, id: Given = None, event_id: Given = None) -> ScenarioStep:
    """Send an event to the instance ``id``."""
    return ScenarioStep("event", {"type": type, "payload": payload, "id": id, "event_id": event_id}, _send)


def event_and_run_until_idle(
    type: Given, payload: Given = None, *, id: Given = None, event_id: Given = None
) -> ScenarioStep:
    """Send an event, and run until there is nothing to do at this time."""

    def act(ctx: Context, given: dict[str, Any]) -> None:
        _send(ctx, given)
        ctx.harness.run_until_idle()

    given = {"type": type, "payload": payload, "id": id, "event_id": event_id}
    return ScenarioStep("event_and_run_until_idle", given, act)


def answer(step: Given, payload: Given = None, *, by: Given = "tester", id: Given = None) -> ScenarioStep:
    """Answer a wait of the instance ``id`` that asks a person."""

    def act(ctx: Context, given: dict[str, Any]) -> None:
        ctx.instance(given["id"]).answer(given["step"], given["payload"], by=given["by"])

    return ScenarioStep("answer", {"step": step, "payload": payload, "by": by, "id": id}, act)


def pause(id: Given = None) -> ScenarioStep:
    """Pause an instance."""
    return ScenarioStep("pause", {"id": id}, lambda ctx, given: ctx.instance(given["id"]).pause())


def resume(id: Given = None) -> ScenarioStep:
    """Resume an instance."""
    return ScenarioStep("resume", {"id": id}, lambda ctx, given: ctx.instance(given["id"]).resume())


def restart(id: Given = None, *, reason: Given = None) -> ScenarioStep:
    """Restart an instance: start a new run."""
    given = {"id": id, "reason": reason}
    return ScenarioStep("restart", given, lambda ctx, it: ctx.instance(it["id"]).restart(reason=it["reason"]))


def cancel(id: Given = None, *, reason: Given = None) -> ScenarioStep:
    """Cancel an instance: its next step call raises Cancelled."""
    given = {"id": id, "reason": reason}
    return ScenarioStep("cancel", given, lambda ctx, it: ctx.instance(it["id"]).cancel(it["reason"]))


def terminate(id: Given = None, *, reason: Given = None) -> ScenarioStep:
    """Terminate an instance."""
    given = {"id": id, "reason": reason}
    return ScenarioStep("terminate", given, lambda ctx, it: ctx.instance(it["id"]).terminate(it["reason"]))


def _create(ctx: Context, given: dict[str, Any]) -> None:
    ctx.instances.append(ctx.harness.create(**given))


def _send(ctx: Context, given: dict[str, Any]) -> None:
    ctx.instance(given["id"]).send_event(given["type"], given["payload"], id=given["event_id"])


# --- time and runners ---------------------------------------------------------------------------


def tick() -> ScenarioStep:
    """Deliver one message, or sweep once."""
    return ScenarioStep("tick", {}, lambda ctx, _: ctx.harness.tick())


def run_until_idle(max_ticks: Given = 1000) -> ScenarioStep:
    """Run until there is nothing to do at this time."""
    given = {"max_ticks": max_ticks}
    return ScenarioStep("run_until_idle", given, lambda ctx, it: ctx.harness.run_until_idle(it["max_ticks"]))


def advance_time_and_run_until_idle(*, by: Given = None, to: Given = None) -> ScenarioStep:
    """Let time pass: a duration (``by``), or until an aware datetime (``to``). Work runs when it is due."""
    _exactly_one("advance_time_and_run_until_idle", by=by, to=to)

    def act(ctx: Context, given: dict[str, Duration | datetime | None]) -> None:
        if isinstance(given["to"], datetime):
            ctx.harness.advance_to(given["to"])
        else:
            ctx.harness.advance(given["by"])  # type: ignore[arg-type]  # one of both is given

    return ScenarioStep("advance_time_and_run_until_idle", {"by": by, "to": to}, act)


def restart_runner() -> ScenarioStep:
    """Replace the runner with a new process."""
    return ScenarioStep("restart_runner", {}, lambda ctx, _: ctx.harness.restart_runner())


def crash_at(where: Given) -> ScenarioStep:
    """Kill the runner at a checkpoint of this name or number."""
    return ScenarioStep("crash_at", {"where": where}, lambda ctx, given: ctx.harness.faults.crash_at(given["where"]))


def concurrent(runners: Given = 2) -> ScenarioStep:
    """Deliver each message to several runners at once. At each checkpoint the seed decides which runner continues."""
    given = {"runners": runners}
    return ScenarioStep("concurrent", given, lambda ctx, it: ctx.harness.run_concurrently(it["runners"]))


def hold(step: Given) -> ScenarioStep:
    """Hold the function of a step back from now on."""

    def act(ctx: Context, given: dict[str, Any]) -> None:
        ctx.barriers[given["step"]] = ctx.harness.faults.hold(given["step"])

    return ScenarioStep("hold", {"step": step}, act)


def release(step: Given) -> ScenarioStep:
    """Release the runners that `hold` holds at a step."""

    def act(ctx: Context, given: dict[str, Any]) -> None:
        if given["step"] not in ctx.barriers:
            raise HarnessMisuse(f"Step {given['step']!r} is not held: use hold() before.")
        ctx.barriers.pop(given["step"]).release()

    return ScenarioStep("release", {"step": step}, act)


# --- assertions ---------------------------------------------------------------------------------


def read(
    fn: Callable[[Context], Any], *, assert_: Callable[[Any], object] | None = None, store_as: str | None = None
) -> ScenarioStep:
    """Read a value, either to check it (``assert_`` gets it, False fails) or to store it for later steps."""
    _exactly_one("read", assert_=assert_, store_as=store_as)

    def act(ctx: Context, given: dict[str, Any]) -> None:
        value = given["fn"](ctx)
        if given["assert_"] is None:
            ctx.stored[given["store_as"]] = value
        else:
            _judge(given["assert_"](value), f"{value!r} was read, and does not pass")

    return ScenarioStep("read", {"fn": fn, "assert_": assert_, "store_as": store_as}, act)


def assert_(fn: Callable[[Context], object], message: str = "what is asserted does not hold") -> ScenarioStep:
    """Fail if ``fn`` raises or returns a false value. None passes, for functions with their own asserts."""
    given = {"fn": fn, "message": message}
    return ScenarioStep("assert_", given, lambda ctx, it: _judge(it["fn"](ctx), it["message"]))


def _judge(verdict: object, message: str) -> None:
    if verdict is not None and not verdict:
        raise AssertionError(message)


def _exactly_one(action: str, **given: object) -> None:
    if sum(value is not None for value in given.values()) != 1:
        raise HarnessMisuse(f"{action}() needs exactly one of {' and '.join(f'{name}=' for name in given)}.")
