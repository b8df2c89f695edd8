"""Every exception, in one tree; each class owns its sentence: what is wrong, with which value, what to do next.

::

    DurableError
      NotConfigured, ConfigInvalid (SettingUnknown), StoreMismatch, SchemaOutdated, UnsupportedDatabase,
      StoreUnavailable
      DefinitionInvalid (AsyncNotSupported), WorkflowNameTaken, BindingKeyTaken, WorkflowsRequired, WorkflowNotFound
      ValueRefused (NameInvalid, InvalidInstanceId, InvalidEventType, InvalidTopic, InvalidLabel, TooManyLabels,
                    EmissionMismatch, DurationInvalid, InstantInvalid, StartTooFar, CursorInvalid, NotSerializable,
                    PayloadTooLarge, BatchTooLarge, TaskRefused)
      WorkflowParamsInvalid, WorkflowOutputInvalid
      InstanceNotFound, RunNotFound, StepNotFound, InstanceAlreadyExists, InstanceTerminal, InstanceNotErrored,
      StepNotOpen, NotInOutbox, NotGivenUp, OutOfScope, VersionMismatch, ResultTimeout, WorkflowFailed
      NonRetryableError                    raised by authors, and by us where a retry cannot help
        StepTypeMismatch, StepNameReused, StepLimitExceeded, StepTxMisuse, StepMisuse, BranchNeverGathered,
        StepResultInvalid, StepCommitConflict, StepCancelled, HandlerAnswerInvalid
      StepFailed                           what a failed step raises into the workflow
        StepTimeout, StepMaxAttemptsExceeded, EventTimeout, EventPayloadInvalid
      SuspensionSwallowed, WorkerCrashLoop  what else can end an instance
      PassStuck                            logged, never raised
    Interruption (BaseException)           not for authors
      Suspend, StepInterrupted, Superseded, PassBroken
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar


class DurableError(Exception):
    """The base of everything that celery_durable raises for people to read.

    ``code`` is stable and machine readable; ``http_status`` is what an HTTP door answers with.
    """

    code: ClassVar[str] = "DURABLE_ERROR"
    http_status: ClassVar[int] = 500

    def __reduce__(self) -> tuple[Any, ...]:
        # The default pickling calls cls(*args) and breaks for every __init__ with more than one
        # argument; prefork workers pickle exceptions.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[DurableError], args: tuple[Any, ...], state: dict[str, Any]) -> DurableError:
    exc = cls.__new__(cls, *args)
    exc.args = args
    exc.__dict__.update(state)
    return exc


# --- set-up -------------------------------------------------------------------------------------


class NotConfigured(DurableError):
    """A workflow is used, but no Durable is attached to a Celery app in this process."""

    code = "NOT_CONFIGURED"

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"{what} needs a Durable, and this process has none (or several and no current Celery app). "
            "Either attach one to your app, `durable = Durable(app)`, and import that module first, "
            "or make the app current with `app.set_current()`."
        )


class ConfigInvalid(DurableError):
    """A ``durable_*`` setting has a value that cannot work."""

    code = "CONFIG_INVALID"

    def __init__(self, setting: str, value: object, remedy: str) -> None:
        self.setting, self.value = setting, value
        super().__init__(f"Setting {setting}={_shown(value)} cannot be used: {remedy}")


class SettingUnknown(ConfigInvalid):
    """There is no ``durable_*`` setting of this name. Its value is not shown: it may be a URL with a password."""

    code = "SETTING_UNKNOWN"

    def __init__(self, setting: str, near: str | None) -> None:
        self.setting = setting
        remedy = "Remove it." if near is None else f"Did you mean {near}?"
        DurableError.__init__(self, f"There is no setting {setting}. {remedy}")


class StoreMismatch(DurableError):
    """The session handed in belongs to another database than the durable store."""

    code = "STORE_MISMATCH"

    def __init__(self, session_url: str, store_url: str) -> None:
        self.session_url, self.store_url = session_url, store_url
        super().__init__(
            f"The session is bound to {session_url}, but workflows are stored in {store_url}. One transaction "
            "cannot span both: bind the session to the store's database, or leave out session=."
        )


class StoreUnavailable(DurableError):
    """The database did not answer within the caller's time limit."""

    code, http_status = "STORE_UNAVAILABLE", 503

    def __init__(self) -> None:
        super().__init__("The database does not answer. Nothing is lost: try again in a few seconds.")


