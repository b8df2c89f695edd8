"""Any sequence of public operations, clock moves, deliveries and crashes does what a small model says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from celery_durable import CreateOptions, EventTimeout, Step, WorkflowEvent
from celery_durable.errors import DurableError
from celery_durable.model import InstanceRow
from celery_durable.testing import DurableHarness
from tests.stateful.model import SLEEP, WAIT, Model, Refused

ids = st.sampled_from(["i-1", "i-2"])
_MOST_CRASHES = 4  # in a row: the fifth ends the instance, which is tested elsewhere


def order(event: WorkflowEvent, step: Step) -> list[Any]:
    a = step.do("a", lambda: "a")
    try:
        got = step.wait_for_event("go", "go", timeout=WAIT).payload
    except EventTimeout:
        got = "late"
    step.sleep("rest", SLEEP)
    return [a, got, step.do("b", lambda: "b")]


def _pausing(before: InstanceRow) -> tuple[str, bool]:
    return str(before.status), before.pause_requested


class PublicApi(RuleBasedStateMachine):
    """Every rule is done to both; what they answer or refuse is the same, and so is what can be read afterwards."""

    @initialize()
    def begin(self) -> None:
        self.harness = DurableHarness([order])
        self.api = self.harness.durable.internals.operations
        self.model = Model()
        self.crashes: dict[str, int] = {}
        self.create("i-1")
        self.deliver("i-1")

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        try:
            self._come_to_an_end()
        finally:
            self.harness.close()

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> None:
        answers = []
        for each in (real, model):
            try:
                answers.append(each())
            except DurableError as error:
                answers.append(type(error).__name__)
            except Refused as error:
                answers.append(str(error))
        assert answers[0] == answers[1]

    # --- rules ----------------------------------------------------------------------------------

    @rule(id=ids)
    def create(self, id: str) -> None:
        self.both(lambda: self.api.create.instance("order", id=id) and None, lambda: self.model.create(id))

    @rule(batch=st.lists(ids, max_size=3))
    def create_batch(self, batch: list[str]) -> None:
        options = [CreateOptions(id=each) for each in batch]
        self.both(lambda: self.api.create.batch("order", options), lambda: self.model.create_batch(batch))

    @rule(id=ids, type=st.sampled_from(["go", "go", "stop"]), number=st.integers(0, 5))
    def send_event(self, id: str, type: str, number: int) -> None:
        given = type, number, f"event-{type}-{number}"
        self.both(
            lambda: self.api.events.send("order", id, type, number, id=given[2]),
            lambda: self.model.send_event(id, *given),
        )

    @rule(id=ids)
    def pause(self, id: str) -> None:
        self.both(lambda: _pausing(self.api.lifecycle.pause("order", id)), lambda: self.model.pause(id))

    @rule(id=ids)
    def resume(self, id: str) -> None:
        self.both(lambda: _pausing(self.api.lifecycle.resume("order", id)), lambda: self.model.resume(id))

    @rule(id=ids, method=st.sampled_from(["terminate", "restart"]))
    def end(self, id: str, method: str) -> None:
        """One rule for both: most sequences should come further than these let them."""
        nouns = {"terminate": self.api.lifecycle, "restart": self.api.rewind}
        self.both(lambda: getattr(nouns[method], method)("order", id), lambda: getattr(self.model, method)(id))

    @rule(seconds=st.sampled_from([1, 29, 30, SLEEP, WAIT - 1, WAIT]))
    def advance(self, seconds: int) -> None:
        self.harness.clock.advance(timedelta(seconds=seconds))
        self.model.now += seconds

    @rule(id=ids)
    def deliver(self, id: str) -> None:
        if id in self.model.instances:
            self.harness.deliver(self.harness.instance("order", id))
            self.model.look(id)

    @rule(seconds=st.sampled_from([0, 1, SLEEP, WAIT]))
    def deliver_all(self, seconds: int) -> None:
        self.advance(seconds)
        for name in self.model.instances:
            self.deliver(name)

    @rule(number=st.integers(0, 5))
    def answer(self, number: int) -> None:
        """What waits, gets what it waits for."""
        self.deliver("i-1")
        self.send_event("i-1", "go", number)

    @rule(id=ids, where=st.sampled_from(["claimed", "body"]))
    def crash(self, id: str, where: str) -> None:
        if id not in self.model.instances or self.crashes.get(id, 0) >= _MOST_CRASHES:
            return
        self.crashes[id] = self.crashes.get(id, 0) + 1
        runner = self.harness.runner
        self.harness.faults.crash_at({"claimed": "claimed", "body": "after-body"}[where])
        self.harness.deliver(self.harness.instance("order", id))
        runner.runtime.crash_at = None
        self.model.look(id, where)

    # --- what is seen ---------------------------------------------------------------------------

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "harness"):
            return
        assert {item.id for item in self.api.queries.list(limit=100).items} == set(self.model.instances)
        for name, it in self.model.instances.items():
            assert str(self.api.queries.get("order", name).status.status) == it.status
            for number, run in enumerate(it.runs, start=1):
                history = self.api.history.read("order", name, run=number)
                assert {step.step_key: str(step.status) for step in history.steps} == run.steps
                seen = [(event.type, event.payload, event.consumed_by_step_key) for event in history.events]
                assert seen == [(event.type, event.payload, event.consumed_by) for event in run.events]
                assert history.status.output == run.output

    def _come_to_an_end(self) -> None:
        """Whatever has happened: left alone, everything that is not over completes."""
        for name in self.model.instances:
            self.api.lifecycle.resume("order", name)
            self.model.resume(name)
        self.harness.messages.clear()
        self.harness.advance("1 hour")
        for name, it in self.model.instances.items():
            for _ in range(3):
                self.model.now += 3600
                self.model.look(name)
            status = self.api.queries.get("order", name).status
            assert (str(status.status), status.output) == (it.status, it.run.output)
            assert it.is_over


def check(examples: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    profile = settings(
        max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(PublicApi, settings=profile)


@pytest.mark.timeout(180)
def test_the_public_api_does_what_its_model_says() -> None:
    check(8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_public_api_does_what_its_model_says_at_length() -> None:
    check(500)
