"""Creating instances: one, many, or in the caller's own transaction."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from celery_durable import notify, values
from celery_durable.definitions import Definition
from celery_durable.errors import (
    BatchTooLarge,
    InstanceAlreadyExists,
    InstanceNotFound,
    OutOfScope,
    ValueRefused,
    WorkflowParamsInvalid,
)
from celery_durable.model import (
    TERMINAL,
    Child,
    CreateOptions,
    DueRun,
    IfExists,
    IfRunning,
    InstanceRow,
    RestartOrCreateResult,
    RunRef,
    Status,
)
from celery_durable.operations.context import OperationContext, Versions, read_status
from celery_durable.operations.repeats import Repeat, Start, parse_start
from celery_durable.store.engine import Tx, bounds
from celery_durable.store.instances import batches, instances, lifecycle
from celery_durable.store.instances.batches import NewInstance
from celery_durable.store.runs import runs
from celery_durable.values import Duration

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session


_MIN_MAX_RUN, _MAX_MAX_RUN = timedelta(seconds=1), timedelta(days=36_500)


class CreateOperations:
    """The operations that create instances."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def instance(
        self,
        workflow: str,
        params: Any = None,
        *,
        id: str | None = None,  # the public name
        if_exists: IfExists = "error",
        if_running: IfRunning | None = None,
        run_at: datetime | Duration | None = None,
        at_latest: Duration | None = None,
        max_run: Duration | None = None,
        labels: Mapping[str, str] | None = None,
        session: Session | None = None,
        request_id: str | None = None,
    ) -> str:
        """Record a new instance and make it due. If it raises, nothing is written.

        A request with the same ``request_id`` starts one run of an instance that exists.
        """
        self._context.check_create_enabled()
        definition = self._get_definition(workflow)
        max_sleep = self._context.settings.max_sleep
        start = parse_start(id, run_at, at_latest, if_exists, if_running, max_sleep=max_sleep)
        max_length = self._context.settings.max_instance_id
        instance_id = self._context.new_id() if id is None else values.check_instance_id(id, max_length)
        row = self._build_row(definition, instance_id, params, labels)
        row["max_run"] = None if max_run is None else parse_max_run(max_run)
        if start.repeats:
            self._repeat(row | {"commit_id": request_id or row["commit_id"]}, start, session)
            return instance_id
        is_new = self._insert(definition, row, start, session)
        if not is_new and (if_exists == "error" or not self._is_existing_in_scope(workflow, instance_id)):
            raise InstanceAlreadyExists(workflow, instance_id)
        return instance_id

    def encode_params(self, workflow: str, params: Any) -> str:
        """Return the JSON text of parameters of a workflow; raises what `instance` raises for them."""
        return self._encode_params(self._get_definition(workflow), params)

    def _insert(self, definition: Definition, row: dict[str, Any], start: Start, session: Session | None) -> bool:
        """Insert the row in its own transaction, or in that of the session. Returns False if the id is taken."""
        store, max_sleep = self._context.store, self._context.settings.max_sleep
        due = self._first_run(definition, row["instance_id"])

        def insert(tx: Tx) -> bool:
            row["run_at"] = None if start.at is None else start.find_time(instances.read_clock(tx), max_sleep)
            return instances.insert(tx, **row)

        def notify_and_wake() -> None:
            notify.send_workflow_created(due.ref, run_at=row["run_at"])
            if start.at is None:
                self._context.publish_runs([due])

        if session is not None:
            is_new = insert(store.join(session))
        else:
            is_single = start.at is None and not row["initial_labels"] and not row["plan"].steps
            is_new = store.run_statement(insert) if is_single else store.transact(insert)
        if is_new:
            self._context.after_commit(notify_and_wake, session)
        return is_new

    def _repeat(self, row: dict[str, Any], start: Start, session: Session | None) -> None:
        """Create the instance in its own transaction or in that of the session, or have the existing one run again."""
        write, store = Repeat(self._context, row, start).write, self._context.store
        done = store.transact(write) if session is None else write(store.join(session))
        self._context.after_commit(functools.partial(done.announce, self._context), session)

    def _is_existing_in_scope(self, workflow: str, instance_id: str) -> bool:
        if self._context.scope is None:
            return True
        instance = Child(workflow, instance_id)
        return instance in self._context.store.read(
            lambda tx: bounds.filter_in_scope(tx, self._context.scope, [instance])
        )

    def batch(self, workflow: str, batch: Sequence[CreateOptions[Any]], *, session: Session | None = None) -> list[str]:
        """Record up to ``durable_max_batch`` instances in one transaction, without ids that exist."""
        self._context.check_create_enabled()
        definition = self._get_definition(workflow)
        settings = self._context.settings
        _check_batch(batch, limit=settings.max_batch)
        new: dict[str, NewInstance] = {}
        for item in batch:
            given = self._context.new_id() if item.id is None else item.id
            instance_id = values.check_instance_id(given, settings.max_instance_id)
            labels = self._add_scope_labels(instance_id, values.check_labels(item.labels))
            params = self._encode_params(definition, item.params, item=instance_id)
            new.setdefault(instance_id, NewInstance(instance_id, params, labels))
        ordered, commit_id = [new[key] for key in sorted(new)], self._context.runtime.new_token()

        def work(tx: Tx) -> set[str]:
            return batches.insert(tx, workflow, ordered, commit_id=commit_id, **self._build_start(definition))

        def find_committed(tx: Tx) -> set[str] | None:
            return batches.find_created(tx, workflow, list(new), commit_id=commit_id) or None

        store = self._context.store
        created = store.transact(work, find_committed=find_committed) if session is None else work(store.join(session))
        created_ids = [key for key in new if key in created]
        due_runs = [self._first_run(definition, key) for key in created_ids]

        def notify_and_wake() -> None:
            for due in due_runs:
                notify.send_workflow_created(due.ref)
            self._context.publish_runs(due_runs)

        self._context.after_commit(notify_and_wake, session)
        return created_ids

    def restart_or_create(
        self,
        workflow: str,
        params: Any = None,
        *,
        id: str,  # the public name
        if_status: Collection[Status | str] = TERMINAL,
        if_version: Versions = None,
        reason: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> RestartOrCreateResult:
        """Restart the instance with this id if it is in one of these statuses, or create it; else leave it "unchanged".

        A restart keeps the first parameters and the labels. Of several concurrent callers, only one starts the run.
        """
        self._context.check_create_enabled()
        definition = self._get_definition(workflow)
        restartable = _read_conditions(if_status, if_version)
        instance_id = values.check_instance_id(id, self._context.settings.max_instance_id)
        new = self._build_row(definition, instance_id, params, labels)
        reason = self._context.clean_reason(reason)

        def work(tx: Tx) -> _Started:
            return self._insert_or_restart(tx, new, restartable, if_version, reason)

        def was_applied(tx: Tx) -> _Started | None:
            if runs.find_creator(tx, workflow, instance_id) is None:
                return None
            row = self._context.lock_row(tx, workflow, instance_id)
            number = runs.find_by_commit(tx, row, commit_id=new["commit_id"])
            return None if number is None else _describe_started(row, number)

        result, due_runs = self._context.store.transact(work, find_committed=was_applied)

        def notify_and_wake() -> None:
            for due in due_runs:
                if result.outcome == "created":
                    notify.send_workflow_created(due.ref)
                else:
                    notify.send_workflow_restarted(due.ref, reason=reason)
            self._context.publish_runs(due_runs)

        self._context.after_commit(notify_and_wake)
        return result

    def _insert_or_restart(
        self, tx: Tx, new: dict[str, Any], restartable: Collection[Status], if_version: Versions, reason: str | None
    ) -> _Started:
        """Insert the instance. If it exists, lock it, and restart it if it is in one of the statuses."""
        workflow, instance_id = new["workflow"], new["instance_id"]
        is_new = instances.insert_if_missing(tx, **new)
        try:
            row = self._context.lock_row(tx, workflow, instance_id, None if is_new else if_version)
        except InstanceNotFound:  # the id is taken outside the caller's scope
            raise InstanceAlreadyExists(workflow, instance_id) from None
        if is_new:
            return _describe_started(row, 1)
        if row.status not in restartable:
            return RestartOrCreateResult("unchanged", instance_id, row.run_number, row.status), []
        due = lifecycle.restart(
            tx, row, grace=new["grace"], commit_id=new["commit_id"], reason=reason, plan=new["plan"]
        )
        return _describe_started(row, due.ref.run_number)

    def _get_definition(self, workflow: str) -> Definition:
        definition = self._context.registry.get(workflow)
        values.check_identifier("Workflow name", definition.name, self._context.settings.max_workflow_name)
        return definition

    def _build_row(
        self,
        definition: Definition,
        instance_id: str,
        params: Any,
        labels: Mapping[str, str] | None,
    ) -> dict[str, Any]:
        return {
            "workflow": definition.name,
            "instance_id": instance_id,
            "initial_labels": self._add_scope_labels(instance_id, values.check_labels(labels)),
            "params": self._encode_params(definition, params),
            "commit_id": self._context.runtime.new_token(),
            **self._build_start(definition),
        }

    def _encode_params(self, definition: Definition, params: Any, *, item: str | None = None) -> str:
        """Check the parameters and return their JSON. ``item`` is the id of an item of a batch."""
        try:
            # A model whose fields all have defaults needs no parameters.
            has_fields = params is None and definition.params.parameters
            checked = self._check_no_params(definition) if has_fields else definition.params.check(params)
        except values.ValidationFailed as exc:
            raise WorkflowParamsInvalid(definition.name, exc.problems, item=item) from exc
        what = f"Parameters of workflow {definition.name!r}" + (f" for instance {item!r}" if item else "")
        return definition.params.encode(checked, what=what, limits=self._context.settings.limits)

    def _check_no_params(self, definition: Definition) -> Any:
        """Return the parameters of a workflow that was given none: None if its type allows that, else its defaults."""
        try:
            return definition.params.check(None)
        except values.ValidationFailed:
            return definition.params.check({})

    def _build_start(self, definition: Definition) -> dict[str, Any]:
        return {
            "queue": definition.queue or self._context.settings.queue,
            "grace": self._context.grace,
            "plan": definition.plan(self._context.settings.step_policy),
            "retention": self._context.retention(definition.name),
        }

    def _add_scope_labels(self, instance_id: str, labels: Mapping[str, str]) -> Mapping[str, str]:
        """Return the labels of a new instance, including those of the caller's scope; raises OutOfScope."""
        if self._context.scope is None:
            return labels
        all_labels = {**labels, **self._context.scope.labels}
        contradicts_scope = any(all_labels[name] != value for name, value in labels.items())
        if contradicts_scope or not self._context.scope.allows_id(instance_id):
            raise OutOfScope(instance_id)
        return values.check_labels(all_labels)

    def _first_run(self, definition: Definition, instance_id: str) -> DueRun:
        return DueRun(RunRef(definition.name, instance_id, 1), definition.queue or self._context.settings.queue)


_Started = tuple[RestartOrCreateResult, list[DueRun]]


def _describe_started(row: InstanceRow, number: int) -> _Started:
    outcome: Literal["created", "restarted"] = "created" if number == 1 else "restarted"
    due = DueRun(RunRef(row.workflow, row.instance_id, number), row.queue)
    return RestartOrCreateResult(outcome, row.instance_id, number, Status.ACTIVE), [due]


def _read_conditions(if_status: object, if_version: object) -> set[Status]:
    """Return the statuses in which an instance is restarted; raises ValueRefused, also for the versions."""
    if isinstance(if_status, str) or not isinstance(if_status, Iterable):
        raise ValueRefused(f"if_status={if_status!r} cannot be used: pass a list of statuses.")
    if if_version is not None and not isinstance(if_version, Collection):
        raise ValueRefused(f"if_version={if_version!r} cannot be used: pass a list of versions, or None.")
    return {read_status(status) for status in if_status}


def _check_batch(batch: object, *, limit: int) -> None:
    # The messages name no content of the values: parameters may be secret.
    if not isinstance(batch, Collection):
        raise ValueRefused(f"The batch is a {type(batch).__name__}: pass a list of CreateOptions.")
    if len(batch) > limit:
        raise BatchTooLarge(len(batch), limit)
    for position, item in enumerate(batch):
        if not isinstance(item, CreateOptions):
            raise ValueRefused(
                f"Item {position} of the batch is a {type(item).__name__}: pass CreateOptions(id, params, labels)."
            )


def parse_max_run(max_run: Duration) -> timedelta:
    """Return the limit of an instance's runs; raises DurationInvalid."""
    return values.parse_duration(max_run, minimum=_MIN_MAX_RUN, maximum=_MAX_MAX_RUN)
