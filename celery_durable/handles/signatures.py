"""`StartSignatures`: a registered workflow as a signature of Celery."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Required, TypedDict, TypeVar

from celery_durable.definitions import Definition
from celery_durable.handles.host import Host
from celery_durable.model import IfExists, IfRunning, Status
from celery_durable.tasks.start import make_start_signature
from celery_durable.values import Duration

if TYPE_CHECKING:  # Celery is known to handles by its types alone
    from celery.canvas import Signature

P_contra = TypeVar("P_contra", contravariant=True)


class StartSignatures(Generic[P_contra]):
    """The signatures that start instances of a workflow, for chains, groups, chords and countdowns.

    The instance starts when a worker runs the signature's task, `celery_durable.start`. The task's result is the
    instance's id; it does not wait for the instance.
    """

    def __init__(self, definition: Definition, host: Callable[[], Host]) -> None:
        self.definition, self._host = definition, host

    @property
    def name(self) -> str:
        """The name under which it is registered."""
        return self.definition.name

    @property
    def host(self) -> Host:
        """The `Durable` it runs under.

        Raises:
            NotConfigured: This process has none, or several and no current Celery app.
        """
        return self._host()

    def s(
        self,
        params: P_contra | None = None,
        *,
        id: str | None = None,  # the public name
        if_exists: IfExists | None = None,
        if_running: IfRunning | None = None,
        at_latest: Duration | None = None,
        max_run: Duration | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Signature[Any]:
        """Return the signature that starts an instance.

        Args:
            params: As in `create`. None: in a chain, the result of the task before.
            id: As in `create`. None: the id of the task, so that a repeated message starts nothing more.
            if_exists: As in `create`, but by default "return". "postpone" moves the start to the countdown.
            if_running: As in `create`. A message that comes twice has no effect the second time; of each run the last
                100 messages are remembered.
            at_latest: As in `create`.
            max_run: As in `create`.
            labels: As in `create`.

        Returns:
            A signature. Its countdown or ETA becomes the ``run_at`` of the instance.

        Raises:
            WorkflowParamsInvalid: ``params`` does not fit the type that the workflow declares.
            NotSerializable: ``params`` has no JSON form.
            PayloadTooLarge: ``params`` is larger than ``durable_max_payload_bytes``.
            DurationInvalid: ``max_run`` is no duration between a second and 36,500 days, or ``at_latest`` is none.
        """
        options = {"if_exists": if_exists, "if_running": if_running, "at_latest": at_latest, "max_run": max_run}
        return self._sign(params, is_immutable=False, id=id, labels=labels, **options)

    def si(
        self,
        params: P_contra | None = None,
        *,
        id: str | None = None,
        if_exists: IfExists | None = None,
        if_running: IfRunning | None = None,
        at_latest: Duration | None = None,
        max_run: Duration | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Signature[Any]:
        """Return the signature that starts an instance, whatever the result of the task before it.

        Args:
            params: As in `create`.
            id: As in `s`.
            if_exists: As in `s`.
            if_running: As in `s`.
            at_latest: As in `create`.
            max_run: As in `create`.
            labels: As in `create`.

        Returns:
            A signature, as `s` returns it.

        Raises:
            WorkflowParamsInvalid: As in `s`.
        """
        options = {"if_exists": if_exists, "if_running": if_running, "at_latest": at_latest, "max_run": max_run}
        return self._sign(params, is_immutable=True, id=id, labels=labels, **options)

    def _sign(self, params: P_contra | None, *, is_immutable: bool, **options: Any) -> Signature[Any]:
        internals = self.host.internals
        return make_start_signature(internals.app, internals, self.name, params, options, is_immutable=is_immutable)


# Keyword arguments of the methods that create instances, for type checkers. `Workflow` documents them.


if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


class StartKeywords(TypedDict, total=False):
    """The keyword arguments of `Workflow.create` and `Workflow.acreate`."""

    id: str | None
    if_exists: IfExists
    if_running: IfRunning | None
    run_at: datetime | Duration | None
    at_latest: Duration | None
    max_run: Duration | None
    labels: Mapping[str, str] | None
    using: str | None


class CreateKeywords(StartKeywords, total=False):
    """The keyword arguments of `Workflow.create`."""

    session: Session | None


class AsyncCreateKeywords(StartKeywords, total=False):
    """The keyword arguments of `Workflow.acreate`."""

    session: AsyncSession | None


class RestartKeywords(TypedDict, total=False):
    """The keyword arguments of `Workflow.restart_or_create`."""

    id: Required[str]
    if_status: Collection[Status | str]
    if_version: Collection[str] | None
    reason: str | None
    labels: Mapping[str, str] | None