class SchemaOutdated(DurableError):
    """The database's tables are missing or belong to another version of the package."""

    code = "SCHEMA_OUTDATED"

    def __init__(self, found: str | None, expected: str) -> None:
        self.found, self.expected = found, expected
        state = "has no celery_durable tables" if found is None else f"is at revision {found!r}"
        super().__init__(
            f"The database {state}; this version needs revision {expected!r}. "
            "Bring it up to date: celery -A <your app> durable migrate"
        )


class UnsupportedDatabase(DurableError):
    """The store's database lacks something that durability rests on."""

    code = "UNSUPPORTED_DATABASE"

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(
            f"{found} is not supported. Use PostgreSQL 15 or newer, MariaDB 10.6 or newer, or SQLite 3.35 or newer."
        )


# --- definitions --------------------------------------------------------------------------------


class DefinitionInvalid(DurableError):
    """A workflow or step definition cannot work as written."""

    code = "DEFINITION_INVALID"


class AsyncNotSupported(DefinitionInvalid):
    """``async def`` workflows and step bodies are not supported yet."""

    code = "ASYNC_NOT_SUPPORTED"

    def __init__(self, what: str, name: str) -> None:
        self.name = name
        super().__init__(
            f"{what} {name!r} is an async function, and async workflows and steps are not supported yet. "
            "Write it as a plain function; inside a step, asyncio.run(...) is allowed."
        )


class WorkflowNameTaken(DurableError):
    """Two different workflows claim the same name."""

    code = "WORKFLOW_NAME_TAKEN"

    def __init__(self, name: str, first: str, second: str) -> None:
        self.name = name
        super().__init__(
            f"Workflow name {name!r} is already taken by {first}; {second} needs another: @durable_workflow(name=...)."
        )


class BindingKeyTaken(DurableError):
    """Two different workflows claim the same binding key."""

    code = "BINDING_KEY_TAKEN"

    def __init__(self, key: str, first: str, second: str) -> None:
        self.key = key
        super().__init__(
            f"Binding key {key!r} is already taken by {first}; register {second} under another: "
            "durable.register({...})."
        )


class WorkflowsRequired(DurableError):
    """A package that runs workflows was set up without a service that does."""

    code, http_status = "WORKFLOWS_REQUIRED", 503

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(
            f"{package} runs durable workflows, and was given nothing to run them. Pass it the service of your "
            "application, `durable.service`, and register its workflows: durable.register(required_workflows)."
        )


class WorkflowNotFound(DurableError):
    """No workflow of this name is registered in this process."""

    code, http_status = "WORKFLOW_NOT_FOUND", 404

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        listed = ", ".join(sorted(known)) or "none"
        super().__init__(
            f"No workflow is registered as {name!r} in this process (registered: {listed}). "
            "Import the module that defines it, or add it to the Celery app's `imports`."
        )


# --- values -------------------------------------------------------------------------------------


class ValueRefused(DurableError):
    """A value from a caller cannot be accepted; nothing was written."""

    code, http_status = "VALUE_REFUSED", 400


class NameInvalid(ValueRefused):
    """A workflow, step, category or topic name breaks the rules for names."""

    code = "NAME_INVALID"

    def __init__(self, what: str, value: object, rule: str) -> None:
        self.what, self.value = what, value
        super().__init__(f"{what} {_shown(value)} is not allowed: {rule}.")


class InvalidInstanceId(NameInvalid):
    """An instance id breaks the rules for ids."""

    code = "INVALID_INSTANCE_ID"


class InvalidEventType(NameInvalid):
    """An event type breaks the rules for event types."""

    code = "INVALID_EVENT_TYPE"


class InvalidTopic(NameInvalid):
    """A topic breaks the rules for topics."""

    code = "INVALID_TOPIC"


class InvalidLabel(NameInvalid):
    """A label's name or value breaks the rules for labels."""

    code = "INVALID_LABEL"


class TooManyLabels(ValueRefused):
    """An instance would have more labels than it may."""

    code = "TOO_MANY_LABELS"

    def __init__(self, count: int, limit: int) -> None:
        self.count, self.limit = count, limit
        super().__init__(
            f"{count} labels are too many: an instance may have {limit}. Take one away, tx.set_labels({{name: None}}), "
            "or keep in the parameters what nobody searches for."
        )


