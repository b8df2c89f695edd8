"""Bugs in the store: instances, runs, steps, events and the outbox."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_REPLAYED = "st.status == StepStatus.WAITING.value"
_MAPS = "tests/engine/test_maps.py::"
_OUTBOX = "tests/store/test_outbox.py::"
_PAIR = "tests/pairs/test_pairs.py::test_two_concurrent_operations_lose_nothing_and_repeat_nothing"

MUTANTS = (
    # --- since when, and for how long ---------------------------------------------------------------
    mutant(
        "a linear step waits since its run was created",
        (
            "store.overview:_to_wait",
            "row.created_at if row.started_at is None else row.started_at",
            "row.created_at",
        ),
        caught_by="tests/engine/test_linear.py::"
        "test_a_linear_step_is_listed_as_waiting_since_its_handler_was_called[sqlite]",
    ),
    mutant(
        "what is written late comes before the known agenda",
        ("store.schedule:_search_from", " - _MAX_DELAY", ""),
        caught_by="tests/store/test_agenda.py::test_a_known_agenda_is_read_again_as_the_complete_one[sqlite]",
    ),
    # --- the fence ------------------------------------------------------------------------------
    mutant(
        "the guard has no fence",
        ("store.claims:guard_update", ', i.c.claim_token == param("token", type_=sa.String)', ""),
    ),
    mutant(
        "settling has no fence", ("store.releases:_end", ', i.c.claim_token == param("token", type_=sa.String)', "")
    ),
    mutant(
        "the fused step has no fence",
        (
            "store.step_rows:_hold",
            "guard_update(s)",
            'sa.update(i).where(i.c.id == param("pk", sa.BigInteger)).values(lease_until=s.clock() + '
            'param("lease_us", sa.BigInteger), version=i.c.version + 1, crash_count=0)',
        ),
        caught_by="tests/store/test_claims.py::test_a_superseded_worker_changes_nothing[postgresql-restarted]",
    ),
    mutant(
        "the guard of an added step has no fence",
        ("store.claims:lock_held", ', i.claim_token == param("token", sa.String)', ""),
        caught_by="tests/store/test_claims.py::test_a_superseded_worker_changes_nothing[postgresql-restarted]",
    ),
    mutant(
        "the time of an added step is read before the lock",
        (
            "store.step_rows:hold_without_change",
            """i.pause_requested).cte("locked")""",
            """i.pause_requested, s.clock().label("now_us")).cte("held")\n    return locked""",
        ),
        caught_by="tests/store/test_guards.py::test_the_time_of_its_step_is_that_after_the_wait[postgresql]",
    ),
    mutant(
        "a delayed statement logs although its row has changed",
        (
            "store.step_rows:_guard_and_update",
            "insert_with(s, held, both, log_lines)",
            "insert_with(s, held, held, log_lines)",
        ),
        caught_by="tests/store/test_step_logs.py"
        "::test_a_delayed_statement_for_a_row_that_has_changed_logs_nothing[postgresql]",
    ),
    mutant("a restart keeps the token", ("store.lifecycle:restart", "**RELEASED,", "")),
    mutant("terminating keeps the claim", ("store.lifecycle:terminate", "**RELEASED,", "")),
    mutant(
        "a takeover keeps the old token",
        (
            "store.takeovers:_take_over",
            "*claims.new_values(s).items()",
            '*[each for each in claims.new_values(s).items() if each[0].name != "claim_token"]',
        ),
    ),
    mutant(
        "a renewal asks for no token",
        ("store.leases:_are_held", "i.claim_token.in_(tokens)", "sa.true()"),
    ),
    # --- the claim ------------------------------------------------------------------------------
    mutant(
        "a claim ignores the lease of another",
        (
            "store.claims:_claimable",
            "sa.and_(i.claim_token.is_not(None), i.lease_until <= now)",
            "i.claim_token.is_not(None)",
        ),
    ),
    mutant(
        "a claim ignores the time at which the run is due",
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    mutant("a claim ignores the number of the run", ("store.claims:_claimable", 'i.run_number == param("run"),', "")),
    mutant(
        "crashes are not counted",
        ("store.takeovers:_take_over", "i.c.crash_count + 1", "i.c.crash_count"),
        ("store.sweeps:_release_crashed", "row.crash_count + 1", "row.crash_count"),
    ),
    mutant(
        "a claim overwrites an expired one before anything has read it",
        ("store.claims:claim_run", "is_unclaimed = i.c.claim_token.is_(None)", "is_unclaimed = sa.true()"),
    ),
    mutant(
        "a takeover records no crash",
        ("store.takeovers:take_over", "attempts.record_crash(", "(lambda *_, **__: None)("),
    ),
    mutant(
        "the release of a dead claim records no crash",
        ("store.sweeps:_release_crashed", "attempts.record_crash(", "(lambda *_, **__: None)("),
    ),
    # --- the sweep ------------------------------------------------------------------------------
    mutant(
        "the sweep ignores expired leases",
        ("store.sweeps:_process_rows", "elif not may_expire and row.dispatch_count < _EXPIRY_CHECKS:", "elif True:"),
    ),
    mutant(
        "a claim of just now makes the hints before it lost",
        ("store.queues:read_claimed", "row.recorded_at <= row.now_us - duration_us(SLACK)", "True"),
        caught_by="tests/store/test_queues.py::test_a_dispatch_message_counts_as_claimed_after_three_seconds[sqlite]",
    ),
    mutant(
        "the sweep releases live leases",
        ("store.sweeps:_process_rows", "if ends > now:", "if False:"),
    ),
    # --- events and waits -----------------------------------------------------------------------
    mutant(
        "an event at the deadline is too late",
        (
            "store.run_events:_select_oldest_event",
            'e.created_at <= param("deadline_us")',
            'e.created_at < param("deadline_us")',
        ),
    ),
    mutant(
        "the newest event is consumed first",
        ("store.run_events:_select_oldest_event", ".order_by(e.seq)", ".order_by(e.seq.desc())"),
    ),
    mutant(
        "an event that came before the suspension is not seen",
        ("store.releases:suspend", "_has_event_for(tx, claim, waits) or ", ""),
        # Seen by the simulation too, but in one schedule of two thousand.
        caught_by="tests/store/test_claims.py::test_an_event_sent_before_the_suspension_leaves_the_instance_due[sqlite]",
    ),
    mutant(
        "a suspended run wakes for the first of its waits, not the earliest",
        ("store.releases:suspend", "min(wait.due_at for wait in waits)", "waits[0].due_at"),
    ),
    # --- from outside ---------------------------------------------------------------------------
    mutant(
        "a resumed instance is not made due",
        (
            "store.lifecycle:resume",
            "return make_due(tx, row, wake_reason=WakeReason.RESUME, grace=grace)",
            "_update(tx, row, status=Status.ACTIVE.value)",
        ),
    ),
    mutant(
        "a pause ignores who works on it", ("store.lifecycle:pause", "if row.claim_token is not None:", "if False:")
    ),
    mutant(
        "a restart takes the events along",
        (
            "store.lifecycle:restart",
            "    return DueRun(",
            "    if continuation is None:  # a rewind copies them by itself\n"
            "        e = tx.t.event\n"
            "        old = sa.and_(e.c.instance_pk == row.pk, e.c.run_number == row.run_number)\n"
            "        tx.execute(sa.update(e).where(old).values(run_number=number))\n"
            "    return DueRun(",
        ),
    ),
    mutant(
        "a rewind leaves all events consumed",
        ("store.runs:_copy_rows", "values[name] = sa.case((is_kept, e.c[name]))", "values[name] = e.c[name]"),
    ),
    mutant(
        "a linear step that is settled leaves the next one where it was",
        ("store.interventions:complete_linear_step", "(step.seq + 1,", "(step.seq - 1,"),
        caught_by="tests/engine/test_linear_interventions.py::test_a_handler_in_flight_changes_nothing_after_its_step_was_settled[sqlite]",
    ),
    mutant(
        "a step is settled by hand under its runner",
        ("store.lifecycle:reclaim", "**RELEASED,", ""),
        caught_by="tests/engine/test_interventions.py::"
        "test_a_runner_in_flight_changes_nothing_after_its_step_was_settled[sqlite]",
    ),
    # --- retention ------------------------------------------------------------------------------
    mutant(
        "an instance that ends is kept without end",
        ("store.releases:_end", "retention_until=s.clock() + i.c.retention_us,", ""),
        caught_by="tests/engine/test_retention.py::"
        "test_an_ended_instance_is_deleted_when_its_retention_is_over_with_all_its_runs[sqlite]",
    ),
    mutant(
        "a restarted instance is deleted when its last run would have been",
        ("store.lifecycle:restart", "retention_until=None,", ""),
        ("store.retention:_is_expired", ", has_ended]", "]"),
        caught_by="tests/engine/test_retention.py::"
        "test_an_ended_instance_is_deleted_when_its_retention_is_over_with_all_its_runs[sqlite]",
    ),
    mutant(
        "what was found to be over is deleted without another look",
        ("store.retention:_delete", ".where(i.c.id.in_(found), *conditions)", ".where(i.c.id.in_(found))"),
        caught_by="tests/engine/test_retention.py::"
        "test_what_is_restarted_between_the_search_and_the_lock_is_kept[expired-postgresql]",
    ),
    mutant(
        "instances are pruned by the age of their creation",
        (
            "store.retention:_build_examined",
            "c.completed_at <= _latest_end(tx, age)",
            "c.created_at <= _latest_end(tx, age)",
        ),
        caught_by="tests/engine/test_retention.py::test_what_began_long_ago_and_ended_just_now_is_not_pruned[sqlite]",
    ),
    mutant(
        "retention counts from the creation",
        (
            "store.releases:_end",
            "retention_until=s.clock() + i.c.retention_us,",
            "retention_until=i.c.created_at + i.c.retention_us,",
        ),
    ),
    mutant(
        "a terminated instance is kept without end",
        ("store.lifecycle:terminate", "retention_until=tx.store.clock() + tx.t.instance.c.retention_us,", ""),
    ),
    mutant(
        "pruning deletes ends that it was not asked to delete",
        (
            "store.retention:EndedFilter.conditions",
            "i.status.in_(sorted(status.value for status in self.statuses)),",
            "",
        ),
        caught_by="tests/engine/test_retention.py::test_pruning_deletes_what_ended_long_ago_and_nothing_else[sqlite]",
    ),
    mutant(
        "labels stay when their instance is deleted",
        (
            "store.retention:_delete",
            'if "instance_pk" in table.c:',
            'if "instance_pk" in table.c and table is not tx.t.label:',
        ),
    ),
    mutant(
        "what an instance has sent is deleted with it",
        ("store.retention:_delete", "[table.c.next_check_at.is_(None)] if table is tx.t.outbox else []", "[]"),
    ),
    # --- labels and hooks -----------------------------------------------------------------------
    mutant("a label keeps its first value", ("store.labels:merge", "and old[name] != value", "and False")),
    mutant(
        "a label is never taken away", ("store.labels:merge", "for name in old if name not in new", "for name in ()")
    ),
    mutant(
        "a page of waiters skips the other waits of its last instance",
        ("store.topic_waits:read_page", "w.c.step_key > key", "sa.false()"),
        caught_by="tests/engine/test_topics.py::test_a_page_of_waiters_ends_between_two_waits_of_one_instance[sqlite]",
    ),
    # --- ends and branches ----------------------------------------------------------------------
    mutant(
        "settling leaves the times of the next sweep",
        ("store.releases:_end", "run_at=None,", ""),
        ("store.releases:_end", "next_check_at=None,", ""),
    ),
    mutant(
        "progress does not clear the count of crashes",
        (
            "store.claims:guard_update",
            'crash_count=sa.case((param("resets_crash_count", type_=sa.Boolean), 0), else_=i.c.crash_count),',
            "",
        ),
    ),
    # --- published values -----------------------------------------------------------------------
    mutant(
        "publishing has no fence",
        ("store.claims:_guard_without_renewal", ', i.c.claim_token == param("token", type_=sa.String)', ""),
        caught_by="tests/engine/test_publish.py::"
        "test_a_worker_that_has_lost_its_claim_writes_nothing_and_stops[in a body-sqlite]",
    ),
    # --- linear workflows -----------------------------------------------------------------------
    mutant(
        "an event does not wake a linear step",
        (
            "store.run_events:build_open_wait",
            "st.status.in_([sa.literal_column(f\"'{status}'\") for status in _WAITING])",
            _REPLAYED,
        ),
    ),
    # --- topics ---------------------------------------------------------------------------------
    mutant(
        "an emission is for waits that began after it",
        ("store.emissions:_select_waits", ", w.c.opened_at <= to_us(emission.created_at)", ""),
        caught_by="tests/engine/test_topics.py::"
        "test_a_wait_that_begins_while_an_emission_is_under_way_does_not_get_it[sqlite]",
    ),
    mutant(
        "an emission whose emitter died is left as it is",
        ("store.emissions:_select_abandoned", "e.next_check_at <= s.statement_clock()", "e.next_check_at < 0"),
    ),
    mutant(
        "a rewind takes along what was emitted to waits that it opens anew",
        ("store.runs:_copy_rows", ", sa.or_(is_kept, e.c.type.not_like(PRIVATE_TYPE_PATTERN))", ""),
        caught_by="tests/engine/test_topics.py::test_what_was_emitted_is_not_for_a_wait_that_a_rewind_opens_anew[sqlite]",
    ),
    # --- maps -----------------------------------------------------------------------------------
    mutant(
        "what came while a map was about to sleep is not seen",
        (
            "store.releases:suspend",
            "items.read_map_state(tx, wait.map_step, now=guard_result.now).needs_pass(wait.map_step.max_concurrency)",
            "False",
        ),
        caught_by="tests/store/test_claims.py::"
        "test_a_wait_for_a_map_checks_its_items_under_the_lock[sqlite-bodies0-ReleaseOutcome.DUE]",
    ),
    mutant(
        "a run that goes on beyond a map has no items",
        ("store.runs:copy_steps", "(tx.t.step, tx.t.item)", "(tx.t.step,)"),
        caught_by=_MAPS + "test_a_rewind_beyond_a_map_keeps_its_results[sqlite]",
    ),
    mutant(
        "a retry does all items again",
        (
            "store.runs:_copy_rows",
            "_copy(tx, tx.t.item, continuation, continuation.retried, is_done, pk=pk, run_number=run_number)",
            "pass",
        ),
        caught_by=_MAPS + "test_a_retry_does_again_only_what_failed[sqlite]",
    ),
    # --- the outbox -----------------------------------------------------------------------------
    mutant(
        "an outbound event is not forgotten when it was handled",
        (
            "store.outbox:finish_delivery",
            "sa.delete(o).where(o.c.id == delivery.id, o.c.claim_token == delivery.token)",
            "sa.update(o).where(o.c.id == delivery.id).values(claim_token=None, run_at=tx.store.clock())",
        ),
    ),
    # --- two transactions at once ---------------------------------------------------------------
    mutant(
        "a claim takes a run with steps for a new one",
        (
            "store.claims:new_run_columns",
            "i.version == sa.literal_column(str(FIRST_VERSION + 1)),",
            "",
        ),
        caught_by="tests/store/test_new_runs.py::test_a_claim_does_not_read_a_run_that_has_steps_already[postgresql]",
    ),
    mutant(
        "a claim is looked up by the index that others lock first",
        (
            "store.claims:_read_claimed",
            'i.instance_id == param("instance"))',
            'i.instance_id == param("instance")).with_for_update(key_share=True)',
        ),
        caught_by=_PAIR + "[mariadb-claim, held at its lock, commits before send_event]",
    ),
    # --- outbound events ------------------------------------------------------------------------
    mutant(
        "a delivery removes an outbound event that another delivery has taken over",
        ("store.outbox:finish_delivery", ", o.c.claim_token == delivery.token", ""),
        caught_by=_OUTBOX + "test_a_worker_that_ends_while_another_takes_over_ends_nothing[finish-postgresql]",
    ),
    mutant(
        "a delivery releases an outbound event that another delivery has taken over",
        ("store.outbox:release_delivery", ", o.c.claim_token == delivery.token", ""),
        caught_by=_OUTBOX + "test_a_worker_that_ends_while_another_takes_over_ends_nothing[give_back-mariadb]",
    ),
    mutant(
        "an outbound event is taken although another delivery has it",
        ("store.outbox:_begin_delivery", "o.c.run_at <= now,", ""),
        caught_by=_OUTBOX + "test_of_two_workers_at_once_one_gets_the_event[commits-postgresql]",
    ),
    mutant(
        "an outbound event is free again for the dispatcher alone when its worker dies",
        ("store.outbox:_begin_delivery", "run_at=until, next_check_at=until", "next_check_at=until"),
        caught_by=_OUTBOX + "test_only_one_worker_delivers_an_event[sqlite]",
    ),
    mutant(
        "anybody finds the delivery that another began",
        ("store.outbox:_find_delivery", ', o.c.claim_token == param("token", sa.String)', ""),
        caught_by=_OUTBOX + "test_only_the_token_that_began_finds_its_delivery[sqlite]",
    ),
    mutant(
        "two dispatchers take the same messages",
        ("store.outbox:_select_due", ".with_for_update(skip_locked=True)", ""),
        caught_by=_OUTBOX + "test_two_sweeps_at_once_take_different_messages[commits-postgresql]",
    ),
)
