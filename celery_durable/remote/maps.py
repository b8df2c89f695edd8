"""Map steps: one step that runs a Celery task, or an instance of a workflow, for each item of a list.

Each item is a row (`store.runs.items`). The process that accepts an item's answer (`operations.answers`) sends the
next; for a child, that is the process that ends it (`runner.run_end`). The instance stays suspended until all items
have answered, or until a pass must retry or fail one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.definitions import Definition
from celery_durable.errors import PayloadTooLarge, RetryDelayInvalid, StepTypeMismatch
from celery_durable.errors.base import format_limit
from celery_durable.model import (
    Claim,
    FailedItem,
    HoldState,
    ItemRef,
    OpenWait,
    Release,
    RetryDecision,
    StepRow,
    StepStatus,
    StepType,
    StepWrite,
    TaskSendingStep,
    WaitCondition,
    children_event_type,
    parse_children_event_type,
    task_event_type,
    to_us,
)
from celery_durable.remote.steps import TASK_POLICY, compare_task, find_task_name
from celery_durable.replay_state import AwaitAnswer, ReplayStep, RunAttempt, WaitUntil
from celery_durable.runner.commit_parts import (
    CommitPart,
    FailedAttempts,
    OpenCommit,
    ServeLimits,
    StepEffectFailed,
    encode_params,
)
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.failed_attempts import FailedAttempt, record_task_timeout
from celery_durable.runner.limits import NO_DEADLINE, build_request
from celery_durable.runner.step_commit import Decision, StepCommit
from celery_durable.runner.step_execution import OtherSteps, StepExecution, build_failure, decode_result
from celery_durable.runner.step_kinds import CallIdentity, StepKind, compare_timeout
from celery_durable.runner.waits import retry_delay, wait_duration
from celery_durable.step import MapCall
from celery_durable.store.engine import Tx
from celery_durable.store.instances.item_senders import TASKS, ChildSender, ItemSender
from celery_durable.store.runs import holds, items, limits
from celery_durable.store.runs.claims import GuardResult
from celery_durable.store.runs.items import SentItem
from celery_durable.store.runs.limits import Request, Served
from celery_durable.values import StepPolicy


@dataclass(frozen=True, slots=True)
class _ItemOutcome:
    """What becomes of a failed item: it is retried after ``pause``, or given up if that is None."""

    answer: str
    pause: timedelta | None
    failures: Sequence[FailedAttempt]

    def build_decision(self, item: FailedItem, now: datetime) -> RetryDecision:
        return RetryDecision(item, self.answer, None if self.pause is None else now + self.pause)


class MapKind(StepKind[MapCall]):
    """Steps that run a task or a child for each item of a list: `step.map`."""

    type, call_type, has_attempts = StepType.MAP, MapCall, True
    has_own_rows = writes_beside = True

    def identify(self, call: MapCall, settings: Settings, policy: StepPolicy) -> CallIdentity:
        del policy
        work = call.task, call.items, call.config, call.max_concurrency
        policy = TASK_POLICY if call.definition is None else replace(TASK_POLICY, timeout=settings.max_sleep)
        return CallIdentity(call.name, work, policy.override_with(call.config))

    def advance(self, context: ExecutionContext, executions: Sequence[StepExecution], other_steps: OtherSteps) -> None:
        for execution in executions:
            match context.replay_state.decide_remote(execution.entry.row, now=context.now):
                case ReplayStep(row):
                    execution.finished_row = row
                case RunAttempt() | WaitUntil():
                    _start(context, execution, execution.call, other_steps)
                case AwaitAnswer(row):
                    _check_items(context, execution, execution.call, row)

    def decode(self, context: ExecutionContext, execution: StepExecution, row: StepRow) -> list[Any]:
        """Return the results of the items. A failed item's is its failure, or is raised."""
        results: list[Any] = []
        definition = execution.call.definition
        for index, (answer, attempts) in enumerate(_read_item_answers(context, execution, row)):
            error, item_name = values.read_answer_error(answer), f"{execution.name}[{index}]"
            if error is None:
                output = values.read_answer_output(answer)
                is_typed = definition is not None
                results.append(decode_result(item_name, definition.output, json.dumps(output)) if is_typed else output)
                continue
            failure = build_failure(item_name, error.name, error.message, attempts)
            if not execution.call.return_exceptions:  # the step was completed with it, and the code has changed since
                failure.failed_keys, failure.failed_at_seq = (execution.key,), context.replay_state.last_seq
                raise failure
            results.append(failure)
        return results

    def find_changes(
        self, execution: StepExecution, row: StepRow, settings: Settings
    ) -> Iterable[tuple[str, str, str]]:
        del settings
        recorded, call = parse_children_event_type(row.wait_event_type), execution.call
        now = None if call.definition is None else call.definition.name
        if recorded is None:
            yield from compare_task(row, find_task_name(call.task))
        elif recorded != now:
            advice = "Children that exist still count. Children that are created from now on are of the new workflow."
            yield f"workflow {recorded!r}", "tasks" if now is None else f"workflow {now!r}", advice
        yield from compare_timeout(execution, row)

    def prepare_write(self, commit: OpenCommit, write: StepWrite) -> None:
        if write.status is StepStatus.CANCELLED:
            items.cancel_open(commit.tx, commit.claim.pk, commit.claim.ref.run_number, write.key)

    def end_with_run(self, commit: OpenCommit) -> None:
        items.end_open_of_run(commit.tx, commit.claim.pk, commit.claim.ref.run_number)

    def is_satisfied(self, tx: Tx, claim: Claim, row: StepRow) -> bool:
        return items.are_all_finished(tx, claim.pk, claim.ref.run_number, row.step_key)


