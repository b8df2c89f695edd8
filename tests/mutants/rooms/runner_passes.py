"""Bugs in the passes of the runner, but for their commits: see `runner_commits`."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_LINEAR_WAIT = "runner.linear_pass:LinearPass._start_wait"
_LEASES = "tests/engine/test_leases.py::"
_STALLED = "tests/engine/test_stalled_passes.py::"

MUTANTS = (
    # --- since when, and for how long ---------------------------------------------------------------
    mutant(
        "a retried step is suspended since its first attempt",
        ("runner.run_limits:find_waiting_start", "return max(times)", "return times[0]"),
        caught_by="tests/engine/test_patience.py::"
        "test_a_pass_between_two_attempts_measures_the_suspension_from_the_last_attempt[sqlite]",
    ),
    mutant(
        "an instance's own limit is ignored",
        (
            "runner.run_limits:RunLimits.__init__",
            "definition.max_run_duration if claim.max_run is None else claim.max_run",
            "definition.max_run_duration",
        ),
        caught_by="tests/engine/test_max_run.py::test_a_linear_run_has_a_limit_too[sqlite]",
    ),
    mutant(
        "a fork loses the limit of its instance",
        ("operations.rewind:RewindOperations._insert_fork", "max_run=row.max_run,", ""),
        caught_by="tests/engine/test_max_run.py::"
        "test_a_run_that_starts_again_has_the_same_limit_from_its_own_start[fork-sqlite]",
    ),
    # --- ends and branches ----------------------------------------------------------------------
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
        "a race leaves its losers open",
        (
            "runner.execution_context:ExecutionContext.build_race_end",
            "return [race_write, *(self.build_write(branch, StepStatus.CANCELLED, "
            "commit_id=commit_id) for branch in losers)]",
            "return [race_write]",
        ),
    ),
    # --- published values -----------------------------------------------------------------------
    mutant(
        "a replay publishes again",
        ("runner.execution_context:ExecutionContext.publish", "elif not self.replay_state.is_replaying:", "else:"),
        caught_by="tests/engine/test_publish.py::test_a_replay_never_puts_an_old_value_over_a_newer_one[sqlite]",
    ),
    # --- linear workflows -----------------------------------------------------------------------
    mutant(
        "an expired lease costs a linear step no attempt",
        (
            "runner.linear_rows:build_retry_write",
            '"attempts": row.attempts + 1',
            '"attempts": row.attempts + (ran_for is not None)',
        ),
    ),
    mutant(
        "an event that came before a linear step waits is consumed for nothing",
        (
            "runner.linear_step:LinearStep._wait",
            "return Decision([linear_rows.build_event_write(row, commit_id, event.seq)])",
            "pass",
        ),
    ),
    mutant(
        "all linear steps are made ready at once",
        (
            "runner.linear_step:LinearStep._complete",
            "[done, linear_rows.build_ready_write(next_row, commit_id)]",
            "[done, *(linear_rows.build_ready_write(each, commit_id) for each in self._pass.rows.rows[row.seq + 1 :])]",
        ),
    ),
    mutant(
        "a linear step that waits again keeps its last event",
        ("runner.linear_rows:build_wait_write", '"event_seq": None, ', ""),
        caught_by="tests/engine/test_linear.py::"
        "test_a_step_that_waits_again_in_vain_is_called_without_its_last_event[sqlite]",
    ),
    mutant(
        "a linear wait is over when it is next looked at",
        ("runner.linear_pass:LinearPass._check_wait", "if due_at <= guard_result.now else []", "if True else []"),
    ),
    mutant(
        "a linear step gets its event, which is not marked as consumed",
        (
            "runner.linear_pass:LinearPass._check_wait",
            "run_events.consume(tx, self.claim, guard_result, event, key=row.step_key)",
            "pass",
        ),
    ),
    mutant(
        "a linear retry does not wait",
        (
            "runner.linear_pass:LinearPass._run_steps",
            "row.next_retry_at is not None and row.next_retry_at > self.rows.now",
            "False",
        ),
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    mutant(
        "a linear step has one attempt more than it may",
        (
            "runner.linear_rows:is_last_attempt",
            "row.attempts + 1 >= row.max_attempts",
            "row.attempts >= row.max_attempts",
        ),
    ),
    # --- steps that others do -------------------------------------------------------------------
    mutant(
        "a task that is to be sent again waits for the answer that it had",
        ("runner.remote_steps:RemoteSteps._build_task_wait", ', "event_type": None}', "}"),
    ),
    mutant(
        "a task times out although its answer came while the delay was chosen",
        ("runner.waits:WaitSteps._is_current", "event is prepared.event", "prepared.event is None"),
        caught_by="tests/engine/test_unlocked_user_code.py::"
        "test_an_answer_that_comes_while_a_delay_is_chosen_counts[result-postgresql]",
    ),
    mutant(
        "an item that fails while others are decided waits for the timer of another",
        ("runner.map_steps:MapSteps._check_items", "if len(known) == len(locked_items)", "if True"),
        caught_by="tests/engine/test_unlocked_user_code.py::"
        "test_an_item_that_fails_while_the_last_open_one_is_decided_needs_no_timer[postgresql]",
    ),
    mutant(
        "a task is sent once more than it may",
        (
            "runner.remote_steps:RemoteSteps._build_task_wait",
            "row.attempts >= policy.max_attempts",
            "row.attempts > policy.max_attempts",
        ),
    ),
    mutant(
        "all attempts of a task have the time of the first",
        (
            "runner.remote_steps:RemoteSteps._send_task",
            "wake_in=timeout",
            "wake_in=timeout if attempt == 1 else None, "
            "wake_at=None if attempt == 1 else execution.entry.row.created_at + execution.policy.timeout",
        ),
    ),
    mutant(
        "the message of a task is not committed with its step",
        (
            "runner.remote_steps:RemoteSteps._send_task",
            "return Decision([write], [message])",
            "self._context.env.send_messages([message])\n        return Decision([write])",
        ),
    ),
    mutant(
        "a retried step has the child that it had",
        ("runner.remote_steps:RemoteSteps._create_child", "claim.pk, claim.ref.run_number)", "claim.pk, 1)"),
        caught_by="tests/engine/test_children.py::test_a_retry_of_the_parent_makes_another_child",
    ),
    # --- leases and deadlines -------------------------------------------------------------------
    mutant(
        "the renewer renews once per lease",
        ("runner.lease:LeaseRenewer.__init__", "length.total_seconds() / 3", "length.total_seconds()"),
        caught_by=_LEASES + "test_a_lease_is_renewed_every_third_of_its_length[sqlite]",
    ),
    mutant(
        "a renewal is believed from after the answer",
        (
            "runner.lease:LeaseRenewer._renew",
            "lease.extend(requested_at=requested_at)",
            "lease.extend(requested_at=self._runtime.monotonic())",
        ),
        caught_by=_LEASES + "test_a_renewal_counts_from_before_it_was_asked_for[sqlite]",
    ),
    mutant(
        "a lease that was made sure of is believed from after the answer",
        (
            "runner.lease:Lease.ensure_held",
            "self.extend(requested_at=requested_at)",
            "self.extend(requested_at=self._runtime.monotonic())",
        ),
        caught_by=_LEASES + "test_a_lease_that_was_made_sure_of_counts_from_before_it_was_asked_for[sqlite]",
    ),
    mutant(
        "a worker begins a body though it knows that its lease is lost",
        (
            "runner.attempts:Attempts.run",
            "if not self._lease.is_valid:",
            "if not self._lease.is_valid and not self._lease.is_lost:",
        ),
        ("runner.lease:Lease.ensure_held", "if self.is_lost:", "if False:"),
        caught_by=_LEASES + "test_a_worker_that_knows_its_lease_is_lost_begins_no_body[sqlite]",
    ),
    mutant(
        "the lease of a pass that is stuck is renewed for ever",
        ("runner.lease:Lease.measure_stall", "if self._user_code_owners:", "if True:"),
        caught_by=_STALLED + "test_a_pass_that_hangs_in_our_own_code_loses_its_claim_and_that_is_no_crash[sqlite]",
    ),
    mutant(
        "an author's code is taken for a pass that is stuck",
        ("runner.lease:Lease.measure_stall", "if self._user_code_owners:", "if False:"),
        caught_by=_LEASES + "test_an_authors_code_may_take_any_time_within_one_attempt[sqlite-body]",
    ),
    mutant(
        "a body that was left behind keeps the lease",
        ("runner.step_attempt:StepAttempt.abandon", "self._lease.exit_user_code(self)", "pass"),
        caught_by=_STALLED + "test_a_body_that_was_left_behind_keeps_no_lease[sqlite]",
    ),
    mutant(
        "a pass that was stuck counts as a dead worker",
        (
            "runner.lease:_release_stalled",
            "releases.release(tx, lease.claim, guard_result, grace=timedelta(0), cooldown=cooldown)",
            "pass",
        ),
        caught_by=_STALLED + "test_a_pass_that_hangs_in_our_own_code_loses_its_claim_and_that_is_no_crash[sqlite]",
    ),
    # --- what a run reports ---------------------------------------------------------------------
    mutant(
        "a commit leaves the published values to the next one",
        ("runner.published_values:PublishedValues.flush", "if self.pending:", "if self.pending and self.flushing:"),
    ),
    mutant(
        "a run counts no lines",
        ("store.run_logs:write_logs", "kept=len(kept)", "kept=0"),
    ),
    mutant(
        "a run is ended before its limit",
        ("runner.run_limits:RunLimits.__init__", "started_at + self._max_run", "started_at + self._max_run / 2"),
    ),
    mutant(
        "a suspension is ended before its limit",
        (
            "runner.run_limits:RunLimits.termination_reason",
            "now < self._suspended_since + limit",
            "now < self._suspended_since + limit / 2",
        ),
        (
            "runner.run_limits:RunLimits.deadlines",
            "(self._suspended_since or now) + limit]",
            "(self._suspended_since or now) + limit / 2]",
        ),
    ),
    mutant(
        "a slow schema of a wait counts as a stalled pass",
        ("runner.waits:WaitSteps._prepare_outcome", "with self._context.lease.user_code():", "if True:"),
        caught_by="tests/engine/test_stalled_passes.py::"
        "test_slow_code_of_the_author_that_the_engine_calls_is_no_stall[sqlite-schema]",
    ),
)
