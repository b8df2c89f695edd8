"""What a run did: steps, consumed events, logs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from celery_durable.ancestry import AncestorRun, Ancestry
from celery_durable.errors import Superseded
from celery_durable.model import Claim, LogLevel, LogLine, StepRow, StepStatus, StepType, StepWrite
from celery_durable.store.events import run_events
from celery_durable.store.events.run_events import StoredEvent
from celery_durable.store.runs import claims, history, outputs, step_rows
from tests.store.world import LEASE, World, seconds, step

# --- steps --------------------------------------------------------------------------------------

NEW_STEPS = {
    "completed": step(attempts=2, max_attempts=6, timeout=seconds(0.25), result='{"ok":true}', ran_for=seconds(3)),
    "failed": step(
        status=StepStatus.ERRORED, attempts=6, error_name="ValueError", error_message="no", ran_for=seconds(1)
    ),
    "to be tried again": step(status=StepStatus.WAITING, attempts=1, retry_in=seconds(10), ran_for=seconds(0)),
    "started": step(status=StepStatus.PENDING, attempts=0),
    "asleep for": step(status=StepStatus.WAITING, type=StepType.SLEEP, wake_in=seconds(60)),
    "waiting": step(status=StepStatus.WAITING, type=StepType.WAIT, wake_in=seconds(60), event_type="approval"),
    "empty result": step(result="null"),
}


@pytest.mark.parametrize("form", ["plain", "in order"])
def test_a_new_step_reads_back_as_it_was_returned(world: World, form: str) -> None:
    for name, write in NEW_STEPS.items():
        claim = world.claim(world.create(name))
        world.advance(100)
        written = world.commit(claim, write).row if form == "plain" else world.write(claim, write)[0]
        assert world.steps(claim) == (written,), name
        assert written == _expected(write, world.now, created_at=world.now), name


@pytest.mark.parametrize("form", ["plain", "in order"])
def test_an_updated_step_reads_back_as_it_was_returned(world: World, form: str) -> None:
    claim = world.claim(world.create())
    started = world.now
    world.commit(claim, step(status=StepStatus.WAITING, attempts=1, retry_in=seconds(10), error_name="OSError"))
    world.advance(100)
    again = step(replaces="commit-charge", attempts=2, result="7", ran_for=seconds(1), commit_id="commit-2")
    written = world.commit(claim, again).row if form == "plain" else world.write(claim, again)[0]
    (read,) = world.steps(claim)
    assert read == _expected(again, world.now, created_at=started)
    assert written == _expected(again, world.now, created_at=None)  # its creation is not read again


def test_a_sleep_until_an_instant_keeps_that_instant(world: World) -> None:
    claim = world.claim(world.create())
    wake_at = world.now + seconds(60)
    world.advance(5)
    written = world.commit(claim, step(status=StepStatus.WAITING, type=StepType.SLEEP, wake_at=wake_at))
    assert written.row.wake_at == wake_at
    assert world.steps(claim) == (written.row,)


def test_a_step_key_is_recorded_once(world: World) -> None:
    claim = world.claim(world.create())
    first = world.commit(claim, step(result="1")).row
    with pytest.raises(Superseded) as caught:  # another worker has inserted it
        world.commit(claim, step(result="2", commit_id="commit-2"))
    assert caught.value.__cause__ is not None
    assert world.store.is_unique_violation(caught.value.__cause__)
    assert world.steps(claim) == (first,)


@pytest.mark.parametrize("form", ["plain", "in order"])
def test_a_delayed_write_does_not_overwrite_a_newer_one(world: World, form: str) -> None:
    claim = world.claim(world.create())
    write = world.commit if form == "plain" else world.write
    write(claim, step(status=StepStatus.PENDING, attempts=1, commit_id="announced"))
    failed = step(status=StepStatus.WAITING, attempts=1, retry_in=seconds(1), replaces="announced", commit_id="failed")
    write(claim, failed)  # the second try; the first is still on its way
    write(claim, step(attempts=2, result="7", replaces="failed", commit_id="done"))
    kept_before = world.steps(claim)
    with pytest.raises(Superseded):
        write(claim, failed)
    assert world.steps(claim) == kept_before


def test_a_step_commit_in_doubt_is_found_by_its_commit_id(world: World) -> None:
    claim = world.claim(world.create())
    written = world.commit(claim, step()).row

    def find(commit_id: str) -> list[StepRow]:
        return world.store.transact(lambda tx: step_rows.find_commit(tx, claim, commit_id=commit_id))

    assert find("commit-charge") == [written]
    assert find("another") == []


def _expected(write: StepWrite, now: datetime, *, created_at: datetime | None) -> StepRow:
    return StepRow(
        step_key=write.key,
        seq=write.seq,
        name=write.name,
        type=write.type,
        status=write.status,
        attempts=write.attempts,
        max_attempts=write.max_attempts,
        timeout=write.timeout,
        next_retry_at=None if write.retry_in is None else now + write.retry_in,
        wake_at=None if write.wake_in is None else now + write.wake_in,
        wait_event_type=write.event_type,
        result=write.result,
        error_name=write.error_name,
        error_message=write.error_message,
        created_at=created_at,
        started_at=None if write.ran_for is None else now - write.ran_for,
        finished_at=now if write.is_finished else None,
        commit_id=write.commit_id,
    )


# --- load ---------------------------------------------------------------------------------------


def test_a_fresh_run_loads_its_parameters_and_no_steps(world: World) -> None:
    claim = world.claim(world.create(params='{"order":"Größe 4"}'))
    loaded = world.load(claim)
    assert loaded == step_rows.RunState(
        params='{"order":"Größe 4"}',
        created_at=world.now,
        started_at=None,
        log_count=0,
        ancestry=Ancestry((AncestorRun("order/o-1/1", world.now),), {}),
        steps=(),
    )


def test_steps_load_in_call_order_not_in_the_order_of_their_ends(world: World) -> None:
    claim = world.claim(world.create(params='[1,"two"]'))
    for seq in (3, 1, 4, 2):
        world.commit(claim, step(f"step {seq}", seq=seq))
    world.commit(claim, step("also 4", seq=4))
    loaded = world.load(claim)
    assert [(row.seq, row.step_key) for row in loaded.steps] == [
        (1, "step 1"), (2, "step 2"), (3, "step 3"), (4, "also 4"), (4, "step 4"),
    ]  # fmt: skip
    assert loaded.params == '[1,"two"]'


def test_a_restarted_run_loads_the_parameters_but_none_of_the_steps(world: World) -> None:
    ref = world.create(params='{"n":1}')
    world.commit(world.claim(ref), step())
    claim = world.claim(world.restart(ref).ref)
    loaded = world.load(claim)
    assert (loaded.params, loaded.steps) == ('{"n":1}', ())


def test_large_payloads_read_back_unchanged(world: World) -> None:
    text = '"' + "ä€😀 " * 100_000 + '"'  # more than MariaDB's TEXT would hold
    claim = world.claim(world.create(params=text))
    world.commit(claim, step(result=text))
    loaded = world.load(claim)
    assert loaded.params == loaded.steps[0].result == text


# --- events -------------------------------------------------------------------------------------


def _oldest(world: World, claim: Claim, type_: str = "approval", *, deadline: datetime) -> StoredEvent | None:
    return world.store.transact(lambda tx: run_events.find_oldest_event(tx, claim, type_, key="w", deadline=deadline))


def _consume(world: World, claim: Claim, event: StoredEvent, key: str) -> None:
    world.store.transact(lambda tx: run_events.consume(tx, claim, claims.guard(tx, claim, lease=LEASE), event, key=key))


def test_events_of_a_type_are_consumed_in_the_order_of_their_acceptance(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    for payload in ("1", "2"):
        world.send(ref, "approval", payload)
    world.send(ref, "refusal", "3")
    world.advance(5)
    payloads = []
    while event := _oldest(world, claim, deadline=world.now):
        payloads.append(event.payload)
        _consume(world, claim, event, f"wait {event.payload}")
    assert payloads == ["1", "2"]
    assert [(e.payload, e.delivered_at, e.consumed_by_step_key) for e in _events(world, claim)] == [
        (1, world.now, "wait 1"), (2, world.now, "wait 2"), (3, None, None),
    ]  # fmt: skip


def test_an_event_sent_at_the_deadline_counts_even_if_it_is_read_later(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.advance(60)
    world.send(ref, "approval", "1")
    sent_at = world.now
    world.advance(3600)
    assert _oldest(world, claim, deadline=sent_at - seconds(0.000001)) is None
    found = _oldest(world, claim, deadline=sent_at)
    assert found is not None
    assert (found.type, found.payload, found.created_at) == ("approval", "1", sent_at)


def test_events_of_another_run_are_not_seen(world: World) -> None:
    ref = world.create()
    world.send(ref)
    claim = world.claim(world.restart(ref).ref)
    assert _oldest(world, claim, deadline=world.now) is None


def _events(world: World, claim: Claim) -> Any:
    return world.store.read(lambda tx: history.read_events(tx, claim.pk, claim.ref.run_number))


# --- logs ---------------------------------------------------------------------------------------


def _line(message: str, **given: Any) -> LogLine:
    given = {"data": None, "step_key": None, "attempt": None, "is_replay": False} | given
    return LogLine(LogLevel.INFO, "workflow", message, **given)


def _log(world: World, claim: Claim, *messages: str, limit: int) -> None:
    def work(tx: Any) -> None:
        guarded = claims.guard(tx, claim, lease=LEASE)
        outputs.write_logs(tx, claim, guarded, [_line(message) for message in messages], remaining=limit)

    world.store.transact(work)


def test_log_lines_beyond_the_limit_are_only_counted(world: World) -> None:
    claim = world.claim(world.create())
    _log(world, claim, "one", "two", limit=3)
    _log(world, claim, "three", "four", "five", limit=1)
    _log(world, claim, "six", limit=-2)
    lines = world.store.read(lambda tx: history.read_logs(tx, claim.pk, 1, after_id=0, limit=100))
    assert [line.message for line in lines] == ["one", "two", "three"]
    assert world.load(claim).log_count == 3
    assert world.store.read(lambda tx: history.read_run(tx, claim.pk, 1)).dropped_logs == 3


def test_a_log_line_reads_back_as_written(world: World) -> None:
    claim = world.claim(world.create())
    line = LogLine(LogLevel.WARNING, "billing", "späť\n", '{"n":1}', "charge", 2, is_replay=True)
    world.store.transact(
        lambda tx: outputs.write_logs(tx, claim, claims.guard(tx, claim, lease=LEASE), [line], remaining=1)
    )
    (read,) = world.store.read(lambda tx: history.read_logs(tx, claim.pk, 1, after_id=0, limit=1))
    assert (read.level, read.category, read.message, read.data) == (LogLevel.WARNING, "billing", "späť\n", {"n": 1})
    assert (read.step_key, read.attempt, read.is_replay, read.created_at) == ("charge", 2, True, world.now)