def _read_item_answers(context: ExecutionContext, execution: StepExecution, row: StepRow) -> list[tuple[str, int]]:
    if row.result is not None:  # completed with set-result, or read from an export
        return [(json.dumps(each), 1) for each in json.loads(row.result) or ()]
    claim = context.claim
    step_fields: dict[str, Any] = {"pk": claim.pk, "run_number": claim.ref.run_number, "step_key": execution.key}
    read = context.env.store.read
    answers: list[tuple[str, int]] = context.run_or_interrupt(
        lambda: read(lambda tx: items.read_answers(tx, **step_fields))
    )
    return answers


@dataclass(eq=False)
class SendItems(CommitPart):
    """Sends the items of a map that the commit has marked as sent."""

    sender: ItemSender
    map_step: TaskSendingStep
    sent: Sequence[SentItem]

    def write(self, commit: OpenCommit) -> None:
        if self.sent:
            work = self.sender.send(commit.tx, self.map_step, self.sent, grace=commit.grace)
            commit.messages += work.messages
            commit.add_new_runs(work.children)


def _find_sender(context: ExecutionContext, execution: StepExecution, call: MapCall, row: StepRow) -> ItemSender:
    """Return what sends the items of an open map. They are recorded as tasks or as children."""
    if (workflow := parse_children_event_type(row.wait_event_type)) is None:
        return TASKS
    if call.definition is None:
        raise StepTypeMismatch(execution.name, f"map over workflow {workflow!r}", "map over tasks")
    return ChildSender.of(call.definition, context.env.settings)


def _build_map_step(context: ExecutionContext, execution: StepExecution, call: MapCall) -> TaskSendingStep:
    claim = context.claim
    assert execution.policy.timeout is not None
    timeout = wait_duration(context, execution, execution.policy.timeout, "event")
    instance_fields = (claim.ref.workflow, claim.ref.instance_id, claim.pk, claim.ref.run_number)
    on_lost = "wait" if call.definition else call.on_lost or context.env.settings.task_on_lost
    return TaskSendingStep(*instance_fields, execution.key, timeout, call.max_concurrency, on_lost)


