"""Bugs in the commits of steps and runs: `runner.step_commit` and what a commit writes."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_LET_GO = "runner.step_commit:Committer.release"
_WAIT = "runner.step_commit:Committer.commit_wait"
_ORDER = "tests/pairs/test_order.py::test_rows_of_two_instances_are_locked_in_one_order"
_PAIR = "tests/pairs/test_pairs.py::test_two_concurrent_operations_lose_nothing_and_repeat_nothing"
_LEASES = "tests/engine/test_leases.py::"
_SETTLE = "runner.step_commit:Committer.end_run"
_IN_ORDER = "runner.step_commit:Committer._write_in_lock_order"

MUTANTS = (
    # --- the fence ------------------------------------------------------------------------------
    mutant(
        "letting go has no fence",
        (
            _LET_GO,
            "claims.guard(tx, self.claim, ",
            "(lambda *_, **__: claims.GuardResult(self.claim.claimed_at, False))(",
        ),
        ("store.releases:_release", ', i.c.claim_token == param("token")', ""),
    ),
    # --- commits in doubt -----------------------------------------------------------------------
    mutant(
        "a commit in doubt is taken for done",
        (
            "runner.step_commit:Committer._build_find_committed",
            "return None",
            "return Committed([step_rows.to_written_row(w, (0, 0, 0, None, 0)) for w in step_commit.writes])",
        ),
    ),
    mutant(
        "a commit in doubt is taken for not done",
        (
            "runner.step_commit:Committer._build_find_committed",
            "if len(found) == len(step_commit.writes)",
            "if len(found) < 0",
        ),
    ),
    # --- events and waits -----------------------------------------------------------------------
    mutant(
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
    mutant(
        "an event is not marked as consumed",
        (_WAIT, "run_events.consume(tx, self.claim, guard_result, event, key=key)", "pass"),
    ),
    # --- labels and hooks -----------------------------------------------------------------------
    mutant(
        "who is to hear of an end is not written down",
        ("runner.step_commit:Committer._insert_messages", "outbox.insert(", "(lambda *_, **__: None)("),
    ),
    mutant(
        "an end is told before it is committed",
        (
            "runner.step_commit:Committer._commit_end",
            "ended = self._store.transact(",
            "on_committed(); ended = self._store.transact(",
        ),
    ),
    # --- ends and branches ----------------------------------------------------------------------
    mutant(
        "who is told of an end is not in its transaction",
        (_SETTLE, "self._insert_messages(tx, messages)", "None"),
        caught_by="tests/engine/test_endings.py::"
        "test_what_the_broker_did_not_take_at_the_end_is_sent_by_a_sweep[sqlite]",
    ),
    # --- published values -----------------------------------------------------------------------
    mutant(
        "letting go forgets what is kept",
        (_LET_GO, "self.published.flush(tx)", "pass"),
        caught_by="tests/engine/test_publish.py::"
        "test_the_last_value_of_a_tight_loop_is_written_with_what_comes_next[a pause-sqlite]",
    ),
    # --- linear workflows -----------------------------------------------------------------------
    mutant(
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
    # --- topics ---------------------------------------------------------------------------------
    mutant(
        "a wait on a topic is not written down",
        (_WAIT, "topic_waits.open_wait(tx, self.claim, guard_result, key=key, topic=topic)", "pass"),
    ),
    mutant(
        "what a step emits is lost",
        ("runner.step_commit:Committer._write_in_lock_order", "self._effects.emit(tx, step_commit.emissions)", "pass"),
    ),
    # --- steps that others do -------------------------------------------------------------------
    mutant(
        "the end of a child is told nobody",
        (_SETTLE, "_EndResult(self._answer_parent(tx, run_outcome))", "_EndResult([])"),
    ),
    mutant(
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
    mutant(
        "the end of a linear child is told nobody",
        (
            "runner.step_commit:Committer._write_in_lock_order",
            "due_runs += self._answer_parent(tx, step_commit.run_outcome)",
            "pass",
        ),
    ),
    mutant(
        "the end of a child and its answer are two commits",
        (_SETTLE, " and self.claim.parent is None", ""),
        caught_by="tests/engine/test_children.py::test_an_end_whose_commit_is_in_doubt_answers_once[before-postgresql]",
    ),
    mutant(
        "the end of a child that took too long is told nobody",
        (
            "runner.step_commit:Committer.terminate",
            "_EndResult(self._answer_parent(tx, run_outcome, reason=reason))",
            "_EndResult([])",
        ),
        caught_by="tests/engine/test_children.py::"
        "test_a_child_that_is_ended_since_it_took_too_long_fails_its_step[sqlite]",
    ),
    mutant(
        "a child that failed is taken for done",
        (
            "runner.completion_messages:build_child_answer",
            "case Status.COMPLETE:",
            "case Status.COMPLETE | Status.ERRORED:",
        ),
    ),
    mutant(
        "a child does not know which run has made it",
        ("runner.step_effects:StepEffects.create", "self._claim.ref.run_number, by_step", "1, by_step"),
    ),
    # --- the outbox -----------------------------------------------------------------------------
    mutant(
        "an outbox message is sent without being committed with its step",
        ("runner.step_commit:Committer._write_in_lock_order", "step_commit.messages,\n        pk=", "(),\n        pk="),
    ),
    # --- two transactions at once ---------------------------------------------------------------
    mutant(
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
    mutant(
        "a boundary locks its own row before an older one",
        (_IN_ORDER, "if pk <= self.claim.pk:", "if False:"),
        (_IN_ORDER, "if pk > self.claim.pk:", "if True:"),
        caught_by=_ORDER + "[postgresql-a child that tells its parent-parent first]",
    ),
    mutant(
        "a boundary locks its own row twice, by two indexes",
        (_IN_ORDER, "if pk <= self.claim.pk:", "if pk < self.claim.pk:"),
        caught_by="tests/pairs/test_order.py::"
        "test_a_step_that_sends_an_event_to_its_own_instance_does_not_deadlock[mariadb-lock]",
    ),
    mutant(
        "the end of a child locks the child before its parent",
        (_SETTLE, "answers.lock_parent(tx, self.claim.parent)", "pass"),
        caught_by=_ORDER + "[postgresql-a child that ends-parent first]",
    ),
    mutant(
        "the end of a child that overstays locks the child before its parent",
        ("runner.step_commit:Committer.terminate", "answers.lock_parent(tx, self.claim.parent)", "pass"),
        caught_by=_ORDER + "[postgresql-a child that overstays-parent first]",
    ),
    mutant(
        "the end of a run that overstays locks its row twice, by two indexes",
        (
            "runner.step_commit:Committer.terminate",
            "row = instances.lock(",
            "claims.guard(tx, self.claim, lease=self._lease.length)\n        row = instances.lock(",
        ),
        caught_by="tests/pairs/test_order.py::"
        "test_a_run_that_exceeds_its_duration_does_not_deadlock_with_an_event[mariadb-lock]",
    ),
    # --- leases and deadlines -------------------------------------------------------------------
    mutant(
        "a boundary is believed to renew the lease from after the answer",
        (
            "runner.step_commit:Committer.commit",
            "self._lease.extend(requested_at=requested_at)",
            "self._lease.extend(requested_at=self._lease.mark_progress())",
        ),
        caught_by=_LEASES + "test_a_boundary_renews_the_lease_from_before_it_was_asked_for[sqlite]",
    ),
    mutant(
        "an author's transaction is taken for a pass that is stuck",
        (
            "runner.step_commit:Committer._commit_with_user_writes",
            "self._lease.enter_user_code(step_commit.writes[0].commit_id)",
            "pass",
        ),
        caught_by=_LEASES + "test_an_authors_transaction_may_take_any_time_within_one_attempt[postgresql]",
    ),
)