class EmissionMismatch(ValueRefused):
    """The id of an emission belongs to another one that is still under way."""

    code, http_status = "EMISSION_MISMATCH", 409

    def __init__(self, id: str, topic: str) -> None:
        self.id, self.topic = id, topic
        super().__init__(
            f"Emission {_shown(id)} is under way, to topic {topic!r} or with another payload. "
            "Use one id for one emission, and repeat it as it was."
        )


class DurationInvalid(ValueRefused):
    """A duration cannot be read or lies outside its range."""

    code = "DURATION_INVALID"

    def __init__(self, value: object, reason: str) -> None:
        self.value = value
        super().__init__(
            f"Duration {_shown(value)} cannot be used: {reason}. Write a timedelta, seconds as a number, "
            'or text such as "10 seconds", "1.5 h", "3 days".'
        )


class InstantInvalid(ValueRefused):
    """A point in time is none, or nobody knows which: it has no time zone."""

    code = "INSTANT_INVALID"

    def __init__(self, what: str, value: object) -> None:
        self.what, self.value = what, value
        super().__init__(
            f"{what}={_shown(value)} cannot be used: write a datetime of the years 1 to 9999 with a time zone, "
            "such as datetime(2030, 1, 31, 8, 0, tzinfo=UTC)."
        )


class StartTooFar(ValueRefused):
    """An instance is to start later than anything may wait."""

    def __init__(self, run_at: datetime, maximum: timedelta) -> None:
        self.run_at, self.maximum = run_at, maximum
        super().__init__(
            f"run_at={run_at} is too far ahead: a start can be put off by up to {maximum} "
            "(durable_max_sleep_seconds). Create the instance later."
        )


class CursorInvalid(ValueRefused):
    """A page cursor was not made by the list that it is handed to, for the same filter and caller."""

    code = "INVALID_CURSOR"

    def __init__(self, value: object) -> None:
        super().__init__(
            f"Cursor {_shown(value)} was not made by this list with this filter, for this caller. "
            "Start again without a cursor."
        )


class NotSerializable(ValueRefused):
    """A value has no JSON form; ``path`` tells where."""

    code = "NOT_SERIALIZABLE"

    def __init__(self, what: str, path: str, reason: str) -> None:
        self.what, self.path, self.reason = what, path, reason
        super().__init__(
            f"{what} cannot be stored as JSON: {path} {reason}. Return plain data "
            "(or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other things elsewhere "
            "and store a reference."
        )


class PayloadTooLarge(ValueRefused):
    """A value's JSON form is larger than the limit."""

    code, http_status = "PAYLOAD_TOO_LARGE", 413

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        self.what, self.size_bytes, self.limit_bytes = what, size_bytes, limit_bytes
        super().__init__(
            f"{what} has {size_bytes} bytes as JSON; at most {limit_bytes} are allowed. "
            "Keep large data elsewhere and store a reference, or raise durable_max_payload_bytes."
        )


class BatchTooLarge(ValueRefused):
    """More items in one batch than allowed."""

    code = "BATCH_TOO_LARGE"

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"A batch of {size} is too large; create at most {limit} instances in one call.")


class TaskRefused(ValueRefused):
    """A task cannot be sent with a step."""

    code = "TASK_REFUSED"

    def __init__(self, task: object, why: str) -> None:
        self.task = task
        super().__init__(f"Task {_shown(task)} cannot be sent with a step: {why}.")


class WorkflowParamsInvalid(DurableError):
    """The parameters do not fit what the workflow declares; nothing was written."""

    code, http_status = "WORKFLOW_PARAMS_INVALID", 400

    def __init__(self, workflow: str, problems: Sequence[tuple[str, str]], *, item: str | None = None) -> None:
        self.workflow, self.problems, self.item = workflow, list(problems), item
        subject = f"Parameters of workflow {workflow!r}" + (f" for instance {item!r}" if item else "")
        super().__init__(f"{subject} are not valid: {_problems(problems)}.")


class WorkflowOutputInvalid(DurableError):
    """What the workflow returned does not fit its declared return type."""

    code = "WORKFLOW_OUTPUT_INVALID"

    def __init__(self, workflow: str, problems: Sequence[tuple[str, str]]) -> None:
        self.workflow, self.problems = workflow, list(problems)
        super().__init__(
            f"The output of workflow {workflow!r} does not fit its return annotation: {_problems(problems)}. "
            "Mend the return value or the annotation, then restart the instance."
        )


# --- instances ----------------------------------------------------------------------------------


