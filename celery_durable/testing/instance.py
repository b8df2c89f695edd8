"""An instance in a harness: the handle of production, with more properties for assertions."""

from __future__ import annotations

from typing import Any, TypeVar

from celery_durable import values
from celery_durable.handles import WorkflowInstance
from celery_durable.handles.results import decode_output
from celery_durable.model import OPEN_STEPS, ErrorInfo, EventRecord, RunRef, Status, StepRecord
from celery_durable.testing.errors import HarnessMisuse, NotEnded

R_co = TypeVar("R_co", covariant=True)


class HarnessInstance(WorkflowInstance[R_co]):
    """An instance, read and changed through the real operations. Its methods do not run the workflow."""

    @property
    def ref(self) -> RunRef:
        """The reference of its current run, as in a dispatch message."""
        return self._operations.queries.get(self.workflow.name, self.id).instance.ref

    def result(self, timeout: values.Duration | None = None) -> R_co:  # noqa: ARG002  # the handle's signature
        """Return the output without waiting.

        Raises:
            WorkflowFailed: The instance failed or was terminated.
            NotEnded: It has not ended. A production handle would wait.
        """
        status = self.status()
        if not status.status.is_terminal:
            raise NotEnded(self.workflow.name, self.id, status.status, self._open_steps())
        output: R_co = decode_output(self.workflow.definition, self.id, status)
        return output

    @property
    def error(self) -> ErrorInfo | None:
        """The name and message of the error with which it failed; None if it did not."""
        return self.status().error

    @property
    def has_ended(self) -> bool:
        """Whether it is complete, errored or terminated."""
        return self.status().status.is_terminal

    @property
    def is_waiting(self) -> bool:
        """Whether it sleeps, or waits for an event or a retry."""
        return self.status().status is Status.WAITING

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return dict(self.history().labels)

    def steps(self, run: int | None = None) -> tuple[StepRecord, ...]:
        """Return the steps of a run in call order. ``run`` None: the current run."""
        return self.history(run).steps

    def step(self, key: str, run: int | None = None) -> StepRecord:
        """Return one step by its key: its name, with a number if it has ``repeat=True``. Raises HarnessMisuse."""
        steps = self.steps(run)
        for step in steps:
            if step.step_key == key:
                return step
        names = ", ".join(repr(step.step_key) for step in steps) or "none"
        status = self.status()
        how = "" if status.error is None else f" It is {status.status} with {status.error.name}: {status.error.message}"
        raise HarnessMisuse(f"Instance {self.id!r} has no step {key!r} in this run. It has: {names}.{how}")

    def statuses(self, run: int | None = None) -> dict[str, str]:
        """Return step keys in call order with their statuses: ``{"charge": "completed", "ship": "waiting"}``."""
        return {step.step_key: str(step.status) for step in self.steps(run)}

    def events(self, run: int | None = None) -> tuple[EventRecord, ...]:
        """Return the events of a run in order of arrival; ``consumed_by_step_key`` names the wait that took one."""
        return self.history(run).events

    def lines(self, run: int | None = None) -> list[str]:
        """Return the messages of the run's log."""
        return [line.message for line in self.logs(run=run)]

    def _open_steps(self) -> list[str]:
        return [_described(step) for step in self.steps() if step.status in OPEN_STEPS]


def _described(step: StepRecord) -> str:
    what: Any = f"step {step.name!r} is {step.status}"
    if step.limits is not None:
        what += f" for {step.awaited}"
    if step.wait_event_type is not None:
        what += f" for event {step.wait_event_type!r}"
    if step.wait_topic is not None:
        what += f" for topic {step.wait_topic!r}"
    if step.task is not None and step.next_retry_at is None:
        what += f" for Celery task {step.task!r}"
    if step.child is not None:
        what += f" for instance {step.child.instance_id!r} of workflow {step.child.workflow!r}"
    until = step.next_retry_at or step.wake_at
    return what if until is None else f"{what} until {until:%Y-%m-%d %H:%M:%S} UTC"
