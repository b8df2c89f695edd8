"""Bugs in the commits of steps and runs: `runner.committer`, `runner.commit_writer` and what a commit writes."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_ORDER = "tests/pairs/test_order.py::test_rows_of_two_instances_are_locked_in_one_order"
_PAIR = "tests/pairs/test_pairs.py::test_two_concurrent_operations_lose_nothing_and_repeat_nothing"
_HOT_PASSES = "tests/engine/test_hot_passes.py::"
_RENEWAL = _HOT_PASSES + "test_the_commits_of_a_pass_renew_its_lease_where_the_renewer_finds_the_row_locked[sqlite]"
_LEASES = "tests/engine/test_leases.py::"

MUTANTS = (
    # --- the fence ------------------------------------------------------------------------------
    mutant(
        "a failed attempt is not recorded",
        ("runner.commit_writer:CommitWriter._write_failures", "if decision.failures:", "if False:"),
    ),
    mutant(
        "a failed attempt is recorded in a transaction of its own",
        (
            "runner.commit_writer:CommitWriter._write_failures",
            "attempts.insert(tx, claim.pk, claim.ref.run_number, writes, now=guard_result.now)",
            "self._env.store.transact(lambda own: "
            "attempts.insert(own, claim.pk, claim.ref.run_number, writes, now=guard_result.now))",
        ),
        caught_by="tests/engine/test_failed_attempts.py::"
        "test_the_record_and_the_row_of_the_step_are_committed_together_or_not_at_all"
        "[after-commit-a retry follows-function-postgresql]",
    ),
    mutant(
        "letting go has no fence",
        (
            "runner.commit_writer:CommitWriter._write_rows",
            "claims.guard(\n",
            "(claims.guard if step_commit.commit_id else lambda *_, **__: "
            "claims.GuardResult(self._claim.claimed_at, False))(\n",
        ),
        ("store.releases:_release", ', i.c.claim_token == param("token")', ""),
    ),
    # --- commits in doubt -----------------------------------------------------------------------
    mutant(
        "a commit in doubt is taken for done",
        (
            "runner.committer:DatabaseCommitter._find_committed",
            "return None",
            "from celery_durable.model import StepRow\n"
            "\n"
            "    done = [\n"
            "        StepRow(w.key, w.seq, w.name, w.type, w.status, w.attempts, result=w.result, "
            "commit_id=w.commit_id)\n"
            "        for w in step_commit.writes\n"
            "    ]\n"
            "    return Committed(done, writes=step_commit.writes)",
        ),
    ),
    mutant(
        "a commit in doubt is taken for not done",
        ("runner.committer:DatabaseCommitter._find_committed", "if rows or (", "if ("),
    ),
    # --- events and waits -----------------------------------------------------------------------
    mutant(
        "an event is consumed after the boundary",
        (
            "runner.waits:WaitSteps._decide_wait",
            "run_events.consume(tx, claim, guard_result, event, key=execution.key)",
            'vars(self._context.committer)["late"] = lambda tx: run_events.consume(\n'
            "            tx, claim, guard_result, event, key=execution.key\n"
            "        )",
        ),
        (
            "runner.committer:DatabaseCommitter.announce",
            "if committed.is_certain:",
            'late = vars(self).pop("late", None)\n'
            "    if late is not None:\n"
            "        self._store.transact(late)\n"
            "    if committed.is_certain:",
        ),
    ),
    mutant(
        "an event is not marked as consumed",
        (
            "runner.waits:WaitSteps._decide_wait",
            "run_events.consume(tx, claim, guard_result, event, key=execution.key)",
            "pass",
        ),
    ),
    # --- labels and hooks -----------------------------------------------------------------------
    mutant(
        "who is to hear of an end is not written down",
        (
            "runner.commit_writer:CommitWriter.build_last_messages",
            "return self._completion_messages.build(step_commit.ending)",
            "return []",
        ),
    ),
    mutant(
        "an end is told before it is committed",
        (
            "runner.committer:DatabaseCommitter.commit",
            "run, work = self._choose_way(step_commit, transaction)",
            "run, work = self._choose_way(step_commit, transaction)\n"
            "        if isinstance(step_commit.ending, RunOutcome):\n"
            "            self.announce(Committed(run_outcome=step_commit.ending))",
        ),
    ),
    # --- ends and branches ----------------------------------------------------------------------
    mutant(
        "who is told of an end is not in its transaction",
        (
            "runner.commit_writer:CommitWriter._end_run",
            "self._insert_messages(tx, last_messages, step_key=None)",
            "pass",
        ),
        caught_by="tests/engine/test_endings.py::"
        "test_what_the_broker_did_not_take_at_the_end_is_sent_by_a_sweep[sqlite]",
    ),
    # --- published values -----------------------------------------------------------------------
    mutant(
        "letting go forgets what is kept",
        (
            "runner.commit_writer:CommitWriter.write",
            "self._published.flush(tx)",
            "step_commit.commit_id and self._published.flush(tx)",
        ),
        caught_by="tests/engine/test_publish.py::"
        "test_the_last_value_of_a_tight_loop_is_written_with_what_comes_next[a pause-sqlite]",
    ),
    # --- linear workflows -----------------------------------------------------------------------
    mutant(
        "a linear result is written without the guard",
        (
            "runner.commit_writer:CommitWriter._write_rows",
            "claims.guard(\n",
            "(\n"
            "                lambda *_, **__: claims.GuardResult(self._claim.claimed_at, False)\n"
            "                if step_commit.ending is None and [w.status.value for w in "
            'step_commit.writes[:1]] == ["DONE"]\n'
            "                else claims.guard(*_, **__)\n"
            "            )(\n",
        ),
        ("store.step_rows:write_step", "raise Superseded(str(claim.ref))", "pass"),
    ),
    # --- topics ---------------------------------------------------------------------------------
    mutant(
        "a wait on a topic is not written down",
        (
            "runner.commit_writer:CommitWriter._write_row",
            "topic_waits.open_wait(tx, self._claim, guard_result, key=write.key, topic=topic)",
            "pass",
        ),
    ),
    mutant(
        "what a step emits is lost",
        ("runner.commit_writer:CommitWriter.write", "self._effects.emit(tx, effects.emissions)", "pass"),
    ),
    # --- steps that others do -------------------------------------------------------------------
    mutant(
        "the end of a child is told nobody",
        ("runner.commit_writer:CommitWriter._end_run", "if claim.parent is None:", "if True:"),
    ),
    mutant(
        "the end of a child is told after its commit",
        (
            "runner.commit_writer:CommitWriter._end_run",
            "return answers.answer_parent(tx, claim.parent, payload=payload, event_id=event_id, grace=self._grace)",
            'vars(self)["late"] = lambda tx: answers.answer_parent(\n'
            "        tx, claim.parent, payload=payload, event_id=event_id, grace=self._grace\n"
            "    )\n"
            "    return []",
        ),
        (
            "runner.committer:DatabaseCommitter.announce",
            "if committed.is_certain:",
            'late = vars(self._writer).pop("late", None)\n'
            "    if late is not None:\n"
            "        self._store.transact(late)\n"
            "    if committed.is_certain:",
        ),
        caught_by="tests/engine/test_children.py::test_a_child_is_created_once_and_answers_once_wherever_a_runner_dies",
    ),
    mutant(
        "the end of a child and its answer are two commits",
        (
            "runner.committer:DatabaseCommitter._choose_way",
            "if not last_messages and self._claim.parent is None and not writer.may_have_open_maps:",
            "if not last_messages and not writer.may_have_open_maps:",
        ),
        caught_by="tests/engine/test_children.py::test_an_end_whose_commit_is_in_doubt_answers_once[before-postgresql]",
    ),
    mutant(
        "the end of a child that took too long is told nobody",
        (
            "runner.commit_writer:CommitWriter._end_run",
            "if claim.parent is None:",
            "if claim.parent is None or run_outcome.status is Status.TERMINATED:",
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
        (
            "runner.commit_writer:CommitWriter.write",
            "self._insert_messages(tx, messages, step_key=step_key)",
            "self._insert_messages(tx, decision.messages, step_key=step_key)",
        ),
    ),
    # --- two transactions at once ---------------------------------------------------------------
    mutant(
        "a release decides by an earlier read whether to pause",
        (
            "runner.commit_writer:CommitWriter._write_rows",
            "decision = Decision(step_commit.writes, failures=step_commit.failures)\n",
            "decision = Decision(step_commit.writes, failures=step_commit.failures)\n"
            "        has_rows = bool(step_commit.commit_id)\n"
            "        guard_result = GuardResult(guard_result.now, has_rows and guard_result.pause_requested)\n",
        ),
        caught_by=_PAIR + "[postgresql-pause, held at its commit, commits before suspend]",
    ),
    mutant(
        "a boundary locks its own row before an older one",
        ("runner.commit_writer:CommitWriter.write", "if target[0] <= self._claim.pk", "if False"),
        ("runner.commit_writer:CommitWriter.write", "if target[0] > self._claim.pk", "if True"),
        caught_by=_ORDER + "[postgresql-a child that tells its parent-parent first]",
    ),
    mutant(
        "a boundary locks its own row twice, by two indexes",
        ("runner.commit_writer:CommitWriter.write", "if target[0] <= self._claim.pk", "if target[0] < self._claim.pk"),
        caught_by="tests/pairs/test_order.py::"
        "test_a_step_that_sends_an_event_to_its_own_instance_does_not_deadlock[mariadb-lock]",
    ),
    mutant(
        "the end of a child locks the child before its parent",
        ("runner.commit_writer:CommitWriter.write_bare_outcome", "answers.lock_parent(tx, self._claim.parent)", "pass"),
        caught_by=_ORDER + "[postgresql-a child that ends-parent first]",
    ),
    mutant(
        "the end of a child that overstays locks the child before its parent",
        (
            "runner.commit_writer:CommitWriter._find_lock_targets",
            "targets.update(answers.find_waiting_parent(tx, self._claim.parent))",
            "pass",
        ),
        caught_by=_ORDER + "[postgresql-a child that overstays-parent first]",
    ),
    mutant(
        "the end of a run that overstays locks its row twice, by two indexes",
        (
            "runner.commit_writer:CommitWriter._find_lock_targets",
            "targets.add((self._claim.pk, self._claim.ref.workflow, self._claim.ref.instance_id))",
            "pass",
        ),
        caught_by="tests/pairs/test_order.py::"
        "test_a_run_that_exceeds_its_duration_does_not_deadlock_with_an_event[mariadb-lock]",
    ),
    # --- leases and deadlines -------------------------------------------------------------------
    mutant(
        "the commits of a pass leave the lease to the renewer",
        (
            "runner.commit_writer:CommitWriter.changes_instance",
            " or self._lease.is_renewal_due",
            "",
        ),
        caught_by=_RENEWAL,
    ),
    mutant(
        "an added step does not end the count of crashes",
        (
            "runner.commit_writer:CommitWriter.changes_instance",
            " or self._claim.crash_count > 0",
            "",
        ),
        caught_by=_HOT_PASSES + "test_the_first_step_after_a_crash_ends_the_count_of_crashes[sqlite]",
    ),
    mutant(
        "a commit that does not renew the lease is believed to",
        ("runner.committer:DatabaseCommitter.commit", "if committed.renews_lease:", "if True:"),
        caught_by=_RENEWAL,
    ),
    mutant(
        "a boundary is believed to renew the lease from after the answer",
        (
            "runner.committer:DatabaseCommitter.commit",
            "lease.extend(requested_at=requested_at)",
            "lease.extend(requested_at=lease.mark_progress())",
        ),
        caught_by=_LEASES + "test_a_boundary_renews_the_lease_from_before_it_was_asked_for[sqlite]",
    ),
    mutant(
        "an author's transaction is taken for a pass that is stuck",
        ("runner.committer:DatabaseCommitter.commit", "lease.enter_user_code(step_commit)", "pass"),
        caught_by=_LEASES + "test_an_authors_transaction_may_take_any_time_within_one_attempt[postgresql]",
    ),
    # --- group commit ---------------------------------------------------------------------------
    mutant(
        "a group does not check the claims of its steps",
        (
            "store.step_groups:_build_locked",
            "i.c.id == given.c.pk, i.c.claim_token == given.c.token",
            "i.c.id == given.c.pk",
        ),
        caught_by="tests/store/test_step_groups.py::test_a_lost_claim_is_left_alone_and_the_others_are_written[postgresql]",
    ),
    mutant(
        "a group waits for a locked instance",
        ("store.step_groups:_build_locked", '"skip_locked": True, ', ""),
        caught_by="tests/engine/test_group_commit.py::test_a_locked_instance_delays_no_other_run[postgresql]",
    ),
    mutant(
        "a step that its group did not write counts as committed",
        ("runner.group_commit:GroupCommit.commit", "waiting.written is None", "False"),
        caught_by="tests/engine/test_group_commit.py::test_a_lost_claim_supersedes_only_its_own_pass[postgresql]",
    ),
    mutant(
        "a commit that renews the lease is in a group",
        ("runner.committer:DatabaseCommitter._choose_way", "or writer.changes_instance(row)", ""),
        caught_by="tests/engine/test_group_commit.py::test_passes_that_commit_together_renew_their_leases[postgresql]",
    ),
    mutant(
        "a run with a time limit sleeps beyond it",
        ("runner.commit_writer:CommitWriter.fits_sleep_statement", " and not self._limits.is_limited", ""),
        caught_by="tests/engine/test_patience.py::test_a_run_does_not_sleep_beyond_its_limit[postgresql]",
    ),
)