class InstanceNotFound(DurableError):
    """No instance has this id under this workflow."""

    code, http_status = "INSTANCE_NOT_FOUND", 404

    def __init__(self, workflow: str, instance_id: str) -> None:
        self.workflow, self.instance_id = workflow, instance_id
        super().__init__(
            f"Workflow {workflow!r} has no instance {instance_id!r}. "
            f"List its instances: celery -A <your app> durable ls --workflow {workflow}"
        )


class RunNotFound(DurableError):
    """The instance has no run of this number."""

    code, http_status = "RUN_NOT_FOUND", 404

    def __init__(self, workflow: str, instance_id: str, run_number: int, current: int) -> None:
        self.workflow, self.instance_id, self.run_number = workflow, instance_id, run_number
        super().__init__(
            f"Instance {instance_id!r} of workflow {workflow!r} has no run {run_number}; it has runs 1 to {current}."
        )


class InstanceAlreadyExists(DurableError):
    """The id is taken; instance ids are unique per workflow."""

    code, http_status = "INSTANCE_ID_ALREADY_EXISTS", 409

    def __init__(self, workflow: str, instance_id: str) -> None:
        self.workflow, self.instance_id = workflow, instance_id
        super().__init__(
            f"Workflow {workflow!r} already has an instance {instance_id!r}. Use another id, "
            'create(..., if_exists="return") to get the existing one, or restart() to run it again.'
        )


class InstanceTerminal(DurableError):
    """The instance has ended, and this operation needs one that has not."""

    code, http_status = "INSTANCE_TERMINAL", 409

    def __init__(self, workflow: str, instance_id: str, status: str, operation: str) -> None:
        self.workflow, self.instance_id, self.status, self.operation = workflow, instance_id, status, operation
        super().__init__(
            f"Cannot {operation} instance {instance_id!r} of workflow {workflow!r}: it is {status}. "
            "restart() begins a new run of it."
        )


class InstanceNotErrored(DurableError):
    """The instance has not failed, and only what has failed can be tried again."""

    code, http_status = "INSTANCE_NOT_ERRORED", 409

    def __init__(self, workflow: str, instance_id: str, status: str) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        super().__init__(
            f"Cannot retry instance {instance_id!r} of workflow {workflow!r}: it is {status}, not errored. "
            "restart() begins a new run of it, from the beginning or from a step."
        )


class StepNotFound(DurableError):
    """The current run has recorded no step of this name. ``near``: names that it has."""

    code, http_status = "STEP_NOT_FOUND", 404

    def __init__(self, workflow: str, instance_id: str, run_number: int, step: str, near: Sequence[str]) -> None:
        self.workflow, self.instance_id, self.run_number = workflow, instance_id, run_number
        self.step, self.near = step, list(near)
        known = "It has none yet." if not near else f"Did you mean {' or '.join(repr(name) for name in near)}?"
        super().__init__(
            f"Run {run_number} of instance {instance_id!r} of workflow {workflow!r} has no step {_shown(step)}. {known}"
        )


class StepNotOpen(DurableError):
    """The step has ended, and did not end its instance: others may stand on its result.

    Or it is a linear step whose turn has not come; ``stands_at``: the step whose turn it is.
    """

    code, http_status = "STEP_NOT_OPEN", 409

    def __init__(
        self,
        workflow: str,
        instance_id: str,
        run_number: int,
        step: str,
        status: str,
        *,
        stands_at: str | None = None,
    ) -> None:
        self.workflow, self.instance_id, self.run_number = workflow, instance_id, run_number
        self.step, self.status, self.stands_at = step, status, stands_at
        remedy = "restart(from_step=...) runs it again."
        if stands_at is not None:
            remedy = f"its turn comes after that of step {stands_at!r}, where the run stands."
        super().__init__(
            f"Step {step!r} of run {run_number} of instance {instance_id!r} of workflow {workflow!r} is {status}. Only "
            f"an open step, or one that ended an errored instance, can be settled by hand; {remedy}"
        )


class NotInOutbox(DurableError):
    """Nothing in the outbox has this id: it was sent or dropped, or never there."""

    code, http_status = "NOT_IN_OUTBOX", 404

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = list(ids)
        super().__init__(
            f"Nothing in the outbox has the id {', '.join(map(repr, self.ids))}. What was sent is in it no more; list "
            "what is: celery -A <your app> durable outbox"
        )