def _start(context: ExecutionContext, execution: StepExecution, call: MapCall, other_steps: OtherSteps) -> None:
    """Record all items, and send the first ones, up to ``max_concurrency``."""
    map_step, definition = _build_map_step(context, execution, call), call.definition
    if definition is None:
        bodies = [values.encode_map_task(call.task, item, limits=context.limits) for item in call.items]
        sender: ItemSender = TASKS
        event_type = task_event_type(find_task_name(call.task), map_step.pk, execution.entry.seq, 0)
    else:
        try:
            bodies = _encode_children(context, definition, call.items)
        except StepEffectFailed as exc:
            error = values.sanitize_error(*values.describe_error(exc.error))
            context.commit_step(execution, context.build_write(execution, StepStatus.ERRORED, error=error, attempts=1))
            return
        sender = ChildSender.of(definition, context.env.settings)
        event_type = children_event_type(definition.name, execution.entry.seq)
    if not bodies:
        context.commit_step(execution, context.build_write(execution, StepStatus.COMPLETED, attempts=1))
        return
    write = context.build_write(
        execution,
        StepStatus.WAITING,
        attempts=1,
        wake_in=map_step.timeout,
        event_type=event_type,
        keeps_limits=True,
    )

    limited = _LimitedItems.of(context, execution, map_step)

    def send(tx: Tx, guard_result: GuardResult) -> Decision:
        if limited is None:
            sent = items.start_map(tx, map_step, bodies, now=guard_result.now)
            return Decision([write], [SendItems(sender, map_step, sent)])
        items.start_map(tx, replace(map_step, max_concurrency=0), bodies, now=guard_result.now)
        sent, served = limited.send(tx, now=guard_result.now)
        return Decision([write], [SendItems(sender, map_step, sent), ServeLimits(served)])

    def find_ending(rows: Sequence[StepRow]) -> Release:
        return Release([_wait_for_items(execution, map_step, row.wake_at) for row in rows if row.wake_at is not None])

    step_commit = StepCommit(write.commit_id, decide=send)
    if other_steps is OtherSteps.NONE and limited is None:
        step_commit.ending = find_ending
        context.suspend_with(step_commit)
    else:
        _commit(context, execution, map_step, step_commit)


def _encode_children(context: ExecutionContext, definition: Definition, params: Sequence[Any]) -> list[str]:
    """Encode a child for each item; raises StepEffectFailed."""
    settings, bodies = context.env.settings, []
    for position, each in enumerate(params):
        try:
            with context.lease.user_code():
                text = encode_params(definition, each, settings, of=f"item {position}")
        except Exception as exc:
            if context.env.stops_process(exc):
                raise
            raise StepEffectFailed(exc) from exc
        bodies.append(values.encode_map_child(definition.name, text))
    return bodies


def _check_items(context: ExecutionContext, execution: StepExecution, call: MapCall, row: StepRow) -> None:
    """Retry or fail items, and send those that are due. Finish the step if no item is open, else keep waiting.

    Without the lock, `MapState.needs_pass` avoids a commit. The commit that suspends the instance checks it again.
    """
    map_step = _build_map_step(context, execution, call)
    assert row.wake_at is not None
    condition = _build_condition(execution, map_step)
    if row.wake_at > context.now and not context.run_or_interrupt(
        lambda: context.env.store.read(lambda tx: condition.is_met(tx, context.now))
    ):
        execution.wait = OpenWait(row.wake_at, condition=condition)
        return
    limited = _LimitedItems.of(context, execution, map_step)
    outcomes, sender = _prepare_outcomes(context, map_step, execution), _find_sender(context, execution, call, row)
    commit_id = next(context.lease.commit_ids)
    build_write = functools.partial(
        context.build_write, execution, attempts=1, event_type=row.wait_event_type, commit_id=commit_id
    )

    def decide(tx: Tx, guard_result: GuardResult) -> Decision:
        locked_items = items.lock_failed_items(tx, map_step, now=guard_result.now)
        known = [(each, outcomes[each]) for each in locked_items if each in outcomes]
        items.apply_decisions(tx, map_step, [outcome.build_decision(each, guard_result.now) for each, outcome in known])
        failures = [failed for _, outcome in known for failed in outcome.failures]
        state = items.read_map_state(tx, map_step, now=guard_result.now)
        parts: list[CommitPart] = [FailedAttempts(failures)]
        if limited is None:
            sent = items.mark_ready_as_sent(tx, map_step, limit=state.room(map_step.max_concurrency))
        else:
            sent, served = limited.send(tx, now=guard_result.now)
            parts.append(ServeLimits(served))
        parts.append(SendItems(sender, map_step, sent))
        state = items.read_map_state(tx, map_step, now=guard_result.now)
        if not state.is_finished:
            # None: all wait for their limits, or one has failed since it was read above, and makes the run due at once.
            next_at = state.next_at or guard_result.now + NO_DEADLINE
            return Decision([build_write(StepStatus.WAITING, wake_at=next_at, keeps_limits=True)], parts)
        failure = _find_failure(context, tx, call, map_step)
        end = build_write(StepStatus.COMPLETED) if failure is None else build_write(StepStatus.ERRORED, **failure)
        return Decision([end, *context.build_race_writes(execution, end)], parts)

    _commit(context, execution, map_step, StepCommit(commit_id, decide=decide))


