"""Bugs to be planted in store and engine, as data: where, which lines, and what they become.

A mutant is caught by the simulation, or where it lies in code that only servers reach, or that the simulation cannot
tell from the right one, by a test that is named here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """A replacement, wherever ``old`` is, in the source of one function: module:name, without ``celery_durable.``."""

    where: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A bug. ``caught_by``: a test, where it is not the simulation."""

    name: str
    edits: tuple[Edit, ...]
    caught_by: str | None = None


def _m(name: str, *edits: tuple[str, str, str], caught_by: str | None = None) -> Mutant:
    return Mutant(name, tuple(Edit(*edit) for edit in edits), caught_by)


_LET_GO = "runner.step_commit:Committer.release"
_WAIT = "runner.step_commit:Committer.commit_wait"
_LINEAR_WAIT = "runner.linear_pass:LinearPass._start_wait"
_REPLAYED = "st.status == StepStatus.WAITING.value"
_POST = "tasks.outbox:Outbox._send_part"
_MAPS = "tests/engine/test_maps.py::"
_STREAM = "tests/http/test_stream.py::"
_LOST = "tests/engine/test_lost.py::"
_OUTBOX = "tests/store/test_outbox.py::"
_ATTACHING = "tests/celery/test_attaching.py::"
_WORKERS = "tests/celery/test_workers.py::"
_ORDER = "tests/pairs/test_order.py::test_rows_of_two_instances_are_locked_in_one_order"
_PAIR = "tests/pairs/test_pairs.py::test_two_concurrent_operations_lose_nothing_and_repeat_nothing"
_TASKS = "tests/engine/test_tasks.py::"
_LEASES = "tests/engine/test_leases.py::"
_BOUNDS = "tests/publishing/test_bounds.py::"
_REFUSALS = "tests/publishing/test_refusals.py::"
_ANSWERS = "tests/celery/test_answers.py::"
_DELIVER = "operations.topic_delivery:deliver_batch"
_SETTLE = "runner.step_commit:Committer.end_run"
_ANSWER_ITEM = "store.task_answers:_answer_item"
_IN_ORDER = "runner.step_commit:Committer._write_in_lock_order"