class NotGivenUp(DurableError):
    """What is in the outbox under this id has attempts left, and is sent without help."""

    code, http_status = "NOT_GIVEN_UP", 409

    def __init__(self, id_: str, kind: str, name: str) -> None:
        self.id, self.kind, self.name = id_, kind, name
        what = "Task" if kind == "task" else "Outbound event"
        super().__init__(
            f"{what} {name!r} ({id_}) was not given up. It is sent without help; list what was given up: "
            "celery -A <your app> durable outbox --given-up"
        )


class OutOfScope(DurableError):
    """A new instance would be outside of the scope that the caller has."""

    code, http_status = "OUT_OF_SCOPE", 403

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        super().__init__(
            f"Instance {instance_id!r} would be outside of what you may reach: its id or its labels are not those of "
            "your scope."
        )


class VersionMismatch(DurableError):
    """The instance has changed since the caller looked at it; nothing was written."""

    code, http_status = "PRECONDITION_FAILED", 412

    def __init__(self, workflow: str, instance_id: str) -> None:
        self.workflow, self.instance_id = workflow, instance_id
        super().__init__(
            f"Instance {instance_id!r} of workflow {workflow!r} has changed since its version was read. "
            "Look at it again, and repeat the operation if it is still what you want."
        )


class ResultTimeout(DurableError, TimeoutError):
    """The instance did not end within the time that the caller was ready to wait."""

    code, http_status = "RESULT_TIMEOUT", 408

    def __init__(self, workflow: str, instance_id: str, status: str, seconds: float) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        super().__init__(
            f"Instance {instance_id!r} of workflow {workflow!r} is still {status} after {seconds:g} s. "
            "It goes on by itself; ask again, or wait longer."
        )


class WorkflowFailed(DurableError):
    """The instance ended without a result: errored or terminated."""

    code, http_status = "WORKFLOW_FAILED", 409

    def __init__(
        self, workflow: str, instance_id: str, status: str, error_name: str | None, error_message: str | None
    ) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        self.error_name, self.error_message = error_name, error_message
        why = f": {error_name}: {error_message}" if error_name else (f": {error_message}" if error_message else "")
        super().__init__(f"Instance {instance_id!r} of workflow {workflow!r} ended {status}{why}")


# --- inside workflows ---------------------------------------------------------------------------


class NonRetryableError(DurableError):
    """Raise it in a step to fail the step at once, without another attempt.

    ``name`` is the error's name in status, history and `StepFailed.error_name`.
    """

    code = "NON_RETRYABLE"

    def __init__(self, message: str = "", name: str | None = None) -> None:
        self.name = name or type(self).__name__
        super().__init__(message)


class StepTypeMismatch(NonRetryableError):
    """A step name is used for two kinds of step."""

    def __init__(self, step: str, recorded: str, wanted: str) -> None:
        self.step = step
        super().__init__(
            f"Step {step!r} is recorded as {recorded!r}, but the code now calls it as {wanted!r}. "
            "Give the new step another name; a recorded name keeps its kind."
        )


class StepNameReused(NonRetryableError):
    """A step name is used twice in one pass for different work, or twice at the same time."""

    def __init__(self, step: str, *, concurrently: bool = False) -> None:
        self.step = step
        how = "twice at the same time" if concurrently else "again for a different function or other arguments"
        super().__init__(
            f"Step name {step!r} is used {how}. Names identify steps: put the loop index or a key in the name, "
            "or pass StepConfig(repeat=True) to count the occurrences."
        )


class StepLimitExceeded(NonRetryableError):
    """A run has more steps than allowed."""

    code = "STEP_LIMIT_EXCEEDED"

    def __init__(self, workflow: str, limit: int) -> None:
        self.limit = limit
        super().__init__(
            f"A run of workflow {workflow!r} may have {limit} steps (sleeps are free). Put several units of work "
            "in one step, start child instances, or raise max_steps on the workflow."
        )


class StepTxMisuse(NonRetryableError):
    """The step's transaction is used in a way that would break its atomicity."""


class StepMisuse(NonRetryableError):
    """A step verb is called where it cannot work: in another step's body or from another thread."""


class BranchNeverGathered(NonRetryableError):
    """A submitted branch was never handed to gather() or first(), so it never ran."""

    def __init__(self, steps: Sequence[str]) -> None:
        self.steps = list(steps)
        listed = ", ".join(repr(name) for name in steps)
        super().__init__(
            f"The workflow returned, but nobody gathered {listed}: a submitted step runs when it is handed to "
            "step.gather() or step.first(), or its result() is asked for."
        )