def _find_failure(context: ExecutionContext, tx: Tx, call: MapCall, map_step: TaskSendingStep) -> dict[str, Any] | None:
    """Return why a map has failed whose items have ended, as arguments of `build_write`; None if it has not."""
    first_error = None if call.return_exceptions else items.find_first_error(tx, map_step)
    if first_error is not None:
        return _error_of_first_failure(first_error)
    # Each pass of the run reads all results into memory.
    size, limit = items.measure_answers(tx, map_step), context.env.settings.max_map_result_bytes
    if size <= limit:
        return None
    error = PayloadTooLarge(f"The list of results of map {call.name!r}", size, limit, "durable_max_map_result_bytes")
    return {"error": values.sanitize_error(type(error).__name__, str(error)), "attempts": 1}


def _prepare_outcomes(
    context: ExecutionContext, map_step: TaskSendingStep, execution: StepExecution
) -> dict[FailedItem, _ItemOutcome]:
    """Decide about the items that have failed. User code runs here, before the commit, which locks the instance."""
    read, now = context.env.store.read, context.now

    def work(tx: Tx) -> tuple[list[FailedItem], dict[int, int]]:
        failed, key = (
            items.read_failed_items(tx, map_step, now=now),
            (map_step.pk, map_step.run_number, map_step.step_key),
        )
        return failed, items.find_first_runs(tx, *key) if failed else {}

    failed_items, first_runs = context.run_or_interrupt(lambda: read(work))
    outcomes = {}
    for item in failed_items:
        ref = ItemRef(map_step.pk, map_step.step_key, item.position, item.attempts)
        work_id = ref.work_id(first_runs.get(item.position, map_step.run_number))
        with context.lease.user_code():
            answer, pause = _choose_retry(context, execution, item, work_id)
            # The process that takes the answer of a failed item records that attempt.
            failures = [_record_timeout(context, execution, item, answer, work_id)] if item.is_late else []
        outcomes[item] = _ItemOutcome(answer, pause, failures)
    return outcomes


def _choose_retry(
    context: ExecutionContext, execution: StepExecution, item: FailedItem, work_id: str
) -> tuple[str, timedelta | None]:
    """Return the answer of an item whose attempt failed, and the delay of its retry by the step's policy, or None."""
    policy, answer = execution.policy, item.answer
    if answer is None:
        timeout = format_limit(policy.timeout or context.env.settings.max_sleep)
        text = f"no answer within {timeout}"
        if execution.call.definition is not None:
            text = f"Instance {work_id!r} did not end within {timeout}; it continues"
        answer = values.encode_error_answer("StepTimeout", text)
    error = values.read_answer_error(answer)
    is_used_up = policy.max_attempts is not None and item.attempts >= policy.max_attempts
    if is_used_up or error is None or error.is_non_retryable:
        return answer, None
    try:
        return answer, retry_delay(context, execution, item.attempts, (error.name, error.message))
    except RetryDelayInvalid as exc:
        return values.encode_error_answer(*values.describe_error(exc)), None


def _record_timeout(
    context: ExecutionContext, execution: StepExecution, item: FailedItem, answer: str, work_id: str
) -> FailedAttempt:
    error = values.read_answer_error(answer)
    assert error is not None
    return record_task_timeout(
        context.env,
        context.run,
        (error.name, error.message),
        step=execution.name,
        step_key=execution.key,
        number=item.attempts,
        task_id=work_id,
        item=item.position,
    )


def _commit(
    context: ExecutionContext, execution: StepExecution, map_step: TaskSendingStep, step_commit: StepCommit
) -> None:
    context.commit(step_commit, execution)
    if execution.wait is not None:
        execution.wait = _wait_for_items(execution, map_step, execution.wait.due_at)


