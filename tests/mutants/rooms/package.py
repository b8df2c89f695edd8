"""Bugs in the model and in the modules at the top of the package."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    # --- the sweep ------------------------------------------------------------------------------
    mutant(
        "a hint is sent again for as long as it waits",
        ("redispatch:Redispatch.is_lost", "age = now - sent_at", "age = now - sent_at\n    return True"),
        caught_by="tests/replay_state/test_redispatch.py::test_only_lost_hints_are_sent_again_and_all_of_them_soon",
    ),
    # --- events and waits -----------------------------------------------------------------------
    mutant(
        "a sleep ends when it is next looked at",
        ("replay_state:ReplayState.decide_timer", "if row.wake_at <= now", "if True"),
    ),
    mutant(
        "a retry does not wait",
        ("replay_state:ReplayState.decide_do", "row.next_retry_at is not None and row.next_retry_at > now", "False"),
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    # --- from outside ---------------------------------------------------------------------------
    mutant(
        "a rewind copies its target too",
        ("ancestry:select_rows_before", "row.seq < seq", "row.seq <= seq"),
    ),
    mutant(
        "a rewind keeps what is open",
        ("ancestry:select_rows_before", "row.is_finished and ", ""),
    ),
    mutant(
        "a rewind keeps what was cancelled",
        ("ancestry:_without_undecided_losers", "row.status is not StepStatus.CANCELLED", "True"),
        caught_by="tests/engine/test_rewinding.py::test_what_terminate_cancelled_is_open_again[sqlite]",
    ),
    mutant(
        "a rewound run sees its own time and chance from the beginning",
        ("ancestry:Ancestry.for_continuation", "if seq > 0 else ()", "if False else ()"),
        caught_by="tests/engine/test_rewinding.py::test_time_and_chance_are_those_that_the_kept_steps_saw[sqlite]",
    ),
    # --- topics ---------------------------------------------------------------------------------
    mutant(
        "an emission that is repeated is handed out again",
        ("model.emissions:plan_delivery", "elif not wait.has_emission:", "else:"),
        (
            "model.emissions:plan_delivery",
            "event_id(number)",
            "event_id(receiver.version + number + 1 if wait.has_emission or number > 1 else 1)",
        ),
        caught_by="tests/engine/test_topics.py::test_a_loop_gets_an_emission_once[sqlite]",
    ),
    # --- steps that others do -------------------------------------------------------------------
    mutant(
        "all attempts of a task have the same answers",
        ("model.states:task_event_type", "{attempt}", "1"),
        ("store.items:mark_task_as_sent", "task_id(event_type, ", 'task_id(f"{event_type}{attempt}", '),
    ),
    mutant(
        "a task that failed is sent again at once",
        ("replay_state:ReplayState.decide_remote", "if row.next_retry_at > now", "if False"),
        ("store.claims:_claimable", "sa.and_(i.claim_token.is_(None), i.run_at <= now)", "i.claim_token.is_(None)"),
    ),
    # --- publishing -----------------------------------------------------------------------------
    mutant(
        "a cursor is good for any list",
        ("values.cursors:Cursors._compute_mac", "(inner + text,", "(text,"),
        caught_by="tests/values/test_cursors.py::test_what_another_list_has_written_is_refused",
    ),
    mutant(
        "the audit tells who did it whatever the hook hides",
        ("redaction:Redaction._redact_audit", 'self.redact_value(record.by, "by", record.step_key)', "record.by"),
        caught_by="tests/http/test_rewinding.py::test_the_audit_shows_no_text_that_may_not_be_shown",
    ),
)