class StepResultInvalid(NonRetryableError):
    """What a step returned does not fit the return annotation of its function."""

    def __init__(self, step: str, problems: Sequence[tuple[str, str]]) -> None:
        self.step, self.problems = step, list(problems)
        super().__init__(
            f"The result of step {step!r} does not fit the function's return annotation: {_problems(problems)}."
        )


class StepCancelled(NonRetryableError):
    """The branch lost a race of `first`, and its result is asked for."""

    def __init__(self, step: str) -> None:
        self.step = step
        super().__init__(
            f"Step {step!r} was cancelled: another branch of first() ended before it. Use first()'s result."
        )


class StepCommitConflict(NonRetryableError):
    """The step's own database writes violate a unique constraint; a retry would do so again."""

    def __init__(self, step: str, detail: str) -> None:
        self.step = step
        super().__init__(f"The writes of step {step!r} violate a constraint: {detail}")


class HandlerAnswerInvalid(NonRetryableError):
    """The handler of a linear step returned something that is no outcome."""

    def __init__(self, step: str, answer: object) -> None:
        self.step = step
        super().__init__(
            f"The handler of step {step!r} returned a {type(answer).__name__}: return Completed(result), "
            "Waiting(event_type, timeout), Retry(backoff, error) or Dead(error)."
        )


class StepFailed(DurableError):
    """A step ended in failure. The same on the first pass and on every replay.

    ``error_name`` and ``error_message`` are the original error's; ``__cause__`` is that error on the
    pass that saw it, None on a replay.
    """

    code = "STEP_FAILED"
    failed_keys: tuple[str, ...] = ()
    failed_place: int = 0
    """For `retry()`: the rows that record the failure, and how many calls the code had made when it was told."""

    def __init__(self, step: str, error_name: str, error_message: str, attempts: int) -> None:
        self.step, self.error_name, self.error_message, self.attempts = step, error_name, error_message, attempts
        after = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"Step {step!r} failed after {after}: {error_name}: {error_message}")


class StepTimeout(StepFailed, TimeoutError):
    """The last attempt of a step took longer than its timeout."""


class StepMaxAttemptsExceeded(StepFailed):
    """The step's attempts are used up by workers that died in it."""


class EventTimeout(StepFailed, TimeoutError):
    """No eligible event came before the wait's deadline."""


class EventPayloadInvalid(StepFailed):
    """The event came, but its payload does not fit the wait's schema; it is consumed."""


class SuspensionSwallowed(DurableError):
    """The workflow caught the suspension and carried on."""

    code = "SUSPENSION_SWALLOWED"

    def __init__(self, workflow: str) -> None:
        super().__init__(
            f"Workflow {workflow!r} returned or raised although it is suspended: it caught celery_durable's "
            "suspension, which a bare `except:`, `except BaseException:` or a `return` in a `finally` does. "
            "Catch Exception instead, then restart the instance."
        )


class WorkerCrashLoop(DurableError):
    """The instance's workers died again and again at the same place."""

    code = "WORKER_CRASH_LOOP"

    def __init__(self, crashes: int) -> None:
        self.crashes = crashes
        super().__init__(
            f"{crashes} workers in a row died or lost their lease while they worked on this instance, without a step "
            "in between. Look at the workers' logs (out of memory, a crash in native code?), then restart it."
        )


# --- not for authors ----------------------------------------------------------------------------


class Interruption(BaseException):
    """Unwinds author code without being an `Exception` that a workflow would catch."""


class Suspend(Interruption):
    """The pass ends here; the function will be called again. Let it through: do not catch BaseException."""


class StepInterrupted(Interruption):
    """The timer of a running attempt went off."""


class Superseded(Interruption):
    """A write under a claim found that the claim is no longer ours: roll back, stop, say nothing (LAW 2)."""


class PassStuck(DurableError):
    """A pass has not moved for `durable_stall_seconds` outside of the author's code; its claim was taken away."""

    code = "PASS_STUCK"

    def __init__(self, ref: str, seconds: float) -> None:
        self.ref, self.seconds = ref, seconds
        super().__init__(
            f"The pass over {ref} has not moved for {seconds:.0f} s, and it was not the workflow's code that ran: it "
            "waits for something outside that does not answer. The worker's process is still stuck in it; restart it "
            "if that does not end by itself."
        )


class PassBroken(Interruption):
    """Something other than author code failed, such as the database. Its cause says what."""


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a repr that fails, as that of a very long integer does, must not hide the error
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else text[:117] + "..."


def _problems(problems: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{where}: {what}" for where, what in problems[:5]) + (
        f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    )
