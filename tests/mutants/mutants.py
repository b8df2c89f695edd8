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


_LET_GO = "runner.boundary:Committer.let_go"
_WAIT = "runner.boundary:Committer.commit_wait"
_LINEAR_WAIT = "runner.linear:LinearPass._wait"
_REPLAYED = "st.status == StepStatus.WAITING.value"
_POST = "tasks.outbox:Outbox._post_part"
_MAPS = "tests/engine/test_maps.py::"
_SETTLE = "runner.boundary:Committer.settle"

MUTANTS = (
    # --- the fence ------------------------------------------------------------------------------
    _m(
        "the guard has no fence",
        ("store.claims:guard_update", ', i.c.claim_token == param("token", type_=sa.String)', ""),
    ),
    _m(
        "letting go has no fence",
        (_LET_GO, "claims.guard(tx, self.claim, ", "(lambda *_, **__: claims.Guarded(self.claim.claimed_at, False))("),
        ("store.claims:_release", ', i.c.claim_token == param("token")', ""),
    ),
    _m("settling has no fence", ("store.claims:_end", ', i.c.claim_token == param("token", type_=sa.String)', "")),
    _m(
        "the fused step has no fence",
        (
            "store.journal:_fused_insert",
            "guard_update(s)",
            'sa.update(i).where(i.c.id == param("pk", sa.BigInteger)).values(lease_until=s.clock() + '
            'param("lease_us", sa.BigInteger), version=i.c.version + 1, crash_count=0)',
        ),
        caught_by="tests/store/test_claims.py::test_a_runner_that_lost_its_claim_changes_nothing[postgresql-restarted]",
    ),
    _m("a restart keeps the token", ("store.instances:restart", "**RELEASED,", "")),
    _m("terminating keeps the claim", ("store.instances:terminate", "**RELEASED,", "")),
    _m(
        "a takeover keeps the old token",
        (
            "store.claims:_take",
            '(i.claim_token, param("token"))',
            '(i.claim_token, sa.func.coalesce(i.claim_token, param("token")))',
        ),
    ),
    _m(
        "a renewal asks for no token",
        ("store.claims:renew", "i.c.claim_token.in_(tokens)", "sa.true()"),
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
        ("store.claims:_take", "i.crash_count + sa.case((i.claim_token.is_(None), 0), else_=1)", "i.crash_count"),
        ("store.sweeps:_release", "row.crash_count + 1", "row.crash_count"),
    ),
    # --- commits in doubt -----------------------------------------------------------------------
    _m(
        "a commit in doubt is taken for done",
        (
            "runner.boundary:Committer._resolver",
            "return None",
            "return Committed([journal._as_row(w, journal._Times(None, None, 0, None, 0)) for w in boundary.writes])",
        ),
    ),
    _m(
        "a commit in doubt is taken for not done",
        ("runner.boundary:Committer._resolver", "if len(found) == len(boundary.writes)", "if len(found) < 0"),
    ),
    _m(
        "a restart in doubt is done again",
        ("operations:Operations._begin", "resolve=was_applied", "resolve=None"),
    ),
    _m(
        "an event in doubt is taken for sent",
        ("operations:Operations.send_event", "resolve=was_applied", "resolve=lambda tx: (True, [])"),
    ),
    # --- the sweep ------------------------------------------------------------------------------
    _m(
        "the sweep ignores expired leases",
        ("store.sweeps:sweep", "elif not may_expire and row.dispatches < _LOOKS:", "elif True:"),
    ),
    _m(
        "the sweep releases live leases",
        ("store.sweeps:sweep", "if ends > now:", "if False:"),
    ),
    # --- events and waits -----------------------------------------------------------------------
    _m(
        "an event is consumed after the boundary",
        (_WAIT, "journal.consume(tx, self.claim, guarded, event, key=key)", "taken[:] = [(guarded, event)]"),
        (_WAIT, "def work(tx: Tx) -> Committed:", "taken = []\n\n    def work(tx: Tx) -> Committed:"),
        (
            _WAIT,
            "committed = self._store.transact(work, resolve=resolve)",
            "committed = self._store.transact(work, resolve=resolve)\n"
            "    for guarded, event in taken:\n"
            "        self._store.transact(lambda tx: journal.consume(tx, self.claim, guarded, event, key=key))",
        ),
    ),
    _m(
        "an event is not marked as consumed",
        (_WAIT, "journal.consume(tx, self.claim, guarded, event, key=key)", "pass"),
    ),
    _m(
        "an event at the deadline is too late",
        ("store.journal:_oldest", 'e.created_at <= param("deadline_us")', 'e.created_at < param("deadline_us")'),
    ),
    _m(
        "the newest event is consumed first",
        ("store.journal:_oldest", ".order_by(e.seq)", ".order_by(e.seq.desc())"),
    ),
    _m(
        "an event does not wake who waits for it",
        ("operations:Operations.send_event", "and instances.is_awaited(tx, row, type_)", "and False"),
    ),
    _m(
        "an event that came before the suspension is not seen",
        ("store.claims:suspend", "_has_event_for(tx, claim, waits) or ", ""),
        # Seen by the simulation too, but in one schedule of two thousand.
        caught_by="tests/store/test_claims.py::test_an_event_sent_before_the_suspension_leaves_the_instance_due[sqlite]",
    ),
    _m(
        "a suspended run wakes for the first of its waits, not the earliest",
        ("store.claims:suspend", "min(wait.due_at for wait in waits)", "waits[0].due_at"),
    ),
    _m("a sleep ends when it is next looked at", ("ledger:Ledger.decide_timer", "if row.wake_at <= now", "if True")),
    _m(
        "a retry does not wait",
        ("ledger:Ledger.decide_do", "row.next_retry_at is not None and row.next_retry_at > now", "False"),
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    # --- from outside ---------------------------------------------------------------------------
    _m(
        "a resumed instance is not made due",
        (
            "store.instances:resume",
            "return make_due(tx, row, wake=Wake.RESUME, grace=grace)",
            "_change(tx, row, status=Status.ACTIVE.value)",
        ),
    ),
    _m("a pause ignores who works on it", ("store.instances:pause", "if row.claim_token is not None:", "if False:")),
    _m(
        "a restart takes the events along",
        (
            "store.instances:restart",
            "    return Due(",
            "    e = tx.t.event\n"
            "    old = sa.and_(e.c.instance_pk == row.pk, e.c.run_number == row.run_number)\n"
            "    tx.execute(sa.update(e).where(old).values(run_number=number))\n"
            "    return Due(",
        ),
    ),
    _m(
        "a rewind copies its target too",
        ("lineage:before", "row.seq < place", "row.seq <= place"),
    ),
    _m(
        "a rewind leaves all events consumed",
        ("store.runs:_plant", "values[name] = sa.case((is_kept, e.c[name]))", "values[name] = e.c[name]"),
    ),
    _m(
        "a rewind keeps what is open",
        ("lineage:before", "row.is_settled and ", ""),
    ),
    _m(
        "a rewind keeps what was cancelled",
        ("lineage:_whole", "row.status is not StepStatus.CANCELLED", "True"),
        caught_by="tests/engine/test_rewinding.py::test_what_terminate_cancelled_is_open_again[sqlite]",
    ),
    _m(
        "a rewound run sees its own time and chance from the beginning",
        ("lineage:Lineage.until", "if place > 0 else ()", "if False else ()"),
        caught_by="tests/engine/test_rewinding.py::test_time_and_chance_are_those_that_the_kept_steps_saw[sqlite]",
    ),
    _m(
        "a step is settled by hand under its runner",
        ("store.instances:take_back", "**RELEASED,", ""),
        caught_by="tests/engine/test_interventions.py::"
        "test_a_runner_in_flight_changes_nothing_after_its_step_was_settled[sqlite]",
    ),
    # --- retention ------------------------------------------------------------------------------
    _m(
        "an instance that ends is kept without end",
        ("store.claims:_end", "retention_until=s.clock() + i.c.retention_us,", ""),
        caught_by="tests/engine/test_retention.py::"
        "test_an_ended_instance_is_deleted_when_its_retention_is_over_with_all_its_runs[sqlite]",
    ),
    _m(
        "a restarted instance is deleted when its last run would have been",
        ("store.instances:restart", "retention_until=None,", ""),
        ("store.retention:delete_expired", ", i.status.in_(sorted(status.value for status in TERMINAL))", ""),
        caught_by="tests/engine/test_retention.py::"
        "test_an_ended_instance_is_deleted_when_its_retention_is_over_with_all_its_runs[sqlite]",
    ),
    # --- ends and branches ----------------------------------------------------------------------
    _m(
        "settling leaves the times of the next sweep",
        ("store.claims:_end", "run_at=None,", ""),
        ("store.claims:_end", "poll_at=None,", ""),
    ),
    _m(
        "who is told of an end is not in its transaction",
        (_SETTLE, "self._leave(tx, letters)", "None"),
        caught_by="tests/engine/test_endings.py::"
        "test_what_the_broker_did_not_take_at_the_end_is_sent_by_a_sweep[sqlite]",
    ),
    _m(
        "progress does not clear the count of crashes",
        (
            "store.claims:guard_update",
            'crash_count=sa.case((param("is_progress", type_=sa.Boolean), 0), else_=i.c.crash_count),',
            "",
        ),
    ),
    _m(
        "a gather runs finished siblings again",
        ("runner.passage:Pass._advance", "if branch.row is not None:", "if branch.row is not None and sole:"),
        ("ledger:Ledger.decide_do", "row.is_settled", "row.is_settled and alone"),
    ),
    _m(
        "a race leaves its losers open",
        (
            "runner.progress:Progress.race_writes",
            "return [verdict, *(self.write(branch, StepStatus.CANCELLED, commit_id=commit_id) for branch in losers)]",
            "return [verdict]",
        ),
    ),
    # --- published values -----------------------------------------------------------------------
    _m(
        "publishing has no fence",
        ("store.claims:_touch", ', i.c.claim_token == param("token", type_=sa.String)', ""),
        caught_by="tests/engine/test_publish.py::"
        "test_a_worker_that_has_lost_its_claim_writes_nothing_and_stops[in a body-sqlite]",
    ),
    _m(
        "a replay publishes again",
        ("runner.progress:Progress.publish", "elif not self.ledger.is_replaying:", "else:"),
        caught_by="tests/engine/test_publish.py::test_a_replay_never_puts_an_old_value_over_a_newer_one[sqlite]",
    ),
    _m(
        "letting go forgets what is kept",
        (_LET_GO, "self.board.ride(tx)", "pass"),
        caught_by="tests/engine/test_publish.py::"
        "test_the_last_value_of_a_tight_loop_is_written_with_what_comes_next[a pause-sqlite]",
    ),
    # --- linear workflows -----------------------------------------------------------------------
    _m(
        "a linear result is written without the guard",
        (
            "runner.boundary:Committer._in_order",
            "guarded = claims.guard(tx, self.claim, lease=self._lease.length, is_progress=boundary.is_progress)",
            "guarded = (\n"
            "            claims.Guarded(self.claim.claimed_at, False)\n"
            "            if boundary.writes[0].status is StepStatus.DONE and boundary.ending is None\n"
            "            else claims.guard(tx, self.claim, lease=self._lease.length)\n"
            "        )",
        ),
        ("store.journal:write_step", "raise Superseded(str(claim.ref))", "pass"),
    ),
    _m(
        "an expired lease costs a linear step no attempt",
        ("runner.linear:LinearPass._recover", '"attempts": row.attempts + 1', '"attempts": row.attempts'),
    ),
    _m(
        "an event that came before a linear step waits is consumed for nothing",
        (
            _LINEAR_WAIT,
            "return [replace(self._woken(row, event.seq), commit_id=waiting.commit_id)]",
            "return [waiting]",
        ),
    ),
    _m(
        "all linear steps are made ready at once",
        (
            "runner.linear:LinearPass._complete",
            "[done, self._write(following, StepStatus.READY, retry_in=_NOW)]",
            "[done, *(self._write(each, StepStatus.READY, retry_in=_NOW) for each in self._rows[row.seq + 1 :])]",
        ),
    ),
    _m("a linear step that waits again keeps its last event", (_LINEAR_WAIT, "event_seq=None,", "")),
    _m(
        "a linear wait is over when it is next looked at",
        ("runner.linear:LinearPass._wake", "if due_at <= guarded.now else []", "if True else []"),
    ),
    _m(
        "a linear step gets its event, which is not marked as consumed",
        (
            "runner.linear:LinearPass._wake",
            "journal.consume(tx, self._lease.claim, guarded, event, key=row.step_key)",
            "pass",
        ),
    ),
    _m(
        "a linear retry does not wait",
        (
            "runner.linear:LinearPass.run",
            "row.next_retry_at is not None and row.next_retry_at > self._now",
            "False",
        ),
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    _m(
        "a linear step has one attempt more than it may",
        (
            "runner.linear:LinearPass._is_last",
            "row.attempts + 1 >= row.max_attempts",
            "row.attempts >= row.max_attempts",
        ),
    ),
    _m(
        "an event does not wake a linear step",
        (
            "store.instances:_live_wait",
            "st.status.in_([sa.literal_column(f\"'{status}'\") for status in _WAITING])",
            _REPLAYED,
        ),
    ),
    # --- topics ---------------------------------------------------------------------------------
    _m(
        "an emission is for waits that began after it",
        ("store.emissions:_waits", ", w.c.opened_at <= emission.created_at", ""),
        caught_by="tests/engine/test_topics.py::"
        "test_a_wait_that_begins_while_an_emission_is_under_way_does_not_get_it[sqlite]",
    ),
    _m(
        "an emission moves on in a commit of its own, and is handed out twice after a crash",
        (
            "store.emissions:hand_out",
            "tx.run(_move, id=emission_id, after=batch[-1], resumed=resumed, poll_us=span_us(lease))",
            "pass",
        ),
        ("store.emissions:_serve", "waiters.close_many(tx, gone)", "pass"),
        ("store.emissions:_serve", "elif wait.had is None:", "else:"),
        ("store.emissions:_event", "if nth == 1 else", "if False else"),
        ("store.emissions:_event", "{_AGAIN}{nth}", "{_AGAIN}{owner.version + nth}"),
        (
            "operations.emitting:Emitting._hand_out",
            "return self._store.transact(work, resolve=was_applied)",
            "progress = self._store.transact(work)\n"
            "    if progress is not None and not progress.is_over:\n"
            "        moved = {'after': progress.after_pk, 'resumed': progress.resumed, 'poll_us': 30_000_000}\n"
            "        self._store.transact(lambda tx: tx.run(emissions._move, id=emission_id, **moved))\n"
            "    return progress",
        ),
        (
            "operations.emitting:go_on_emitting",
            "if progress is not None:",
            "if progress is not None:\n"
            "        moved = {'after': progress.after_pk, 'resumed': progress.resumed, 'poll_us': 0}\n"
            "        store.transact(lambda tx: tx.run(emissions._move, id=abandoned, **moved))",
        ),
    ),
    _m("an emission is over after its first batch", ("store.emissions:hand_out", "if len(batch) < BATCH:", "if True:")),
    _m(
        "an emission whose emitter died is left as it is",
        ("store.emissions:_abandoned", "e.poll_at <= s.statement_clock()", "e.poll_at < 0"),
    ),
    _m(
        "an emission that is repeated is handed out again",
        ("store.emissions:_serve", "elif wait.had is None:", "else:"),
        ("store.emissions:_event", "if nth == 1 else", "if wait.had is None and nth == 1 else"),
        ("store.emissions:_event", "{_AGAIN}{nth}", "{_AGAIN}{owner.version + nth}"),
        caught_by="tests/engine/test_topics.py::test_a_loop_gets_an_emission_once[sqlite]",
    ),
    _m(
        "an emission wakes nobody",
        ("store.emissions:_serve", "for pk in resting}, due)", "for pk in resting}, {})"),
        caught_by="tests/engine/test_topics.py::test_an_emission_ends_the_wait_of_everybody[sqlite]",
    ),
    _m(
        "a wait on a topic is not written down",
        (_WAIT, "waiters.open_wait(tx, self.claim, guarded, key=key, topic=topic)", "pass"),
    ),
    _m(
        "what a step emits is lost",
        ("runner.boundary:Committer._in_order", "self._makings.emit(tx, boundary.emissions)", "pass"),
    ),
    _m(
        "a rewind takes along what was emitted to waits that it opens anew",
        ("store.runs:_plant", ", sa.or_(is_kept, e.c.type.not_like(PRIVATE_TYPES))", ""),
        caught_by="tests/engine/test_topics.py::test_what_was_emitted_is_not_for_a_wait_that_a_rewind_opens_anew[sqlite]",
    ),
    # --- steps that others do -------------------------------------------------------------------
    _m(
        "an answer is taken that nobody waits for",
        ("store.answers:answer", "row.status.is_terminal or not is_asked", "row.status.is_terminal"),
    ),
    _m("a second answer is taken beside the first", ("store.answers:_is_asked", "~given,", "")),
    _m(
        "an answer counts only while its instance sleeps",
        ("store.answers:answer", "row.status.is_terminal", "row.status.value != 'waiting'"),
    ),
    _m("an answer wakes nobody", ("store.answers:answer", "if is_awaited else []", "if False else []")),
    _m(
        "an answer to an earlier run is taken",
        ("operations.steering:Steering.answer", "if row.run_number != ref.run_number:", "if False:"),
    ),
    _m(
        "the child of an earlier run answers",
        ("store.answers:_waiting_parent", 'i.run_number == param("run")', 'i.run_number >= param("run")'),
    ),
    _m(
        "all attempts of a task have the same answers",
        ("model.states:task_type", "{attempt}", "1"),
        ("runner.delegation:Delegation._send", "task_id(event_type, ", 'task_id(f"{event_type}{attempt}", '),
    ),
    _m(
        "a task that is to be sent again waits for the answer that it had",
        ("runner.delegation:Delegation._answer_of_task", ", event_type=None", ""),
    ),
    _m(
        "a task that failed is sent again at once",
        ("ledger:Ledger.decide_delegated", "if row.next_retry_at > now", "if False"),
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    _m(
        "a task is sent once more than it may",
        (
            "runner.delegation:Delegation._answer_of_task",
            "row.attempts >= policy.max_attempts",
            "row.attempts > policy.max_attempts",
        ),
    ),
    _m(
        "all attempts of a task have the time of the first",
        (
            "runner.delegation:Delegation._send",
            "wake_in=self._waits.span(",
            "wake_at=None if attempt == 1 else branch.entry.row.created_at + branch.policy.timeout,\n"
            "        wake_in=None if attempt > 1 else self._waits.span(",
        ),
    ),
    _m(
        "the letter of a task is not kept with its step",
        ("runner.delegation:Delegation._send", "outgoing=[letter], ", ""),
        ("runner.delegation:Delegation._send", "if sole:", "self._at.env.post([letter])\n    if sole:"),
    ),
    _m(
        "the end of a child is told nobody",
        (_SETTLE, "_Ended(self._answer(tx, ending))", "_Ended([])"),
    ),
    _m(
        "the end of a linear child is told nobody",
        ("runner.boundary:Committer._in_order", "dues += self._answer(tx, boundary.ending)", "pass"),
    ),
    _m(
        "the end of a child is told after its commit",
        (_SETTLE, "return _Ended(self._answer(tx, ending))", "return _Ended([])"),
        (
            _SETTLE,
            "    self._end(work, letters, tell, single=is_single)",
            "    self._end(work, letters, tell, single=is_single)\n"
            "    self._store.transact(lambda tx: self._answer(tx, ending))",
        ),
        # Seen by the simulation too, but in one schedule of a thousand.
        caught_by="tests/engine/test_children.py::"
        "test_a_child_is_created_once_and_answers_once_wherever_a_runner_dies[9-sqlite]",
    ),
    _m(
        "the end of a child and its answer are two commits",
        (_SETTLE, " and self.claim.parent is None", ""),
        caught_by="tests/engine/test_children.py::test_an_end_whose_commit_is_in_doubt_answers_once[before-postgresql]",
    ),
    _m(
        "the termination of a child is told nobody",
        (
            "operations.steering:Steering.terminate",
            "answers.answer_parent(tx, parent, payload=payload, event_id=event_id, grace=self._grace)",
            "[]",
        ),
    ),
    _m(
        "the end of a child that took too long is told nobody",
        ("runner.boundary:Committer.terminate", "_Ended(self._answer(tx, ending, reason=reason))", "_Ended([])"),
        caught_by="tests/engine/test_children.py::"
        "test_a_child_that_is_ended_since_it_took_too_long_fails_its_step[sqlite]",
    ),
    _m(
        "a child that failed is taken for done",
        ("runner.endings:answer", "case Status.COMPLETE:", "case Status.COMPLETE | Status.ERRORED:"),
    ),
    _m(
        "a child does not know which run has made it",
        ("runner.makings:Makings.create", "self._claim.ref.run_number, by_step", "1, by_step"),
    ),
    _m(
        "a retried step has the child that it had",
        ("runner.delegation:Delegation._create", "claim.pk, claim.ref.run_number)", "claim.pk, 1)"),
        caught_by="tests/engine/test_children.py::test_a_retry_of_the_parent_makes_another_child",
    ),
    # --- maps -----------------------------------------------------------------------------------
    _m(
        "an item takes what an earlier attempt answers",
        ("store.items:_answer", 'item.c.attempts == param("attempt", sa.Integer),', ""),
        caught_by=_MAPS + "test_an_item_that_failed_is_tried_again_later_under_a_new_id[sqlite]",
    ),
    _m(
        "an item is answered as often as somebody likes",
        ("store.items:_answer", "_in(s, ItemStatus.SENT),", ""),
        caught_by=_MAPS + "test_an_item_is_answered_once[sqlite]",
    ),
    _m(
        "nobody is woken when the last item has answered",
        (
            "store.items:answer",
            "wants = status is ItemStatus.FAILED or (not letters and is_over(tx, row.pk, row.run_number, key))",
            "wants = False",
        ),
        caught_by=_MAPS + "test_each_item_is_done_by_a_task_of_its_own[sqlite]",
    ),
    _m(
        "every answer wakes the workflow",
        ("store.items:answer", "if wants and is_asleep", "if is_asleep"),
        caught_by=_MAPS + "test_each_item_is_done_by_a_task_of_its_own[sqlite]",
    ),
    _m(
        "an answer sends nothing after it",
        ("store.items:answer", "[] if is_paused else send(tx, map_, room=1)", "[]"),
        caught_by=_MAPS + "test_so_many_are_out_at_a_time[sqlite]",
    ),
    _m(
        "a map sends all that it has",
        ("store.items:send", "_MOST if room is None else max(room, 0)", "_MOST"),
        caught_by=_MAPS + "test_so_many_are_out_at_a_time[sqlite]",
    ),
    _m(
        "an item that is lost is not missed",
        ("store.items:_has_fallen", "sa.or_(_in(s, ItemStatus.FAILED), is_late)", "_in(s, ItemStatus.FAILED)"),
        caught_by=_MAPS + "test_what_gets_lost_is_sent_again_when_its_time_is_over[sqlite]",
    ),
    _m(
        "what came while a map was about to sleep is not seen",
        ("store.claims:suspend", " or any(wait.look(tx, guarded.now) for wait in waits if wait.look)", ""),
        caught_by="tests/store/test_claims.py::test_a_wait_may_look_for_itself_under_the_lock[sqlite-True-After.DUE]",
    ),
    _m(
        "a run that goes on beyond a map has no items",
        ("store.runs:copy_steps", "(tx.t.step, tx.t.item)", "(tx.t.step,)"),
        caught_by=_MAPS + "test_a_rewind_beyond_a_map_keeps_its_results[sqlite]",
    ),
    _m(
        "a retry does all items again",
        (
            "store.runs:_plant",
            "_copy(tx, tx.t.item, seed, seed.retried, is_done, pk=pk, run_number=run_number)",
            "pass",
        ),
        caught_by=_MAPS + "test_a_retry_does_again_only_what_failed[sqlite]",
    ),
    _m(
        "an item takes what is answered to a namesake that was deleted",
        ("store.items:answer", " or item.pk != row.pk", ""),
        caught_by=_MAPS + "test_what_is_answered_to_a_map_that_was_deleted_is_for_nobody[sqlite]",
    ),
    # --- the outbox -----------------------------------------------------------------------------
    _m(
        "a letter is forgotten before it is sent",
        (
            _POST,
            "unsent = self._send(letters)",
            "tasks = [each.id for each in letters if each.kind is OutboxKind.TASK]\n"
            "    self._store.transact(lambda tx: outbox.remove(tx, tasks))\n"
            "    unsent = self._send(letters)",
        ),
    ),
    _m(
        "a letter that the broker refused is forgotten",
        (_POST, "kept = {each.id for each in (*unsent.lost, *unsent.refused)}", "kept = set()"),
    ),
    _m(
        "a letter is sent and not kept with its step",
        ("runner.boundary:Committer._in_order", "boundary.outgoing,\n        pk=", "(),\n        pk="),
    ),
    _m(
        "an outbound event is forgotten when it is sent",
        (_POST, "if each.kind is OutboxKind.TASK and each.id not in kept", "if each.id not in kept"),
    ),
    _m(
        "an outbound event is not forgotten when it was handled",
        (
            "store.outbox:finish",
            "sa.delete(o).where(o.c.id == delivery.id, o.c.token == delivery.token)",
            "sa.update(o).where(o.c.id == delivery.id).values(token=None, run_at=tx.store.clock())",
        ),
    ),
)
