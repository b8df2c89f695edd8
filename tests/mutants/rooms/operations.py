"""Bugs in the operations, and in the HTTP and command-line programs above them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_STREAM = "tests/http/test_stream.py::"
_ORDER = "tests/pairs/test_order.py::test_rows_of_two_instances_are_locked_in_one_order"
_TASKS = "tests/engine/test_tasks.py::"
_DELIVER = "operations.topic_delivery:deliver_batch"

MUTANTS = (
    # --- commits in doubt -----------------------------------------------------------------------
    mutant(
        "a restart in doubt is done again",
        ("operations.rewind:RewindOperations._start_run", "find_committed=was_applied", "find_committed=None"),
    ),
    mutant(
        "an event in doubt is taken for sent",
        (
            "operations.events:_Sending.commit",
            "find_committed=self.find_committed",
            "find_committed=lambda tx: (True, [])",
        ),
    ),
    # --- events and waits -----------------------------------------------------------------------
    mutant(
        "an event does not wake who waits for it",
        ("operations.events:_Sending.insert", "and run_events.is_awaited(tx, row, self.type)", "and False"),
    ),
    # --- from outside ---------------------------------------------------------------------------
    mutant(
        "a retried linear step has lost its event",
        ("operations.continuations:_build_linear_from_failure", "event_seq=step.event_seq,", "event_seq=None,"),
        caught_by="tests/engine/test_linear_interventions.py::test_a_retried_step_is_called_with_the_event_that_it_had[sqlite]",
    ),
    mutant(
        "a retried linear step speaks under a new key",
        ("operations.continuations:_build_linear_from_failure", "retried=[step.step_key]", "retried=[]"),
        caught_by="tests/engine/test_linear_interventions.py::test_a_retried_run_can_be_retried_and_keeps_the_key_of_its_step[sqlite]",
    ),
    mutant(
        "a linear run begins ahead of where the other stands",
        ("operations.continuations:_build_linear_before", "current.seq < step.seq", "current.seq < 0"),
    ),
    # --- batches --------------------------------------------------------------------------------
    mutant(
        "of an id that is twice in a batch the last counts",
        (
            "operations.create:CreateOperations.batch",
            "new.setdefault(instance_id, NewInstance(instance_id, params, labels))",
            "new[instance_id] = NewInstance(instance_id, params, labels)",
        ),
    ),
    mutant(
        "a batch returns what existed before it",
        ("operations.create:CreateOperations.batch", "if key in created]", "]"),
    ),
    mutant(
        "a batch in doubt does not know what it created",
        (
            "operations.create:CreateOperations.batch",
            "find_committed=find_committed",
            "find_committed=None",
        ),
    ),
    mutant(
        "restart_or_create restarts what has not ended",
        ("operations.create:CreateOperations._insert_or_restart", "if row.status not in restartable:", "if False:"),
    ),
    mutant(
        "restart_or_create in doubt begins again",
        ("operations.create:CreateOperations.restart_or_create", "find_committed=was_applied", "find_committed=None"),
        caught_by="tests/engine/test_doubt.py::test_a_restart_or_create_in_doubt_tells_what_it_did[after-postgresql]",
    ),
    # --- interventions --------------------------------------------------------------------------
    mutant(
        "an intervention in doubt is done again",
        (
            "operations.interventions:InterventionOperations._intervene",
            "find_committed=was_applied",
            "find_committed=None",
        ),
    ),
    mutant(
        "a step that has ended is settled by hand",
        ("operations.interventions:InterventionOperations._take_over", "if step.is_finished or", "if False and"),
    ),
    mutant(
        "an intervention is not recorded",
        ("operations.interventions:_complete_step", "interventions.insert_audit_record(", "(lambda *_, **__: None)("),
    ),
    # --- topics ---------------------------------------------------------------------------------
    mutant(
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
            "return self._context.store.transact(work)",
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
    mutant(
        "an emission is over after its first batch",
        (_DELIVER, "is_over = len(batch) < BATCH", "is_over = True"),
    ),
    mutant(
        "an emission wakes nobody",
        (_DELIVER, "emissions.make_due(tx, woken, grace=grace)", "emissions.bump_versions(tx, woken)"),
        caught_by="tests/engine/test_topics.py::test_an_emission_ends_the_wait_of_everybody[sqlite]",
    ),
    # --- steps that others do -------------------------------------------------------------------
    mutant(
        "the termination of a child is told nobody",
        (
            "operations.lifecycle:LifecycleOperations.terminate",
            "answers.answer_parent(tx, parent, payload=payload, event_id=event_id, grace=grace)",
            "[]",
        ),
    ),
    # --- two transactions at once ---------------------------------------------------------------
    mutant(
        "the termination of a child locks the child before its parent",
        ("operations.lifecycle:LifecycleOperations.terminate", "answers.lock_parent(tx, parent)", "pass"),
        caught_by=_ORDER + "[postgresql-the termination of a child-parent first]",
    ),
    # --- leases and deadlines -------------------------------------------------------------------
    mutant(
        "a task waits for a silent database as loops do",
        ("operations.answers:AnswerOperations.accept", "DIRECT if is_direct else ORDINARY", "ORDINARY"),
        caught_by=_TASKS + "test_where_a_task_ends_nobody_waits_for_a_silent_database[postgresql]",
    ),
    mutant(
        "a long poll has the time of one look",
        ("http.timeouts:pause", "limit.until = real_monotonic() + _DATABASE_SECONDS", "pass"),
        caught_by=_STREAM + "test_a_long_poll_may_wait_longer_than_requests_have[sqlite]",
    ),
    mutant(
        "those who follow take the threads of all requests",
        (
            "http.timeouts:run_read",
            "_limiter(_read_threads, _READ_THREADS)",
            "_limiter(_request_threads, _REQUEST_THREADS)",
        ),
        caught_by=_STREAM + "test_followers_leave_the_threads_to_all_other_requests[sqlite]",
    ),
    # --- publishing -----------------------------------------------------------------------------
    mutant(
        "a cursor is good for any tenant",
        ("operations.context:OperationContext.cursors", "(*of, self.scope_text)", "of"),
        caught_by="tests/http/test_scope.py::test_a_cursor_is_good_for_the_tenant_it_was_given_to",
    ),
    mutant(
        "commands show log lines whatever the hook hides",
        (
            "cli.backends.stored:StoreBackend.tail",
            "self._redaction(ref).redact_log",
            "(lambda line: line)",
        ),
        caught_by="tests/cli/test_redaction.py::test_no_command_that_reads_shows_what_is_hidden",
    ),
    mutant(
        "a start can be put off for ever",
        ("operations.create:CreateOperations._insert", "start_at is not None and start_at - ", "False and start_at - "),
        caught_by="tests/engine/test_create.py::test_a_start_can_be_put_off_as_long_as_a_sleep_may_be",
    ),
)
