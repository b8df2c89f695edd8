# ruff: noqa: E501  # a line of code as the syntax tree spells it
"""The bugs that are planted, the gravest of each room.

A mutant is caught by the simulation, or by the test that is named with it, if only servers reach its code or the
simulation cannot tell it from the right one. ``old`` is found in the function as the syntax tree spells it
(`ast.unparse`): comments, line breaks and the style of quotes do not count.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "a failed attempt is not recorded",
        ("runner.commit_parts:FailedAttempts.write", "if not self.failures:", "if True:"),
    ),
    mutant(
        "a commit in doubt is taken for done",
        (
            "runner.committer:DatabaseCommitter.find_committed",
            "return None",
            "from celery_durable.model import StepRow\n\n    done = [\n        StepRow(w.key, w.seq, w.name, w.type, w.status, w.attempts, result=w.result, commit_id=w.commit_id)\n        for w in step_commit.writes\n    ]\n    return Committed(done, writes=step_commit.writes)",
        ),
    ),
    mutant(
        "a commit in doubt is taken for not done",
        ("runner.committer:DatabaseCommitter.find_committed", "if rows or (", "if ("),
    ),
    mutant(
        "an event is not marked as consumed",
        (
            "runner.waits:check_wait",
            "run_events.consume(tx, context.claim, guard_result, event, key=key)",
            "pass",
        ),
    ),
    mutant(
        "who is to hear of an end is not written down",
        (
            "runner.run_end:RunEnd.encode",
            "self._messages = self._build_messages(settings)",
            "return []",
        ),
    ),
    mutant(
        "an end is told before it is committed",
        (
            "runner.committer:DatabaseCommitter.commit",
            "transaction = None if attempt is None else attempt.buffer.transaction",
            "transaction = None if attempt is None else attempt.buffer.transaction\n    if isinstance(step_commit.ending, RunOutcome):\n        self.announce(Committed(run_outcome=step_commit.ending))",
        ),
    ),
    mutant(
        "a child that failed is taken for done",
        (
            "values.answers:encode_child_answer",
            "case Status.COMPLETE:",
            "case Status.COMPLETE | Status.ERRORED:",
        ),
    ),
    mutant(
        "a group does not check the claims of its steps",
        (
            "store.lanes.groups:_build_locked",
            "i.c.id == given.c.pk, i.c.claim_token == given.c.token",
            "i.c.id == given.c.pk",
        ),
        caught_by="tests/store/lanes/test_groups.py::test_a_lost_claim_is_left_alone_and_the_others_are_written[postgresql]",
    ),
    mutant(
        "a step that its group did not write counts as committed",
        ("runner.group_commit:GroupCommit.commit", "waiting.written is None", "False"),
        caught_by="tests/runner/test_group_commit.py::test_a_lost_claim_supersedes_only_its_own_pass[postgresql]",
    ),
    mutant(
        "a gather runs finished siblings again",
        (
            "runner.replay:ReplayContext._advance",
            "[execution for execution in executions if execution.finished_row is None]",
            "list(executions)",
        ),
        ("replay_state:ReplayState.decide_do", "row.is_finished", "row.is_finished and is_only_open"),
    ),
    mutant(
        "a step is called again though the end of its attempt is unknown",
        ("replay_state:ReplayState.decide_do", "not may_repeat or max_attempts == 1", "max_attempts == 1"),
    ),
    mutant(
        "a worker that stops does not report the unknown end of its attempt",
        ("runner.attempts:Attempts.record_interrupted", "list(self._unrecorded.values())", "()"),
    ),
    mutant(
        "a step whose transaction was lost is called again though its end is unknown",
        ("runner.attempts:Attempts._finish", "if not step.may_repeat:", "if False:"),
        caught_by="tests/runner/test_lost_attempts.py::test_a_commit_that_was_cut_is_looked_up_and_the_function_is_not_called_again[postgresql-before]",
    ),
    mutant(
        "a race leaves its losers open",
        (
            "runner.execution_context:ExecutionContext.build_race_end",
            "return [race_write, *(self._build_loser(branch, commit_id) for branch in losers)]",
            "return [race_write]",
        ),
    ),
    mutant(
        "a linear wait is over when it is next looked at",
        ("runner.linear_pass:LinearPass._check_wait", "if due_at <= guard_result.now else []", "if True else []"),
    ),
    mutant(
        "a task that is to be sent again waits for the answer that it had",
        ("remote.steps:_build_task_wait", ", 'event_type': None}", "}"),
    ),
    mutant(
        "the renewer renews once per lease",
        ("runner.lease_renewer:LeaseRenewer.__init__", "length.total_seconds() / 3", "length.total_seconds()"),
        caught_by="tests/runner/test_leases.py::test_a_lease_is_renewed_every_third_of_its_length[sqlite]",
    ),
    mutant(
        "a renewal is believed from after the answer",
        (
            "runner.lease_renewer:LeaseRenewer._renew",
            "lease.extend(requested_at=requested_at)",
            "lease.extend(requested_at=self._runtime.monotonic())",
        ),
        caught_by="tests/runner/test_leases.py::test_a_renewal_counts_from_before_it_was_asked_for[the renewer-sqlite]",
    ),
    mutant(
        "a worker begins a body though it knows that its lease is lost",
        (
            "runner.attempts:Attempts.run",
            "if not self._lease.is_valid:",
            "if not self._lease.is_valid and not self._lease.is_lost:",
        ),
        ("runner.lease:Lease.ensure_held", "if self.is_lost:", "if False:"),
        caught_by="tests/runner/test_leases.py::test_a_worker_that_knows_its_lease_is_lost_begins_no_body[sqlite]",
    ),
    mutant(
        "the guard has no fence",
        ("store.runs.claims:guard_update", ", i.c.claim_token == param('token', type_=sa.String)", ""),
    ),
    mutant(
        "settling has no fence",
        ("store.runs.releases:_end", ", i.c.claim_token == param('token', type_=sa.String)", ""),
    ),
    mutant(
        "the fused step has no fence",
        (
            "store.lanes.steps:_hold",
            "guard_update(s)",
            'sa.update(i).where(i.c.id == param("pk", sa.BigInteger)).values(lease_until=s.clock() + param("lease_us", sa.BigInteger), version=i.c.version + 1, crash_count=0)',
        ),
        caught_by="tests/store/runs/test_claims.py::test_a_superseded_worker_changes_nothing[postgresql-restarted]",
    ),
    mutant(
        "the guard of an added step has no fence",
        ("store.runs.claims:lock_held", ", i.claim_token == param('token', sa.String)", ""),
        caught_by="tests/store/runs/test_claims.py::test_a_superseded_worker_changes_nothing[postgresql-restarted]",
    ),
    mutant(
        "the time of an added step is read before the lock",
        (
            "store.lanes.steps:hold_without_change",
            "i.pause_requested).where(*conditions).cte('locked')",
            'i.pause_requested, s.clock().label("now_us")).where(*conditions).cte("held")\n    return locked',
        ),
        caught_by="tests/store/runs/test_guards.py::test_the_time_of_its_step_is_that_after_the_wait[postgresql]",
    ),
    mutant(
        "a restart keeps the token",
        ("store.instances.lifecycle:start_run", "**RELEASED,", ""),
    ),
    mutant(
        "terminating keeps the claim",
        ("store.instances.lifecycle:terminate", "**RELEASED,", ""),
    ),
    mutant(
        "a takeover keeps the old token",
        (
            "store.runs.claims:_take_over",
            "*new_values(s).items()",
            '*[each for each in new_values(s).items() if each[0].name != "claim_token"]',
        ),
    ),
    mutant(
        "a renewal asks for no token",
        ("store.runs.leases:_are_held", "i.claim_token.in_(tokens)", "sa.true()"),
    ),
    mutant(
        "a claim ignores the lease of another",
        (
            "store.runs.claims:_claimable",
            "sa.and_(i.claim_token.is_not(None), i.lease_until <= now)",
            "i.claim_token.is_not(None)",
        ),
    ),
    mutant(
        "a claim ignores the time at which the run is due",
        (
            "store.runs.claims:_claimable",
            "sa.and_(i.claim_token.is_(None), i.run_at <= now)",
            "i.claim_token.is_(None)",
        ),
    ),
    mutant(
        "a takeover records no crash",
        ("store.runs.claims:take_over", "attempts.record_crash(", "(lambda *_, **__: None)("),
    ),
    mutant(
        "the release of a dead claim records no crash",
        ("store.runs.sweeps:_release_crashed", "attempts.record_crash(", "(lambda *_, **__: None)("),
    ),
    mutant(
        "the sweep ignores expired leases",
        (
            "store.runs.sweeps:_process_rows",
            "elif not may_expire and row.dispatch_count < _EXPIRY_CHECKS:",
            "elif True:",
        ),
    ),
    mutant(
        "an event at the deadline is too late",
        (
            "store.events.run_events:_select_oldest_event",
            "e.created_at <= param('deadline_us')",
            'e.created_at < param("deadline_us")',
        ),
    ),
    mutant(
        "the newest event is consumed first",
        ("store.events.run_events:_select_oldest_event", ".order_by(e.seq)", ".order_by(e.seq.desc())"),
    ),
    mutant(
        "an event that came before the suspension is not seen",
        ("store.runs.releases:suspend", "_has_event_for(tx, claim, waits) or ", ""),
        caught_by="tests/store/runs/test_claims.py::test_an_event_sent_before_the_suspension_leaves_the_instance_due[sqlite]",
    ),
    mutant(
        "a resumed instance is not made due",
        (
            "store.instances.lifecycle:resume",
            "return make_due(tx, row, wake_reason=WakeReason.RESUME, grace=grace)",
            "_update(tx, row, status=Status.ACTIVE.value)",
        ),
    ),
    mutant(
        "a rewind leaves all events consumed",
        ("store.runs.runs:_copy_rows", "values[name] = sa.case((is_kept, e.c[name]))", "values[name] = e.c[name]"),
    ),
    mutant(
        "what was found to be over is deleted without another look",
        ("store.instances.retention:_delete", ".where(i.c.id.in_(found), *conditions)", ".where(i.c.id.in_(found))"),
        caught_by="tests/operations/test_retention.py::test_what_is_restarted_between_the_search_and_the_lock_is_kept[expired-postgresql]",
    ),
    mutant(
        "an outbound event is not forgotten when it was handled",
        (
            "store.runs.outbox:finish_delivery",
            "sa.delete(o).where(o.c.id == delivery.id, o.c.claim_token == delivery.token)",
            "sa.update(o).where(o.c.id == delivery.id).values(claim_token=None, run_at=tx.store.clock())",
        ),
    ),
    mutant(
        "a delivery removes an outbound event that another delivery has taken over",
        ("store.runs.outbox:finish_delivery", ", o.c.claim_token == delivery.token", ""),
        caught_by="tests/store/runs/test_outbox.py::test_a_worker_that_ends_while_another_takes_over_ends_nothing[finish-postgresql]",
    ),
    mutant(
        "the failed attempt of a task is not recorded",
        ("store.events.answers:accept_answer", "if failure is not None and", "if False and"),
    ),
    mutant(
        "an answer is taken that nobody waits for",
        ("store.events.answers:store_answer", "row.status.is_terminal or not is_unanswered", "row.status.is_terminal"),
    ),
    mutant(
        "an answer counts only while its instance sleeps",
        ("store.events.answers:store_answer", "row.status.is_terminal", "row.status.value != 'waiting'"),
    ),
    mutant(
        "no run is woken when the last item has failed for good",
        (
            "store.events.answers:_answer_item",
            " or (work == NOTHING_SENT and items.are_all_finished(tx, *step_key))",
            "",
        ),
        caught_by="tests/step/test_maps.py::test_failures_may_be_wanted",
    ),
    mutant(
        "a map sends all that it has",
        ("store.runs.items:find_ready", "_MAX_INTEGER if limit is None else limit", "_MAX_INTEGER"),
        caught_by="tests/step/test_maps.py::test_so_many_are_out_at_a_time[sqlite]",
    ),
    mutant(
        "the statement of an event overlooks the wait that began while it waited",
        ("store.lanes.sent_events:_insert_and_wake", ", i.c.version == seen.c.version", ""),
        caught_by="tests/store/lanes/test_sent_events.py::test_it_does_not_overlook_the_wait_that_began_meanwhile[postgresql]",
    ),
    mutant(
        "the watchdog cuts what has ended",
        ("store.watchdog:WatchedSocket.disarm", "self._deadlines.pop()", "self._deadlines[0]"),
        caught_by="tests/store/test_watchdog.py::test_a_statement_that_has_ended_is_never_cut[postgresql]",
    ),
    mutant(
        "an answer is neither taken nor sent anew but acknowledged",
        ("tasks:_commit_or_resend", "_send_answer(task, answers, message)", "pass"),
        caught_by="tests/tasks/test_answers.py::test_an_answer_waits_in_the_broker_while_the_database_does_not_take_it[sqlite]",
    ),
    mutant(
        "an answer for another database is committed to this one",
        (
            "tasks.answers:AnswerCommitter.is_awaited_here",
            "self.operations().find_database_id() == reference.database_id",
            "True",
        ),
        caught_by="tests/tasks/test_answers.py::test_a_task_of_another_database_answers_by_message[sqlite]",
    ),
    mutant(
        "a task that ends without a callback answers nobody",
        (
            "tasks.task_ends:TaskEndHandler._handle_postrun",
            "self.commit_or_send_error(encode_exception(retval), raw_reference)",
            "pass",
        ),
        caught_by="tests/tasks/test_answers.py::test_ends_that_call_nothing_are_answered_too[sqlite]",
    ),
    mutant(
        "what was written to Redis counts as sent before it answers",
        ("tasks.publishing.transports.redis:RedisTransport.send", "SendState.UNKNOWN", "SendState.SENT"),
        caught_by="tests/tasks/publishing/test_bounds.py::test_an_outage_of_the_outbox_is_bounded_too[redis]",
    ),
    mutant(
        "a message over the generic transport counts as sent before RabbitMQ confirms it",
        ("tasks.publishing.transports.generic:Transport._options", "if self._is_py_amqp else", "if False else"),
        caught_by="tests/tasks/publishing/test_refusals.py::test_the_generic_transport_reports_what_rabbitmq_has_not_taken_as_refused",
    ),
    mutant(
        "an error of one channel ends the confirms of all",
        ("tasks.publishing.transports.amqp:AmqpTransport._read_confirms", " if each.channel.connection is None", ""),
        caught_by="tests/tasks/publishing/test_refusals.py::test_what_an_operator_deleted_is_declared_anew_and_no_message_is_lost[exchange]",
    ),
    mutant(
        "a batch returns what existed before it",
        ("operations.create:CreateOperations.batch", "if key in created]", "]"),
    ),
    mutant(
        "an emission is over after its first batch",
        ("operations.topics:deliver_batch", "is_over = len(batch) < BATCH", "is_over = True"),
    ),
    mutant(
        "the termination of a child is told nobody",
        (
            "operations.lifecycle:_Stop._end",
            "if parent is None:",
            "if True:",
        ),
    ),
    mutant(
        "Cancelled is raised at a second call",
        (
            "runner.execution_context:ExecutionContext.__init__",
            "if any((row.is_cancelled for row in replay_state.rows.values())):",
            "if False:",
        ),
    ),
    mutant(
        "a cancelled run whose worker dies is paused",
        (
            "store.runs.sweeps:_release_crashed",
            "row.pause_requested and (not runs.is_cancel_requested(tx, row.id, row.run_number))",
            "row.pause_requested",
        ),
    ),
    mutant(
        "a sleep ends when it is next looked at",
        ("replay_state:ReplayState.decide_timer", "if row.wake_at <= now", "if True"),
    ),
    mutant(
        "a rewind copies its target too",
        ("ancestry:select_rows_before", "row.seq < seq", "row.seq <= seq"),
    ),
    mutant(
        "all attempts of a task have the same answers",
        ("model.states:task_event_type", "{attempt}", "1"),
        ("store.runs.items:mark_task_as_sent", "task_id(event_type, ", 'task_id(f"{event_type}{attempt}", '),
    ),
    mutant(
        "a task that failed is sent again at once",
        ("replay_state:ReplayState.decide_remote", "if row.next_retry_at > now", "if False"),
        (
            "store.runs.claims:_claimable",
            "sa.and_(i.claim_token.is_(None), i.run_at <= now)",
            "i.claim_token.is_(None)",
        ),
    ),
)