MUTANTS = (
    # --- since when, and for how long ---------------------------------------------------------------
    _m(
        "a linear step waits since its run was created",
        ("store.overview:read_waits", "sa.func.coalesce(s.started_at, s.created_at)", "s.created_at"),
        caught_by="tests/engine/test_linear.py::"
        "test_a_linear_step_is_listed_as_waiting_since_its_handler_was_called[sqlite]",
    ),
    _m(
        "a retried step is suspended since its first attempt",
        ("runner.run_limits:find_waiting_start", "return max(times)", "return times[0]"),
        caught_by="tests/engine/test_patience.py::"
        "test_a_pass_between_two_attempts_measures_the_suspension_from_the_last_attempt[sqlite]",
    ),
    _m(
        "an eager run must end in the time of the request that started it",
        ("tasks.publishing.eager:EagerTasks._run_in_order", "with restore_own_timeouts():", "if True:"),
        caught_by="tests/celery/test_eager.py::"
        "test_a_run_has_its_own_time_if_the_request_that_creates_it_has_used_up_its_time[sqlite]",
    ),
    # --- the fence ------------------------------------------------------------------------------
    _m(
        "the guard has no fence",
        ("store.claims:guard_update", ', i.c.claim_token == param("token", type_=sa.String)', ""),
    ),
    _m(
        "letting go has no fence",
        (
            _LET_GO,
            "claims.guard(tx, self.claim, ",
            "(lambda *_, **__: claims.GuardResult(self.claim.claimed_at, False))(",
        ),
        ("store.releases:_release", ', i.c.claim_token == param("token")', ""),
    ),
    _m("settling has no fence", ("store.releases:_end", ', i.c.claim_token == param("token", type_=sa.String)', "")),
    _m(
        "the fused step has no fence",
        (
            "store.step_rows:_guard_and_insert",
            "guard_update(s)",
            'sa.update(i).where(i.c.id == param("pk", sa.BigInteger)).values(lease_until=s.clock() + '
            'param("lease_us", sa.BigInteger), version=i.c.version + 1, crash_count=0)',
        ),
        caught_by="tests/store/test_claims.py::test_a_superseded_worker_changes_nothing[postgresql-restarted]",
    ),
    _m("a restart keeps the token", ("store.lifecycle:restart", "**RELEASED,", "")),
    _m("terminating keeps the claim", ("store.lifecycle:terminate", "**RELEASED,", "")),
    _m(
        "a takeover keeps the old token",
        (
            "store.claims:_claim_run",
            '(i.claim_token, param("token"))',
            '(i.claim_token, sa.func.coalesce(i.claim_token, param("token")))',
        ),
    ),
    _m(
        "a renewal asks for no token",
        ("store.leases:renew", "i.c.claim_token.in_(tokens)", "sa.true()"),
    ),
    # --- the claim ------------------------------------------------------------------------------
    _m(
        "a claim ignores the lease of another",
        (
            "store.claims:_claimable",
            "sa.and_(i.claim_token.is_not(None), i.lease_until <= now)",
            "i.claim_token.is_not(None)",
        ),
    ),
    _m(
        "a claim ignores the time at which the run is due",
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    _m("a claim ignores the number of the run", ("store.claims:_claimable", 'i.run_number == param("run"),', "")),
    _m(
        "crashes are not counted",
        ("store.claims:_claim_run", "i.crash_count + sa.case((i.claim_token.is_(None), 0), else_=1)", "i.crash_count"),
        ("store.sweeps:_release_crashed", "row.crash_count + 1", "row.crash_count"),
    ),
    # --- commits in doubt -----------------------------------------------------------------------
    _m(
        "a commit in doubt is taken for done",
        (
            "runner.step_commit:Committer._build_find_committed",
            "return None",
            "return Committed([step_rows.to_written_row(w, (0, 0, 0, None, 0)) for w in step_commit.writes])",
        ),
    ),
    _m(
        "a commit in doubt is taken for not done",
        (
            "runner.step_commit:Committer._build_find_committed",
            "if len(found) == len(step_commit.writes)",
            "if len(found) < 0",
        ),
    ),
    _m(
        "a restart in doubt is done again",
        ("operations.rewind:RewindOperations._start_run", "find_committed=was_applied", "find_committed=None"),
    ),
    _m(
        "an event in doubt is taken for sent",
        (
            "operations.events:EventOperations.send",
            "find_committed=sending.find_committed",
            "find_committed=lambda tx: (True, [])",
        ),
    ),
    # --- the sweep ------------------------------------------------------------------------------
    _m(
        "the sweep ignores expired leases",
        ("store.sweeps:_process_rows", "elif not may_expire and row.dispatch_count < _EXPIRY_CHECKS:", "elif True:"),
    ),
    _m(
        "a hint is sent again for as long as it waits",
        ("redispatch:Redispatch.is_lost", "age = now - sent_at", "age = now - sent_at\n    return True"),
        caught_by="tests/replay_state/test_redispatch.py::test_only_lost_hints_are_sent_again_and_all_of_them_soon",
    ),
    _m(
        "only one sight of an empty queue is remembered until it counts",
        ("tasks.flow_control:_QueueState._drop_old_times", "at + slack > now]", "at + slack > now][:1]"),
        caught_by="tests/engine/test_workers.py::"
        "test_a_sweep_does_not_repeat_itself_before_a_worker_had_its_chance[sqlite]",
    ),
    _m(
        "a sweep that looks only once believes no empty queue",
        ("tasks.dispatcher:Sweeper.sweep_as_only_sweeper", "self._flow.slack = timedelta(0)", "pass"),
        caught_by="tests/cli/test_overview.py::"
        "test_a_sweep_that_comes_once_sends_again_what_was_lost_and_nothing_that_waits[sqlite]",
    ),
    _m(
        "an empty queue says nothing of the hints that it had",
        ("tasks.flow_control:FlowControl.read_capacity", "if length == 0:", "if False:"),
        caught_by="tests/engine/test_create.py::test_an_instance_whose_message_was_lost_is_found_by_the_sweep[sqlite]",
    ),
    _m(
        "a claim of just now makes the hints before it lost",
        ("store.queues:read_claimed", "row.recorded_at <= row.now_us - duration_us(SLACK)", "True"),
        caught_by="tests/store/test_queues.py::test_a_dispatch_message_counts_as_claimed_after_three_seconds[sqlite]",
    ),
    _m(
        "a queue that refuses is offered everything each time",
        ("tasks.flow_control:FlowControl.read_capacity", "if monotonic_now < queue.backoff_until:", "if False:"),
        caught_by="tests/celery/test_publishing.py::"
        "test_a_queue_that_refuses_is_tried_ever_more_rarely_and_holds_up_no_other[sqlite]",
    ),
    _m(
        "the outbox is emptied before a dispatcher looks at instances",
        (
            "tasks.dispatcher:Sweeper._run_round",
            "for kind in (self._publish_due_runs, self._republish_lost, self._send_outbox):",
            "while True:\n"
            "            count, has_more = self._send_outbox(self._store.read(schedule.read))\n"
            "            published += count\n"
            "            if not has_more:\n"
            "                break\n"
            "        for kind in (self._publish_due_runs, self._republish_lost):",
        ),
        caught_by="tests/celery/test_turns.py::test_a_full_outbox_delays_an_instance_by_one_batch[sqlite]",
    ),
    _m(
        "the sweep releases live leases",
        ("store.sweeps:_process_rows", "if ends > now:", "if False:"),
    ),
    # --- events and waits -----------------------------------------------------------------------
    _m(
        "an event is consumed after the boundary",
        (
            _WAIT,
            "run_events.consume(tx, self.claim, guard_result, event, key=key)",
            "taken[:] = [(guard_result, event)]",
        ),
        (_WAIT, "def work(tx: Tx) -> Committed:", "taken = []\n\n    def work(tx: Tx) -> Committed:"),
        (
            _WAIT,
            "committed = self._store.transact(work, find_committed=find_committed, timeouts=PASS)",
            "committed = self._store.transact(work, find_committed=find_committed, timeouts=PASS)\n"
            "    for guard_result, event in taken:\n"
            "        self._store.transact(lambda tx: run_events.consume(tx, self.claim, guard_result, event, key=key))",
        ),
    ),
    _m(
        "an event is not marked as consumed",
        (_WAIT, "run_events.consume(tx, self.claim, guard_result, event, key=key)", "pass"),
    ),
    _m(
        "an event at the deadline is too late",
        (
            "store.run_events:_select_oldest_event",
            'e.created_at <= param("deadline_us")',
            'e.created_at < param("deadline_us")',
        ),
    ),
    _m(
        "the newest event is consumed first",
        ("store.run_events:_select_oldest_event", ".order_by(e.seq)", ".order_by(e.seq.desc())"),
    ),
    _m(
        "an event does not wake who waits for it",
        ("operations.events:_Sending.insert", "and run_events.is_awaited(tx, row, self.type)", "and False"),
    ),
    _m(
        "an event that came before the suspension is not seen",
        ("store.releases:suspend", "_has_event_for(tx, claim, waits) or ", ""),
        # Seen by the simulation too, but in one schedule of two thousand.
        caught_by="tests/store/test_claims.py::test_an_event_sent_before_the_suspension_leaves_the_instance_due[sqlite]",
    ),
    _m(
        "a suspended run wakes for the first of its waits, not the earliest",
        ("store.releases:suspend", "min(wait.due_at for wait in waits)", "waits[0].due_at"),
    ),
    _m(
        "a sleep ends when it is next looked at",
        ("replay_state:ReplayState.decide_timer", "if row.wake_at <= now", "if True"),
    ),
    _m(
        "a retry does not wait",
        ("replay_state:ReplayState.decide_do", "row.next_retry_at is not None and row.next_retry_at > now", "False"),
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    # --- from outside ---------------------------------------------------------------------------
    _m(
        "a resumed instance is not made due",
        (
            "store.lifecycle:resume",
            "return make_due(tx, row, wake_reason=WakeReason.RESUME, grace=grace)",
            "_update(tx, row, status=Status.ACTIVE.value)",
        ),
    ),
    _m("a pause ignores who works on it", ("store.lifecycle:pause", "if row.claim_token is not None:", "if False:")),
    _m(
        "a restart takes the events along",
        (
            "store.lifecycle:restart",
            "    return DueRun(",
            "    e = tx.t.event\n"
            "    old = sa.and_(e.c.instance_pk == row.pk, e.c.run_number == row.run_number)\n"
            "    tx.execute(sa.update(e).where(old).values(run_number=number))\n"
            "    return DueRun(",
        ),
    ),
    _m(
        "a rewind copies its target too",
        ("ancestry:select_rows_before", "row.seq < seq", "row.seq <= seq"),
    ),
    _m(
        "a rewind leaves all events consumed",
        ("store.runs:_copy_rows", "values[name] = sa.case((is_kept, e.c[name]))", "values[name] = e.c[name]"),
    ),
    _m(
        "a rewind keeps what is open",
        ("ancestry:select_rows_before", "row.is_finished and ", ""),
    ),
    _m(
        "a rewind keeps what was cancelled",
        ("ancestry:_without_undecided_losers", "row.status is not StepStatus.CANCELLED", "True"),
        caught_by="tests/engine/test_rewinding.py::test_what_terminate_cancelled_is_open_again[sqlite]",
    ),
    _m(
        "a rewound run sees its own time and chance from the beginning",
        ("ancestry:Ancestry.for_continuation", "if seq > 0 else ()", "if False else ()"),
        caught_by="tests/engine/test_rewinding.py::test_time_and_chance_are_those_that_the_kept_steps_saw[sqlite]",
    ),
    _m(
        "a retried linear step has lost its event",
        ("operations.continuations:_build_linear_from_failure", "event_seq=step.event_seq,", "event_seq=None,"),
        caught_by="tests/engine/test_linear_interventions.py::test_a_retried_step_is_called_with_the_event_that_it_had[sqlite]",
    ),
    _m(
        "a retried linear step speaks under a new key",
        ("operations.continuations:_build_linear_from_failure", "retried=[step.step_key]", "retried=[]"),
        caught_by="tests/engine/test_linear_interventions.py::test_a_retried_run_can_be_retried_and_keeps_the_key_of_its_step[sqlite]",
    ),
    _m(
        "a linear run begins ahead of where the other stands",
        ("operations.continuations:_build_linear_before", "current.seq < step.seq", "current.seq < 0"),
    ),
    _m(
        "a linear step that is settled leaves the next one where it was",
        ("store.interventions:complete_linear_step", "(step.seq + 1,", "(step.seq - 1,"),
        caught_by="tests/engine/test_linear_interventions.py::test_a_handler_in_flight_changes_nothing_after_its_step_was_settled[sqlite]",
    ),
    _m(
        "a step is settled by hand under its runner",
        ("store.lifecycle:reclaim", "**RELEASED,", ""),
        caught_by="tests/engine/test_interventions.py::"
        "test_a_runner_in_flight_changes_nothing_after_its_step_was_settled[sqlite]",
    ),
    # --- retention ------------------------------------------------------------------------------
    _m(
        "an instance that ends is kept without end",
        ("store.releases:_end", "retention_until=s.clock() + i.c.retention_us,", ""),
        caught_by="tests/engine/test_retention.py::"
        "test_an_ended_instance_is_deleted_when_its_retention_is_over_with_all_its_runs[sqlite]",
    ),
    _m(
        "a restarted instance is deleted when its last run would have been",
        ("store.lifecycle:restart", "retention_until=None,", ""),
        ("store.retention:delete_expired", ", i.status.in_(sorted(status.value for status in TERMINAL))", ""),
        caught_by="tests/engine/test_retention.py::"
        "test_an_ended_instance_is_deleted_when_its_retention_is_over_with_all_its_runs[sqlite]",
    ),
    _m(
        "what was found to be over is deleted without another look",
        ("store.retention:_delete", ".where(i.c.id.in_(found), *conditions)", ".where(i.c.id.in_(found))"),
        caught_by="tests/engine/test_retention.py::"
        "test_what_is_restarted_between_the_search_and_the_lock_is_kept[expired-postgresql]",
    ),
    _m(
        "instances are pruned by the age of their creation",
        ("store.retention:EndedFilter.conditions", "i.updated_at <=", "i.created_at <="),
        caught_by="tests/engine/test_retention.py::test_what_began_long_ago_and_ended_just_now_is_not_pruned[sqlite]",
    ),
    _m(
        "retention counts from the creation",
        (
            "store.releases:_end",
            "retention_until=s.clock() + i.c.retention_us,",
            "retention_until=i.c.created_at + i.c.retention_us,",
        ),
    ),
    _m(
        "a terminated instance is kept without end",
        ("store.lifecycle:terminate", "retention_until=tx.store.clock() + tx.t.instance.c.retention_us,", ""),
    ),
    _m(
        "what has not ended is pruned by its age",
        (
            "store.retention:EndedFilter.conditions",
            "i.status.in_(sorted(status.value for status in self.statuses)),",
            "",
        ),
    ),
    _m(
        "labels stay when their instance is deleted",
        (
            "store.retention:_delete",
            'if "instance_pk" in table.c:',
            'if "instance_pk" in table.c and table is not tx.t.label:',
        ),
    ),
    _m(
        "what an instance has sent is deleted with it",
        ("store.retention:_delete", "[table.c.next_check_at.is_(None)] if table is tx.t.outbox else []", "[]"),
    ),
    # --- batches --------------------------------------------------------------------------------
    _m(
        "of an id that is twice in a batch the last counts",
        (
            "operations.create:CreateOperations.batch",
            "rows.setdefault(instance_id, row)",
            "rows[instance_id] = row",
        ),
    ),
    _m(
        "a batch returns what existed before it",
        ("operations.create:CreateOperations.batch", "if key in created]", "]"),
    ),
    _m(
        "a batch in doubt does not know what it created",
        (
            "operations.create:CreateOperations.batch",
            "instances.insert(tx, **rows[key])",
            'instances.insert(tx, **{**rows[key], "commit_id": self._context.runtime.new_token()})',
        ),
    ),
    _m(
        "restart_or_create restarts what has not ended",
        ("operations.create:CreateOperations._insert_or_restart", "if row.status not in restartable:", "if False:"),
    ),
    _m(
        "restart_or_create in doubt begins again",
        ("operations.create:CreateOperations.restart_or_create", "find_committed=was_applied", "find_committed=None"),
    ),
    # --- interventions --------------------------------------------------------------------------
    _m(
        "an intervention in doubt is done again",
        (
            "operations.interventions:InterventionOperations._intervene",
            "find_committed=was_applied",
            "find_committed=None",
        ),
    ),
    _m(
        "a step that has ended is settled by hand",
        ("operations.interventions:InterventionOperations._take_over", "if step.is_finished or", "if False and"),
    ),
    _m(
        "an intervention is not recorded",
        ("operations.interventions:_complete_step", "interventions.insert_audit_record(", "(lambda *_, **__: None)("),
    ),
    # --- labels and hooks -----------------------------------------------------------------------
    _m("a label keeps its first value", ("store.labels:merge", "and old[name] != value", "and False")),
    _m("a label is never taken away", ("store.labels:merge", "for name in old if name not in new", "for name in ()")),
    _m(
        "who is to hear of an end is not written down",
        ("runner.step_commit:Committer._insert_messages", "outbox.insert(", "(lambda *_, **__: None)("),
    ),
    _m(
        "an end is told before it is committed",
        (
            "runner.step_commit:Committer._commit_end",
            "ended = self._store.transact(",
            "on_committed(); ended = self._store.transact(",
        ),
    ),
    _m(
        "a page of waiters skips the other waits of its last instance",
        ("store.topic_waits:read_page", "w.c.step_key > key", "sa.false()"),
        caught_by="tests/engine/test_topics.py::test_a_page_of_waiters_ends_between_two_waits_of_one_instance[sqlite]",
    ),
    # --- ends and branches ----------------------------------------------------------------------
    _m(
        "settling leaves the times of the next sweep",
        ("store.releases:_end", "run_at=None,", ""),
        ("store.releases:_end", "next_check_at=None,", ""),
    ),
    _m(
        "who is told of an end is not in its transaction",
        (_SETTLE, "self._insert_messages(tx, messages)", "None"),
        caught_by="tests/engine/test_endings.py::"
        "test_what_the_broker_did_not_take_at_the_end_is_sent_by_a_sweep[sqlite]",
    ),
    _m(
        "progress does not clear the count of crashes",
        (
            "store.claims:guard_update",
            'crash_count=sa.case((param("resets_crash_count", type_=sa.Boolean), 0), else_=i.c.crash_count),',
            "",
        ),
    ),
    _m(
        "a gather runs finished siblings again",
        (
            "runner.replay:ReplayContext._advance",
            "if execution.finished_row is not None:",
            "if execution.finished_row is not None and may_suspend:",
        ),
        ("replay_state:ReplayState.decide_do", "row.is_finished", "row.is_finished and is_only_open"),
    ),
    _m(
        "a race leaves its losers open",
        (
            "runner.execution_context:ExecutionContext.build_race_writes",
            "return [race_write, *(self.build_write(branch, StepStatus.CANCELLED, commit_id=commit_id) "
            "for branch in losers)]",
            "return [race_write]",
        ),
    ),
    # --- published values -----------------------------------------------------------------------
    _m(
        "publishing has no fence",
        ("store.claims:_guard_without_renewal", ', i.c.claim_token == param("token", type_=sa.String)', ""),
        caught_by="tests/engine/test_publish.py::"
        "test_a_worker_that_has_lost_its_claim_writes_nothing_and_stops[in a body-sqlite]",
    ),
    _m(
        "a replay publishes again",
        ("runner.execution_context:ExecutionContext.publish", "elif not self.replay_state.is_replaying:", "else:"),
        caught_by="tests/engine/test_publish.py::test_a_replay_never_puts_an_old_value_over_a_newer_one[sqlite]",
    ),
    _m(
        "letting go forgets what is kept",
        (_LET_GO, "self.published.flush(tx)", "pass"),
        caught_by="tests/engine/test_publish.py::"
        "test_the_last_value_of_a_tight_loop_is_written_with_what_comes_next[a pause-sqlite]",
    ),
    # --- linear workflows -----------------------------------------------------------------------
    _m(
        "a linear result is written without the guard",
        (
            "runner.step_commit:Committer._write_in_lock_order",
            "guard_result = claims.guard(\n"
            "            tx, self.claim, lease=self._lease.length, resets_crash_count=step_commit.resets_crash_count\n"
            "        )",
            "guard_result = (\n"
            "            claims.GuardResult(self.claim.claimed_at, False)\n"
            "            if step_commit.writes[0].status is StepStatus.DONE and step_commit.run_outcome is None\n"
            "            else claims.guard(tx, self.claim, lease=self._lease.length)\n"
            "        )",
        ),
        ("store.step_rows:write_step", "raise Superseded(str(claim.ref))", "pass"),
    ),
    _m(
        "an expired lease costs a linear step no attempt",
        ("runner.linear_pass:LinearPass._recover_step", '"attempts": row.attempts + 1', '"attempts": row.attempts'),
    ),
    _m(
        "an event that came before a linear step waits is consumed for nothing",
        (
            _LINEAR_WAIT,
            "return [replace(self._build_ready_write(row, event.seq), commit_id=waiting_write.commit_id)]",
            "return [waiting_write]",
        ),
    ),
    _m(
        "all linear steps are made ready at once",
        (
            "runner.linear_pass:LinearPass._complete_step",
            "[done, self._build_write(next_row, StepStatus.READY, retry_in=_AT_ONCE)]",
            "[done, *(self._build_write(each, StepStatus.READY, retry_in=_AT_ONCE) "
            "for each in self._rows[row.seq + 1 :])]",
        ),
    ),
    _m(
        "a linear step that waits again keeps its last event",
        (_LINEAR_WAIT, "event_seq=None,", ""),
        caught_by="tests/engine/test_linear.py::"
        "test_a_step_that_waits_again_in_vain_is_called_without_its_last_event[sqlite]",
    ),
    _m(
        "a linear wait is over when it is next looked at",
        ("runner.linear_pass:LinearPass._check_wait", "if due_at <= guard_result.now else []", "if True else []"),
    ),
    _m(
        "a linear step gets its event, which is not marked as consumed",
        (
            "runner.linear_pass:LinearPass._check_wait",
            "run_events.consume(tx, self._lease.claim, guard_result, event, key=row.step_key)",
            "pass",
        ),
    ),
    _m(
        "a linear retry does not wait",
        (
            "runner.linear_pass:LinearPass.run",
            "row.next_retry_at is not None and row.next_retry_at > self._now",
            "False",
        ),
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    _m(
        "a linear step has one attempt more than it may",
        (
            "runner.linear_pass:LinearPass._is_last_attempt",
            "row.attempts + 1 >= row.max_attempts",
            "row.attempts >= row.max_attempts",
        ),
    ),
    _m(
        "an event does not wake a linear step",
        (
            "store.run_events:_find_open_wait",
            "st.status.in_([sa.literal_column(f\"'{status}'\") for status in _WAITING])",
            _REPLAYED,
        ),
    ),
    # --- topics ---------------------------------------------------------------------------------
    _m(
        "an emission is for waits that began after it",
        ("store.emissions:_select_waits", ", w.c.opened_at <= to_us(emission.created_at)", ""),
        caught_by="tests/engine/test_topics.py::"
        "test_a_wait_that_begins_while_an_emission_is_under_way_does_not_get_it[sqlite]",
    ),
    _m(
        "an emission moves on in a commit of its own, and is handed out twice after a crash",
        (
            _DELIVER,
            "emissions.advance(tx, emission, cursor_pk=cursor_pk, delivered_count=delivered_count, lease=lease)",
            "pass",
        ),
        (_DELIVER, "topic_waits.close_many(tx, delivery.closed_waits)", "pass"),
        ("model.emissions:plan_delivery", "elif not wait.has_emission:", "else:"),
        ("model.emissions:plan_delivery", "event_id(number)", "event_id(receiver.version + number + 1)"),
        (
            "operations.topics:TopicOperations._deliver_batch",
            "return self._context.store.transact(work, find_committed=was_applied)",
            "progress = self._context.store.transact(work)\n"
            "    if progress is not None and not progress.is_over:\n"
            "        moved = {'after': progress.cursor_pk, 'delivered': progress.delivered_count}\n"
            "        moved |= {'next_check_us': 30_000_000}\n"
            "        write = self._context.store.transact\n"
            "        write(lambda tx: tx.run(emissions._advance_cursor, id=emission_id, **moved))\n"
            "    return progress",
        ),
        (
            "operations.topics:continue_abandoned_emission",
            "if progress is not None:",
            "if progress is not None:\n"
            "        moved = {'after': progress.cursor_pk, 'delivered': progress.delivered_count, 'next_check_us': 0}\n"
            "        store.transact(lambda tx: tx.run(emissions._advance_cursor, id=abandoned, **moved))",
        ),
    ),
    _m(
        "an emission is over after its first batch",
        (_DELIVER, "is_over = len(batch) < BATCH", "is_over = True"),
    ),
    _m(
        "an emission whose emitter died is left as it is",
        ("store.emissions:_select_abandoned", "e.next_check_at <= s.statement_clock()", "e.next_check_at < 0"),
    ),
    _m(
        "an emission that is repeated is handed out again",
        ("model.emissions:plan_delivery", "elif not wait.has_emission:", "else:"),
        (
            "model.emissions:plan_delivery",
            "event_id(number)",
            "event_id(receiver.version + number + 1 if wait.has_emission or number > 1 else 1)",
        ),
        caught_by="tests/engine/test_topics.py::test_a_loop_gets_an_emission_once[sqlite]",
    ),
    _m(
        "an emission wakes nobody",
        (_DELIVER, "emissions.make_due(tx, woken, grace=grace)", "emissions.bump_versions(tx, woken)"),
        caught_by="tests/engine/test_topics.py::test_an_emission_ends_the_wait_of_everybody[sqlite]",
    ),
    _m(
        "a wait on a topic is not written down",
        (_WAIT, "topic_waits.open_wait(tx, self.claim, guard_result, key=key, topic=topic)", "pass"),
    ),
    _m(
        "what a step emits is lost",
        ("runner.step_commit:Committer._write_in_lock_order", "self._effects.emit(tx, step_commit.emissions)", "pass"),
    ),
    _m(
        "a rewind takes along what was emitted to waits that it opens anew",
        ("store.runs:_copy_rows", ", sa.or_(is_kept, e.c.type.not_like(PRIVATE_TYPE_PATTERN))", ""),
        caught_by="tests/engine/test_topics.py::test_what_was_emitted_is_not_for_a_wait_that_a_rewind_opens_anew[sqlite]",
    ),
    # --- steps that others do -------------------------------------------------------------------
    _m(
        "an answer is taken that nobody waits for",
        ("store.answers:store_answer", "row.status.is_terminal or not is_unanswered", "row.status.is_terminal"),
    ),
    _m("a second answer is taken beside the first", ("store.answers:_select_unanswered_step", "~has_answer,", "")),
    _m(
        "an answer counts only while its instance sleeps",
        ("store.answers:store_answer", "row.status.is_terminal", "row.status.value != 'waiting'"),
    ),
    _m("an answer wakes nobody", ("store.answers:store_answer", "if is_suspended else []", "if False else []")),
    _m(
        "the child of an earlier run answers",
        ("store.answers:_waiting_parent", 'i.run_number == param("run")', 'i.run_number >= param("run")'),
    ),
    _m(
        "all attempts of a task have the same answers",
        ("model.states:task_event_type", "{attempt}", "1"),
        ("store.items:mark_task_as_sent", "task_id(event_type, ", 'task_id(f"{event_type}{attempt}", '),
    ),
    _m(
        "a task that is to be sent again waits for the answer that it had",
        ("runner.remote_steps:RemoteSteps._build_task_wait", "event_type=None,\n", "\n"),
    ),
    _m(
        "a task that failed is sent again at once",
        ("replay_state:ReplayState.decide_remote", "if row.next_retry_at > now", "if False"),
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    _m(
        "a task is sent once more than it may",
        (
            "runner.remote_steps:RemoteSteps._build_task_wait",
            "row.attempts >= policy.max_attempts",
            "row.attempts > policy.max_attempts",
        ),
    ),
    _m(
        "all attempts of a task have the time of the first",
        (
            "runner.remote_steps:RemoteSteps._send_task",
            "wake_in=timeout",
            "wake_in=timeout if attempt == 1 else None, "
            "wake_at=None if attempt == 1 else execution.entry.row.created_at + execution.policy.timeout",
        ),
    ),
    _m(
        "the message of a task is not committed with its step",
        (
            "runner.remote_steps:RemoteSteps._send_task",
            "step_commit.messages = [message]",
            "self._context.env.send_messages([message])",
        ),
    ),
    _m(
        "the end of a child is told nobody",
        (_SETTLE, "_EndResult(self._answer_parent(tx, run_outcome))", "_EndResult([])"),
    ),
    _m(
        "the end of a child is told after its commit",
        (_SETTLE, "return _EndResult(self._answer_parent(tx, run_outcome))", "return _EndResult([])"),
        (
            _SETTLE,
            "    self._commit_end(work, messages, notify_end, is_single_statement=is_single_statement)",
            "    self._commit_end(work, messages, notify_end, is_single_statement=is_single_statement)\n"
            "    self._store.transact(lambda tx: self._answer_parent(tx, run_outcome))",
        ),
        # Seen by the simulation too, but in one schedule of a thousand.
        caught_by="tests/engine/test_children.py::test_a_child_is_created_once_and_answers_once_wherever_a_runner_dies",
    ),
    _m(
        "the end of a linear child is told nobody",
        (
            "runner.step_commit:Committer._write_in_lock_order",
            "due_runs += self._answer_parent(tx, step_commit.run_outcome)",
            "pass",
        ),
    ),
    _m(
        "the end of a child and its answer are two commits",
        (_SETTLE, " and self.claim.parent is None", ""),
        caught_by="tests/engine/test_children.py::test_an_end_whose_commit_is_in_doubt_answers_once[before-postgresql]",
    ),
    _m(
        "the termination of a child is told nobody",
        (
            "operations.lifecycle:LifecycleOperations.terminate",
            "answers.answer_parent(tx, parent, payload=payload, event_id=event_id, grace=grace)",
            "[]",
        ),
    ),
    _m(
        "the end of a child that took too long is told nobody",
        (
            "runner.step_commit:Committer.terminate",
            "_EndResult(self._answer_parent(tx, run_outcome, reason=reason))",
            "_EndResult([])",
        ),
        caught_by="tests/engine/test_children.py::"
        "test_a_child_that_is_ended_since_it_took_too_long_fails_its_step[sqlite]",
    ),
    _m(
        "a child that failed is taken for done",
        (
            "runner.completion_messages:build_child_answer",
            "case Status.COMPLETE:",
            "case Status.COMPLETE | Status.ERRORED:",
        ),
    ),
    _m(
        "a child does not know which run has made it",
        ("runner.step_effects:StepEffects.create", "self._claim.ref.run_number, by_step", "1, by_step"),
    ),
    _m(
        "a retried step has the child that it had",
        ("runner.remote_steps:RemoteSteps._create_child", "claim.pk, claim.ref.run_number)", "claim.pk, 1)"),
        caught_by="tests/engine/test_children.py::test_a_retry_of_the_parent_makes_another_child",
    ),
    # --- maps -----------------------------------------------------------------------------------
    _m(
        "an item takes what an earlier attempt answers",
        ("store.task_answers:_update_item", 'item.c.attempts == param("attempt", sa.Integer),', ""),
        ("store.sent_attempts:map_item_conditions", 'item.attempts == param("attempt", sa.Integer),', ""),
        ("store.task_answers:accept_answer", "if not hmac.compare_digest(", "if False and not hmac.compare_digest("),
        caught_by=_MAPS + "test_an_item_that_failed_is_tried_again_later_under_a_new_id[sqlite]",
    ),
    _m(
        "an item is answered as often as somebody likes",
        ("store.task_answers:_update_item", "item.c.status == sa.literal_column(f\"'{ItemStatus.SENT.value}'\"),", ""),
        (
            "store.sent_attempts:_unanswered_conditions",
            "item.status == sa.literal_column(f\"'{ItemStatus.SENT.value}'\"),",
            "",
        ),
        caught_by=_MAPS + "test_an_item_is_answered_once[sqlite]",
    ),
    _m(
        "nobody is woken when the last item has answered",
        (
            "store.task_answers:_answer_item",
            "needs_pass = status is ItemStatus.FAILED or (not messages and items.are_all_finished(tx, *step_key))",
            "needs_pass = False",
        ),
        caught_by=_MAPS + "test_each_item_is_done_by_a_task_of_its_own[sqlite]",
    ),
    _m(
        "every answer wakes the workflow",
        ("store.task_answers:_answer_item", "if needs_pass and is_suspended", "if is_suspended"),
        caught_by=_MAPS + "test_each_item_is_done_by_a_task_of_its_own[sqlite]",
    ),
    _m(
        "an answer sends nothing after it",
        ("store.task_answers:_answer_item", "[] if is_paused else items.mark_ready_as_sent(tx, step, limit=1)", "[]"),
        caught_by=_MAPS + "test_so_many_are_out_at_a_time[sqlite]",
    ),
    _m(
        "a map sends all that it has",
        ("store.items:mark_ready_as_sent", "_MAX_INTEGER if limit is None else limit", "_MAX_INTEGER"),
        caught_by=_MAPS + "test_so_many_are_out_at_a_time[sqlite]",
    ),
    _m(
        "an item that is lost is not missed",
        (
            "store.items:_has_failed_or_timed_out",
            "sa.or_(_has_status(s, ItemStatus.FAILED), _is_late(s))",
            "_has_status(s, ItemStatus.FAILED)",
        ),
        caught_by=_MAPS + "test_what_gets_lost_is_sent_again_when_its_time_is_over[sqlite]",
    ),
    _m(
        "what came while a map was about to sleep is not seen",
        (
            "store.releases:suspend",
            "items.read_map_state(tx, wait.map_step, now=guard_result.now).needs_pass(wait.map_step.max_concurrency)",
            "False",
        ),
        caught_by="tests/store/test_claims.py::"
        "test_a_wait_for_a_map_checks_its_items_under_the_lock[sqlite-bodies0-ReleaseOutcome.DUE]",
    ),
    _m(
        "a run that goes on beyond a map has no items",
        ("store.runs:copy_steps", "(tx.t.step, tx.t.item)", "(tx.t.step,)"),
        caught_by=_MAPS + "test_a_rewind_beyond_a_map_keeps_its_results[sqlite]",
    ),
    _m(
        "a retry does all items again",
        (
            "store.runs:_copy_rows",
            "_copy(tx, tx.t.item, continuation, continuation.retried, is_done, pk=pk, run_number=run_number)",
            "pass",
        ),
        caught_by=_MAPS + "test_a_retry_does_again_only_what_failed[sqlite]",
    ),
    _m(
        "what is answered to a map that was deleted is forged to its namesake",
        ("store.task_answers:_find_attempt", "if item is not None and item.pk != row.pk:", "if False:"),
        caught_by=_MAPS + "test_what_is_answered_to_a_map_that_was_deleted_is_for_nobody[sqlite]",
    ),
    _m(
        "an answer need not name the token",
        ("store.task_answers:accept_answer", "if not hmac.compare_digest(", "if False and not hmac.compare_digest("),
        caught_by=_TASKS + "test_an_answer_that_does_not_name_the_token_is_refused[sqlite]",
    ),
    _m(
        "a failure counts from a delivery that is overtaken",
        ("store.task_answers:_delivery_parameters", "if read_answer_error(payload) is None:", "if True:"),
        caught_by=_TASKS + "test_a_failure_counts_from_the_newest_delivery_alone_and_a_success_from_any[sqlite]",
    ),
    _m(
        "a success counts from the newest delivery alone",
        ("store.task_answers:_delivery_parameters", "if read_answer_error(payload) is None:", "if False:"),
        caught_by=_TASKS + "test_a_failure_counts_from_the_newest_delivery_alone_and_a_success_from_any[sqlite]",
    ),
    _m(
        "a map sends on while a pause is requested",
        (
            "store.task_answers:_answer_item",
            "row.status is Status.PAUSED or row.pause_requested",
            "row.status is Status.PAUSED",
        ),
        caught_by=_MAPS + "test_a_pause_that_is_requested_of_a_running_instance_sends_no_more_items[sqlite]",
    ),
    _m(
        "a map sends on while its instance is paused",
        (_ANSWER_ITEM, "row.status is Status.PAUSED or row.pause_requested", "False"),
    ),
    _m(
        "an answer sends two items after it",
        (_ANSWER_ITEM, "items.mark_ready_as_sent(tx, step, limit=1)", "items.mark_ready_as_sent(tx, step, limit=2)"),
    ),
    _m(
        "an item that is to be tried again later is sent at once",
        (
            "store.items:_select_ready",
            "_has_status(s, ItemStatus.PENDING), _is_ready(s)",
            "_has_status(s, ItemStatus.PENDING)",
        ),
    ),
    _m(
        "the message of an item that an answer sends is not kept",
        (_ANSWER_ITEM, "outbox.insert(tx, messages, ", "outbox.insert(tx, (), "),
    ),
    # --- lost tasks -----------------------------------------------------------------------------
    _m(
        "a failure counts from any delivery of a task",
        (
            "store.task_answers:_delivery_parameters",
            '{"first_delivery": reference.delivery, "last_delivery": reference.delivery}',
            '{"first_delivery": 0, "last_delivery": _MAX_INTEGER}',
        ),
        caught_by=_LOST + "test_a_failure_counts_from_the_newest_delivery_alone[task-sqlite]",
    ),
    _m(
        "a loss that is reported for an older copy counts",
        ("store.lost_tasks:report_loss", "row is None or row.loss_count != reference.delivery or", "row is None or"),
        ("store.lost_tasks:_count_loss", 'item.c.loss_count == param("delivery", sa.Integer),', ""),
        caught_by=_LOST + "test_a_loss_is_carried_out_once_however_many_report_it[map-sqlite]",
    ),
    _m(
        "a retry of the task by itself counts as its loss",
        ("store.lost_tasks:report_loss", " or sent_us not in (None, row.sent_at)", ""),
        (
            "store.lost_tasks:_count_loss_if_sent_at",
            '.where(s.tables.item.c.sent_at == param("sent", sa.BigInteger))',
            "",
        ),
        caught_by=_LOST + "test_a_retry_of_the_task_by_itself_is_no_loss[map-sqlite]",
    ),
    _m(
        "a lost task is sent again for ever",
        ("store.lost_tasks:report_loss", " or row.loss_count + 1 >= limit", ""),
        caught_by=_LOST + "test_a_task_that_is_lost_too_often_is_given_up[task-sqlite]",
    ),
    _m(
        "what is in no list at the first inventory is lost",
        ("tasks.lost.detection:_evaluate_inventory", "search.round == ROUNDS", "search.round >= 1"),
        caught_by="tests/lost/test_elimination.py::test_what_is_concluded_is_lost_and_what_was_lost_is_concluded",
    ),
    _m(
        "the roll is called before the marker has passed",
        ("tasks.lost.detection:decide", "if search.marker in observations.received_markers:", "if search.marker:"),
        caught_by="tests/lost/test_elimination.py::test_nobody_is_asked_before_the_marker_has_come_back",
    ),
    _m(
        "a worker whose loop is stuck is waited for without end",
        ("tasks.lost.detection:_max_wait_seconds", "return STUCK_LOOP_SECONDS", "return math.inf"),
        caught_by="tests/engine/test_search.py::"
        "test_what_a_worker_holds_whose_loop_is_stuck_is_lost[sqlite-prefork-True]",
    ),
    _m(
        "workers that an outage has silenced are dead",
        ("tasks.lost.detection:_evaluate_inventory", "observations.reachable_seconds < MIN_REACHABLE_SECONDS", "False"),
        caught_by="tests/engine/test_search.py::"
        "test_nothing_is_lost_before_the_database_was_seen_for_long_enough[sqlite]",
    ),
    _m(
        "a message that is still in the outbox is lost",
        (
            "tasks.lost.search:LostTaskSearch._start_searches",
            "self._store.read(lambda tx: lost_tasks.exclude_unsent(tx, page.tasks)) if page.tasks else []",
            "list(page.tasks)",
        ),
        caught_by="tests/engine/test_search.py::test_what_has_not_left_the_outbox_is_not_searched_for[sqlite]",
    ),
    _m(
        "a worker forgets what waits for its ETA",
        ("tasks.lost.held_tasks:HeldTasks.list_ids", "not request.acknowledged or ", ""),
        caught_by="tests/celery/test_lost.py::"
        "test_a_worker_holds_what_it_has_received_until_it_has_ended[sqlite-threads]",
    ),
    _m(
        "a copy of what was answered runs",
        ("tasks.lost.duplicates:DuplicateFilter._revoke_if_answered", "state.revoked.add(task_id)", "pass"),
        caught_by="tests/celery/test_lost.py::test_a_copy_that_nobody_waits_for_does_not_run[sqlite-1-True-False]",
    ),
    # --- how tasks end --------------------------------------------------------------------------
    _m(
        "a forged answer is taken",
        ("store.task_answers:accept_answer", "if not hmac.compare_digest(", "if False and not hmac.compare_digest("),
        caught_by="tests/celery/test_forged.py::test_whatever_is_forged_changes_nothing_but_what_a_hint_may[sqlite]",
    ),
    _m(
        "an answer is neither taken nor sent anew but acknowledged",
        ("tasks:_commit_or_resend", "_send_answer(task, answers, message)", "pass"),
        caught_by=_ANSWERS + "test_an_answer_waits_in_the_broker_while_the_database_does_not_take_it[sqlite]",
    ),
    _m(
        "an answer is neither committed where its task ran nor sent",
        (
            "tasks.task_ends:TaskEndHandler._make_commit",
            "reference.ref, exc)\n            return False",
            "reference.ref, exc)",
        ),
        caught_by=_ANSWERS + "test_an_answer_waits_in_the_broker_while_the_database_does_not_take_it[sqlite]",
    ),
    _m(
        "an answer for another database is committed to this one",
        (
            "tasks.answers:AnswerCommitter.is_awaited_here",
            "self._operations().answers.read_database_id() == reference.database_id",
            "True",
        ),
        caught_by=_ANSWERS + "test_a_task_of_another_database_answers_by_message[sqlite]",
    ),
    _m(
        "every answer is a message",
        (
            "tasks.answers:AnswerCommitter.is_awaited_here",
            "self._operations().answers.read_database_id() == reference.database_id",
            "False",
        ),
        caught_by=_ANSWERS + "test_results_and_errors_come_back_from_a_worker[sqlite]",
    ),
    _m(
        "a task that ends without a callback answers nobody",
        (
            "tasks.task_ends:TaskEndHandler._handle_postrun",
            "self.commit_or_send_error(encode_exception(retval), raw_reference)",
            "pass",
        ),
        caught_by=_ANSWERS + "test_ends_that_call_nothing_are_answered_too[sqlite]",
    ),
    _m(
        "a failure that the result backend does not take answers nobody",
        (
            "tasks.task_ends:TaskEndHandler._handle_internal_error",
            "self.commit_or_send_error(encode_exception(error), raw_reference)",
            "pass",
        ),
        caught_by=_ANSWERS + "test_a_result_backend_that_is_away_changes_nothing[sqlite]",
    ),
    # --- the outbox -----------------------------------------------------------------------------
    _m(
        "an outbox message is removed before it is sent",
        (
            _POST,
            "report = self._send(messages)",
            "tasks = [each.id for each in messages if each.kind is OutboxKind.TASK]\n"
            "    self._store.transact(lambda tx: outbox.delete(tx, tasks))\n"
            "    report = self._send(messages)",
        ),
    ),
    _m(
        "an outbox message that the broker refused is removed",
        (_POST, "report.with_state(messages, SendState.SENT)", "messages"),
    ),
    _m(
        "an outbox message is sent without being committed with its step",
        ("runner.step_commit:Committer._write_in_lock_order", "step_commit.messages,\n        pk=", "(),\n        pk="),
    ),
    _m(
        "an outbound event is forgotten when it is sent",
        (_POST, " if each.kind is OutboxKind.TASK", ""),
    ),
    _m(
        "an outbound event is not forgotten when it was handled",
        (
            "store.outbox:finish_delivery",
            "sa.delete(o).where(o.c.id == delivery.id, o.c.claim_token == delivery.token)",
            "sa.update(o).where(o.c.id == delivery.id).values(claim_token=None, run_at=tx.store.clock())",
        ),
    ),
    # --- two transactions at once ---------------------------------------------------------------
    _m(
        "a claim is looked up by the index that others lock first",
        (
            "store.claims:claim",
            "_make_claim(tx.run(_read_claimed, workflow=ref.workflow, instance=ref.instance_id).one(), "
            "ref, token, lease)",
            "find_claim(tx, ref, token=token, lease=lease)",
        ),
        caught_by=_PAIR + "[mariadb-claim, held at its lock, commits before send_event]",
    ),
    _m(
        "a release decides by an earlier read whether to pause",
        (
            _LET_GO,
            "claims.guard(tx, self.claim, lease=self._lease.length, resets_crash_count=must_reset)",
            "guard_result",
        ),
        (
            _LET_GO,
            "def work(tx: Tx) -> ReleaseOutcome:",
            "guard_result = claims.GuardResult(self._store.transact(lambda tx: claims.guard(\n"
            "        tx, self.claim, lease=self._lease.length, resets_crash_count=must_reset)).now, False)\n\n"
            "    def work(tx: Tx) -> ReleaseOutcome:",
        ),
        caught_by=_PAIR + "[postgresql-pause, held at its commit, commits before suspend]",
    ),
    _m(
        "a boundary locks its own row before an older one",
        (_IN_ORDER, "if pk <= self.claim.pk:", "if False:"),
        (_IN_ORDER, "if pk > self.claim.pk:", "if True:"),
        caught_by=_ORDER + "[postgresql-a child that tells its parent-parent first]",
    ),
    _m(
        "a boundary locks its own row twice, by two indexes",
        (_IN_ORDER, "if pk <= self.claim.pk:", "if pk < self.claim.pk:"),
        caught_by="tests/pairs/test_order.py::"
        "test_a_step_that_sends_an_event_to_its_own_instance_does_not_deadlock[mariadb-lock]",
    ),
    _m(
        "the end of a child locks the child before its parent",
        (_SETTLE, "answers.lock_parent(tx, self.claim.parent)", "pass"),
        caught_by=_ORDER + "[postgresql-a child that ends-parent first]",
    ),
    _m(
        "the termination of a child locks the child before its parent",
        ("operations.lifecycle:LifecycleOperations.terminate", "answers.lock_parent(tx, parent)", "pass"),
        caught_by=_ORDER + "[postgresql-the termination of a child-parent first]",
    ),
    _m(
        "the end of a child that overstays locks the child before its parent",
        ("runner.step_commit:Committer.terminate", "answers.lock_parent(tx, self.claim.parent)", "pass"),
        caught_by=_ORDER + "[postgresql-a child that overstays-parent first]",
    ),
    _m(
        "the end of a run that overstays locks its row twice, by two indexes",
        (
            "runner.step_commit:Committer.terminate",
            "row = instances.lock(",
            "claims.guard(tx, self.claim, lease=self._lease.length)\n        row = instances.lock(",
        ),
        caught_by="tests/pairs/test_order.py::"
        "test_a_run_that_exceeds_its_duration_does_not_deadlock_with_an_event[mariadb-lock]",
    ),
    # --- outbound events ------------------------------------------------------------------------
    _m(
        "a delivery removes an outbound event that another delivery has taken over",
        ("store.outbox:finish_delivery", ", o.c.claim_token == delivery.token", ""),
        caught_by=_OUTBOX + "test_a_worker_that_ends_while_another_takes_over_ends_nothing[finish-postgresql]",
    ),
    _m(
        "a delivery releases an outbound event that another delivery has taken over",
        ("store.outbox:release_delivery", ", o.c.claim_token == delivery.token", ""),
        caught_by=_OUTBOX + "test_a_worker_that_ends_while_another_takes_over_ends_nothing[give_back-mariadb]",
    ),
    _m(
        "an outbound event is taken although another delivery has it",
        ("store.outbox:begin_delivery", ", o.c.run_at <= now", ""),
        caught_by=_OUTBOX + "test_of_two_workers_at_once_one_gets_the_event[commits-postgresql]",
    ),
    _m(
        "an outbound event is free again for the dispatcher alone when its worker dies",
        ("store.outbox:begin_delivery", "run_at=until, next_check_at=until", "next_check_at=until"),
        caught_by=_OUTBOX + "test_only_one_worker_delivers_an_event[sqlite]",
    ),
    _m(
        "anybody finds the delivery that another began",
        ("store.outbox:find_delivery", ", o.c.claim_token == token", ""),
        caught_by=_OUTBOX + "test_only_the_token_that_began_finds_its_delivery[sqlite]",
    ),
    _m(
        "two dispatchers take the same messages",
        ("store.outbox:_select_due", ".with_for_update(skip_locked=True)", ""),
        caught_by=_OUTBOX + "test_two_sweeps_at_once_take_different_messages[commits-postgresql]",
    ),
    _m(
        "what full queues leave due keeps a dispatcher busy",
        (
            "tasks.dispatcher:Dispatcher._check",
            "return left if left > 0 or published else self._settings.poll_seconds",
            "return left",
        ),
        (
            "tasks.flow_control:FlowControl.queue_backoff",
            "return max(full, queue.backoff_until - now, 0.0)",
            "return 0.0",
        ),
        caught_by="tests/celery/test_dispatcher_pace.py::"
        "test_a_dispatcher_rests_while_full_queues_leave_work_due[sqlite]",
    ),
    # --- somebody else's worker -----------------------------------------------------------------
    _m(
        "our messages follow the application's routes",
        ("tasks:_send_past_routes", "if not app.conf.task_always_eager:", "if False:"),
        caught_by=_ATTACHING + "test_a_catch_all_route_does_not_catch_beats_sweeps[sqlite-exchange]",
    ),
    _m(
        "only a declared queue is known to who publishes",
        ("tasks.queues:_add_queue", "queues.select_add(_make_queue(app, name))", "pass"),
        caught_by=_ATTACHING + "test_a_client_publishes_where_queues_were_assigned_late_and_missing_ones_are_not_made",
    ),
    _m(
        "any pool runs workflows",
        ("tasks.pools:runs_workflows", "return pool in SUPPORTED_POOLS", "return True"),
        caught_by=_WORKERS + "test_a_workflow_on_the_own_queue_of_a_worker_on_another_pool_is_left_for_others[sqlite]",
    ),
    _m(
        "a worker on another pool consumes the queue of workflows",
        ("tasks.pools:stop_consuming", "queues.deselect([queue])", "pass"),
        caught_by=_WORKERS + "test_a_worker_on_another_pool_does_its_own_tasks_and_leaves_workflows_alone[sqlite]",
    ),
    _m(
        "a failed acknowledgement is not repeated",
        ("tasks.redis_watchdog:RedisWatchdog.check", "not self._failed or", "True or"),
        caught_by="tests/celery/test_redis_watchdog.py::test_what_redis_did_not_take_is_repeated_when_it_is_back[ack]",
    ),
    # --- leases and deadlines -------------------------------------------------------------------
    _m(
        "the renewer renews once per lease",
        ("runner.lease:LeaseRenewer.__init__", "length.total_seconds() / 3", "length.total_seconds()"),
        caught_by=_LEASES + "test_a_lease_is_renewed_every_third_of_its_length[sqlite]",
    ),
    _m(
        "a renewal is believed from after the answer",
        (
            "runner.lease:LeaseRenewer._renew",
            "lease.extend(requested_at=requested_at)",
            "lease.extend(requested_at=self._runtime.monotonic())",
        ),
        caught_by=_LEASES + "test_a_renewal_counts_from_before_it_was_asked_for[sqlite]",
    ),
    _m(
        "a lease that was made sure of is believed from after the answer",
        (
            "runner.lease:Lease.ensure_held",
            "self.extend(requested_at=requested_at)",
            "self.extend(requested_at=self._runtime.monotonic())",
        ),
        caught_by=_LEASES + "test_a_lease_that_was_made_sure_of_counts_from_before_it_was_asked_for[sqlite]",
    ),
    _m(
        "a boundary is believed to renew the lease from after the answer",
        (
            "runner.step_commit:Committer.commit",
            "self._lease.extend(requested_at=requested_at)",
            "self._lease.extend(requested_at=self._lease.mark_progress())",
        ),
        caught_by=_LEASES + "test_a_boundary_renews_the_lease_from_before_it_was_asked_for[sqlite]",
    ),
    _m(
        "a worker begins a body though it knows that its lease is lost",
        ("runner.lease:Lease.ensure_held", "if self.is_lost:", "if False:"),
        (
            "runner.lease:Lease.ensure_held",
            "if not self.is_valid:",
            "if self._runtime.monotonic() >= self._valid_until:",
        ),
        caught_by=_LEASES + "test_a_worker_that_knows_its_lease_is_lost_begins_no_body[sqlite]",
    ),
    _m(
        "the lease of a pass that is stuck is renewed for ever",
        ("runner.lease:Lease.measure_stall", "if self._user_code_owners:", "if True:"),
        caught_by=_LEASES + "test_a_pass_that_hangs_in_our_own_code_loses_its_claim_and_that_is_no_crash[sqlite]",
    ),
    _m(
        "an author's code is taken for a pass that is stuck",
        ("runner.lease:Lease.measure_stall", "if self._user_code_owners:", "if False:"),
        caught_by=_LEASES + "test_an_authors_code_may_take_any_time_within_one_attempt[sqlite-body]",
    ),
    _m(
        "an author's transaction is taken for a pass that is stuck",
        (
            "runner.step_commit:Committer._commit_with_user_writes",
            "self._lease.enter_user_code(step_commit.writes[0].commit_id)",
            "pass",
        ),
        caught_by=_LEASES + "test_an_authors_transaction_may_take_any_time_within_one_attempt[postgresql]",
    ),
    _m(
        "a body that was left behind keeps the lease",
        ("runner.step_attempt:StepAttempt.abandon", "self._lease.exit_user_code(self)", "pass"),
        caught_by=_LEASES + "test_a_body_that_was_left_behind_keeps_no_lease[sqlite]",
    ),
    _m(
        "a pass that was stuck counts as a dead worker",
        (
            "runner.lease:_release_stalled",
            "releases.release(tx, lease.claim, guard_result, grace=timedelta(0), cooldown=cooldown)",
            "pass",
        ),
        caught_by=_LEASES + "test_a_pass_that_hangs_in_our_own_code_loses_its_claim_and_that_is_no_crash[sqlite]",
    ),
    _m(
        "the watchdog cuts what has ended",
        ("store.watchdog:WatchedSocket.disarm", "self._deadlines.pop()", "self._deadlines[0]"),
        caught_by="tests/store/test_watchdog.py::test_a_statement_that_has_ended_is_never_cut[postgresql]",
    ),
    _m(
        "a task waits for a silent database as loops do",
        ("operations.answers:AnswerOperations.accept", ", timeouts=DIRECT", ""),
        caught_by=_TASKS + "test_where_a_task_ends_nobody_waits_for_a_silent_database[postgresql]",
    ),
    _m(
        "a long poll has the time of one look",
        ("http.timeouts:pause", "limit.until = real_monotonic() + _DATABASE_SECONDS", "pass"),
        caught_by=_STREAM + "test_a_long_poll_may_wait_longer_than_requests_have[sqlite]",
    ),
    _m(
        "those who follow take the threads of all requests",
        (
            "http.timeouts:run_read",
            "_limiter(_read_threads, _READ_THREADS)",
            "_limiter(_request_threads, _REQUEST_THREADS)",
        ),
        caught_by=_STREAM + "test_followers_leave_the_threads_to_all_other_requests[sqlite]",
    ),
    # --- publishing -----------------------------------------------------------------------------
    _m(
        "a process forks while a connection is made",
        ("tasks.publishing.sender:Sender._open_transport", "with self.fork_lock:", "with contextlib.nullcontext():"),
        caught_by="tests/publishing/test_forks.py::test_no_child_is_forked_while_a_connection_is_made[redis]",
    ),
    _m(
        "a publisher waits for the sending thread without a limit",
        ("tasks.publishing.sender:Sender.run", "job.done.wait(seconds)", "job.done.wait()"),
        caught_by=_BOUNDS + "test_a_resolver_that_hangs_costs_one_caller_3_s_and_the_next_nothing[redis]",
    ),
    _m(
        "callers wait for a broker that is known to be away",
        (
            "tasks.publishing.circuit_breakers:CircuitBreakers.is_open",
            "record is not None and not record.has_answered_probe",
            "False",
        ),
        caught_by=_BOUNDS + "test_an_outage_of_the_outbox_is_bounded_too[redis]",
    ),
    _m(
        "what was written to Redis counts as sent before it answers",
        ("tasks.publishing.transports.redis:RedisTransport.send", "SendState.UNKNOWN", "SendState.SENT"),
        caught_by=_BOUNDS + "test_an_outage_of_the_outbox_is_bounded_too[redis]",
    ),
    _m(
        "what one queue of Redis refuses is the broker's failure",
        (
            "tasks.publishing.transports.redis:RedisTransport._refuse_or_raise",
            'if "WRONGTYPE" not in text and',
            "if True or",
        ),
        caught_by=_REFUSALS + "test_on_redis_each_refusal_stays_with_its_queue",
    ),
    _m(
        "RabbitMQ confirms what no queue takes",
        (
            "tasks.publishing.transports.amqp:AmqpTransport._write",
            "any(isinstance(entity, Queue) for entity in batch.declare)",
            "False",
        ),
        caught_by=_REFUSALS + "test_what_an_operator_deleted_is_declared_anew_and_no_message_is_lost[queue]",
    ),
    _m(
        "a message over the generic transport counts as sent before RabbitMQ confirms it",
        ("tasks.publishing.transports.generic:Transport._options", "if self._is_py_amqp else", "if False else"),
        caught_by=_REFUSALS + "test_the_generic_transport_reports_what_rabbitmq_has_not_taken_as_refused",
    ),
    _m(
        "an error of one channel ends the confirms of all",
        ("tasks.publishing.transports.amqp:AmqpTransport._read_confirms", " if each.channel.connection is None", ""),
        caught_by=_REFUSALS + "test_what_an_operator_deleted_is_declared_anew_and_no_message_is_lost[exchange]",
    ),
    _m(
        "a child of a fork sends what its parent was about to send",
        ("tasks.publishing.sender:Sender.reset_in_child", "self._reset()", "pass"),
        caught_by="tests/publishing/test_forks.py::"
        "test_a_child_publishes_whose_parent_was_handing_over_a_message[redis]",
    ),
    _m(
        "a child of a fork keeps its parent's templates",
        ("tasks.publishing.templates:Templates.clear", "self._templates = {}", "pass"),
        caught_by="tests/publishing/test_forks.py::test_a_childs_messages_name_the_child[redis]",
    ),
    _m(
        "an interrupted answer is not tried again",
        (
            "tasks.task_ends:_call_despite_soft_limit",
            "reference.ref)\n        return commit()",
            "reference.ref)\n        raise",
        ),
        caught_by="tests/celery/test_interrupted_answers.py",
    ),
    _m(
        "an acknowledged task that puts itself back is awaited",
        ("tasks.lost.held_tasks:is_requeued", " and task.acks_late", ""),
        caught_by=_ANSWERS + "test_ends_that_call_nothing_are_answered_too",
    ),
    _m(
        "a step's task subscribes to its result when it is sent",
        (
            "tasks.publishing.message_builder:MessageBuilder.build_outbox_messages",
            "prevent_result_subscription(self._app)",
            "pass",
        ),
        caught_by="tests/publishing/test_result_backends.py::"
        "test_a_redis_result_backend_that_refuses_does_not_keep_a_message_back",
    ),
    _m(
        "a step gets the error of the result backend",
        (
            "tasks.task_ends:TaskEndHandler._handle_internal_error",
            "_find_task_exception(exception)",
            "(exception.__context__ or exception)",
        ),
        caught_by=_ANSWERS + "test_a_result_backend_that_is_away_changes_nothing",
    ),
    _m(
        "a step gets the error that its task caught",
        ("tasks.task_ends:_find_task_exception", ".f_code.co_filename == trace.__file__", ""),
        caught_by=_ANSWERS + "test_a_result_backend_that_is_away_changes_nothing",
    ),
    _m(
        "a retry that is not stored fails its step",
        ("tasks.task_ends:TaskEndHandler._handle_internal_error", "not isinstance(error, Retry)", "True"),
        caught_by=_ANSWERS + "test_a_result_backend_that_is_away_changes_nothing",
    ),
    _m(
        "a result committed raw",
        ("tasks.task_ends:TaskEndHandler.commit_result", "commit_result(plain, ", "commit_result(result, "),
        caught_by=_ANSWERS + "test_a_result_is_the_same_committed_where_its_task_ran_or_sent",
    ),
    _m(
        "a cursor is good for any list",
        ("values.cursors:Cursors._compute_mac", "(inner + text,", "(text,"),
        caught_by="tests/values/test_cursors.py::test_what_another_list_has_written_is_refused",
    ),
    _m(
        "a cursor is good for any tenant",
        ("operations.context:OperationContext.cursors", "(*of, self.scope_text)", "of"),
        caught_by="tests/http/test_scope.py::test_a_cursor_is_good_for_the_tenant_it_was_given_to",
    ),
    _m(
        "the audit tells who did it whatever the hook hides",
        ("redaction:Redaction._redact_audit", 'self.redact_value(record.by, "by", record.step_key)', "record.by"),
        caught_by="tests/http/test_rewinding.py::test_the_audit_shows_no_text_that_may_not_be_shown",
    ),
    _m(
        "commands show log lines whatever the hook hides",
        ("cli.backends.stored:StoredLogTail.read_new_lines", "self._redaction.redact_log(line)", "line"),
        caught_by="tests/cli/test_redaction.py::test_no_command_that_reads_shows_what_is_hidden",
    ),
    _m(
        "a start can be put off for ever",
        ("operations.create:CreateOperations._insert", "start_at is not None and start_at - ", "False and start_at - "),
        caught_by="tests/engine/test_create.py::test_a_start_can_be_put_off_as_long_as_a_sleep_may_be",
    ),
)