def _error_of_first_failure(first_error: tuple[int, str, int]) -> dict[str, Any]:
    """The error and the number of attempts of the first failed item, as arguments of `build_write`."""
    position, answer, attempts = first_error
    error = values.read_answer_error(answer)
    assert error is not None
    return {"error": values.sanitize_error(error.name, f"item {position}: {error.message}"), "attempts": attempts}


@dataclass(frozen=True, slots=True)
class ItemsNeedPass:
    """The condition of a map's wait: one of its items needs a pass, or all have answered."""

    map_step: TaskSendingStep

    def is_met(self, tx: Tx, now: datetime) -> bool:
        return items.read_map_state(tx, self.map_step, now=now).needs_pass(self.map_step.max_concurrency)


@dataclass(frozen=True, slots=True)
class LimitedItemsNeedPass:
    """The same for a map with limits: an item may start, or more of them may queue."""

    map_step: TaskSendingStep

    def is_met(self, tx: Tx, now: datetime) -> bool:
        step = self.map_step
        state = items.read_map_state(tx, step, now=now)
        if replace(state, ready=0).needs_pass(None):
            return True
        room = state.room(step.max_concurrency)
        if room == 0:
            return False
        queued = holds.read_queued_items(tx, step.pk, step.run_number, step.step_key)
        may_ask = len(queued) < min(state.ready, _MAX_QUEUED, state.ready if room is None else room)
        return may_ask or any(_needs_pass(row, now) for row in queued.values())


def _needs_pass(row: Any, now: datetime) -> bool:
    """Whether an item in a queue may start, or has lost its place."""
    return bool(row.state == HoldState.PARKED or (row.state == HoldState.GRANTED and row.start_at <= to_us(now)))


def _wait_for_items(execution: StepExecution, map_step: TaskSendingStep, due_at: datetime) -> OpenWait:
    return OpenWait(due_at, condition=_build_condition(execution, map_step))


def _build_condition(execution: StepExecution, map_step: TaskSendingStep) -> WaitCondition:
    return (LimitedItemsNeedPass if execution.policy.limits else ItemsNeedPass)(map_step)


_MAX_QUEUED, _MAX_ROUNDS = 20, 10
"""How many items of one map wait in queues at once, and how often a commit asks for so many."""


@dataclass(frozen=True, slots=True)
class _LimitedItems:
    """What the items of a map with limits ask for. An item that gets its limits is sent in the same commit."""

    context: ExecutionContext
    map_step: TaskSendingStep
    request: Request

    @classmethod
    def of(cls, context: ExecutionContext, execution: StepExecution, map_step: TaskSendingStep) -> _LimitedItems | None:
        if not (given := execution.policy.limits):
            return None
        return cls(context, map_step, build_request(context, execution.key, given, token=None))

    def send(self, tx: Tx, *, now: datetime) -> tuple[list[SentItem], Served]:
        """Ask for the limits of the items that may be sent, and mark those as sent that get them."""
        step, sent, served = self.map_step, list[SentItem](), Served()
        served.unfinished |= holds.release_ended(tx, step.pk, step.run_number, step.step_key)
        for _ in range(_MAX_ROUNDS):
            room = items.read_map_state(tx, step, now=now).room(step.max_concurrency)
            queued = holds.read_queued_items(tx, step.pk, step.run_number, step.step_key)
            limit = _MAX_QUEUED if room is None else min(room, _MAX_QUEUED)
            found = items.find_ready_in_queues(tx, step, queued, limit=limit)
            if not found:
                break
            requests = [self._ask_for(row) for row in found]
            replies, others = limits.ask(tx, requests)
            served.granted += others.granted
            served.unfinished |= others.unfinished
            got = [index for index, reply in enumerate(replies) if reply.holds]
            sent += items.mark_as_sent(tx, step, [found[i] for i in got], [requests[i].token for i in got])
            if len(got) < len(found):
                break
        return sent, served

    def _ask_for(self, row: Any) -> Request:
        waiter = self.request.waiter._replace(position=row.position)
        token = self.context.env.runtime.new_secret()
        return replace(self.request, waiter=waiter, token=token, resumes=row.attempts > 0)
