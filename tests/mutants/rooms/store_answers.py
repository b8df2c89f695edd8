"""Bugs in the store: task steps, maps, their answers, lost tasks, events and sleeps."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_MAPS = "tests/engine/test_maps.py::"
_RESULTS = "tests/engine/test_map_results.py::"
_LOST = "tests/engine/test_lost.py::"
_TASKS = "tests/engine/test_tasks.py::"
_ATTEMPTS = "tests/engine/test_failed_attempts.py::"
_ANSWER_ITEM = "store.task_answers:_answer_item"

MUTANTS = (
    # --- steps that others do -------------------------------------------------------------------
    mutant(
        "the failed attempt of a task is not recorded",
        ("store.task_answers:accept_answer", "if failure is not None and", "if False and"),
    ),
    mutant(
        "a late error of a task is recorded twice",
        ("store.task_answers:_is_in_time", "e.created_at <= found.wake_at", "sa.true()"),
        caught_by=_ATTEMPTS + "test_an_error_after_the_deadline_is_recorded_once_as_timed_out[sqlite]",
    ),
    mutant(
        "an answer is taken that nobody waits for",
        ("store.answers:store_answer", "row.status.is_terminal or not is_unanswered", "row.status.is_terminal"),
    ),
    mutant("a second answer is taken beside the first", ("store.answers:_select_unanswered_step", "~has_answer,", "")),
    mutant(
        "an answer counts only while its instance sleeps",
        ("store.answers:store_answer", "row.status.is_terminal", "row.status.value != 'waiting'"),
    ),
    mutant("an answer wakes nobody", ("store.answers:store_answer", "if is_suspended else []", "if False else []")),
    mutant(
        "the child of an earlier run answers",
        ("store.answers:_waiting_parent", 'i.run_number == param("run")', 'i.run_number >= param("run")'),
        caught_by="tests/engine/test_children.py::test_a_restart_makes_a_child_of_its_own[sqlite]",
    ),
    # --- maps -----------------------------------------------------------------------------------
    mutant(
        "an item takes what an earlier attempt answers",
        ("store.task_answers:_update_item", 'item.c.attempts == param("attempt", sa.Integer),', ""),
        ("store.task_answers:_record_result", 'item.c.attempts == param("attempt", sa.Integer),', ""),
        ("store.task_answers:_record_result", 'item.c.attempt_token == param("token", sa.String),', ""),
        ("store.sent_attempts:map_item_conditions", 'item.attempts == param("attempt", sa.Integer),', ""),
        ("store.task_answers:accept_answer", "if not hmac.compare_digest(", "if False and not hmac.compare_digest("),
        caught_by=_MAPS + "test_an_item_that_failed_is_tried_again_later_under_a_new_id[sqlite]",
    ),
    mutant(
        "an item is answered as often as somebody likes",
        ("store.task_answers:_update_item", "item.c.status == sa.literal_column(f\"'{ItemStatus.SENT.value}'\"),", ""),
        ("store.task_answers:_record_result", "items.has_status(s, ItemStatus.SENT),", ""),
        (
            "store.sent_attempts:_unanswered_conditions",
            "item.status == sa.literal_column(f\"'{ItemStatus.SENT.value}'\"),",
            "",
        ),
        caught_by=_MAPS + "test_an_item_is_answered_once[sqlite]",
    ),
    mutant(
        "nobody is woken when the last item has answered",
        ("store.task_answers:wake_for_map", "if progress.open_count and not progress.has_ready:", "if True:"),
        caught_by=_MAPS + "test_each_item_is_done_by_a_task_of_its_own[sqlite]",
    ),
    mutant(
        "no run is woken when the last item has failed for good",
        (
            "store.task_answers:_answer_item",
            "needs_pass = status is ItemStatus.FAILED or (not messages and items.are_all_finished(tx, *step_key))",
            "needs_pass = status is ItemStatus.FAILED",
        ),
        caught_by=_MAPS + "test_failures_may_be_wanted",
    ),
    mutant(
        "a result is recorded while an item waits to be sent, which then stays unsent",
        ("store.task_answers:_takes_results", "sa.and_(is_waiting, ~items.has_ready(s))", "is_waiting"),
        caught_by=_MAPS + "test_so_many_are_out_at_a_time[sqlite]",
    ),
    mutant(
        "a copy of the last answer wakes no run, although the process of the first one died",
        ("store.task_answers:accept_answer", "[] if item is None else wake_for_map", "[] if True else wake_for_map"),
        caught_by=_RESULTS + "test_a_copy_of_the_last_answer_wakes_the_instance_for_a_process_that_died[sqlite]",
    ),
    mutant(
        "a late answer wakes an instance that has left its map",
        ("store.task_answers:wake_for_map", "or tx.run(_select_waiting_map, **where).first() is None", ""),
        caught_by=_RESULTS + "test_the_end_of_a_step_or_a_run_cancels_the_open_items[lost race-sqlite]",
    ),
    mutant(
        "a restart leaves the items of the prior run open",
        ("store.lifecycle:restart", "map_ends.cancel_open_of_run(tx, row.pk, row.run_number)", "pass"),
        caught_by=_RESULTS + "test_a_restart_cancels_the_items_of_the_prior_run[sqlite]",
    ),
    mutant(
        "every answer wakes the workflow",
        ("store.task_answers:_answer_item", "if needs_pass and is_suspended", "if is_suspended"),
        caught_by=_MAPS + "test_so_many_are_out_at_a_time[sqlite]",
    ),
    mutant(
        "an answer sends nothing after it",
        ("store.task_answers:_answer_item", "[] if is_paused else items.mark_ready_as_sent(tx, step, limit=1)", "[]"),
        caught_by=_MAPS + "test_so_many_are_out_at_a_time[sqlite]",
    ),
    mutant(
        "a map sends all that it has",
        ("store.items:mark_ready_as_sent", "_MAX_INTEGER if limit is None else limit", "_MAX_INTEGER"),
        caught_by=_MAPS + "test_so_many_are_out_at_a_time[sqlite]",
    ),
    mutant(
        "an item that is lost is not missed",
        (
            "store.items:_has_failed_or_timed_out",
            "sa.or_(has_status(s, ItemStatus.FAILED), _is_late(s))",
            "has_status(s, ItemStatus.FAILED)",
        ),
        caught_by=_MAPS + "test_what_gets_lost_is_sent_again_when_its_time_is_over[sqlite]",
    ),
    mutant(
        "what is answered to a map that was deleted is forged to its namesake",
        ("store.task_answers:_find_attempt", "if item is not None and item.pk != row.pk:", "if False:"),
        caught_by=_MAPS + "test_what_is_answered_to_a_map_that_was_deleted_is_for_nobody[sqlite]",
    ),
    mutant(
        "an answer need not name the token",
        ("store.task_answers:accept_answer", "if not hmac.compare_digest(", "if False and not hmac.compare_digest("),
        caught_by=_TASKS + "test_an_answer_that_does_not_name_the_token_is_refused[sqlite]",
    ),
    mutant(
        "a failure counts from a delivery that is overtaken",
        ("store.task_answers:_delivery_parameters", "if read_answer_error(payload) is None:", "if True:"),
        caught_by=_TASKS + "test_a_failure_counts_from_the_newest_delivery_alone_and_a_success_from_any[sqlite]",
    ),
    mutant(
        "a success counts from the newest delivery alone",
        ("store.task_answers:_delivery_parameters", "if read_answer_error(payload) is None:", "if False:"),
        caught_by=_TASKS + "test_a_failure_counts_from_the_newest_delivery_alone_and_a_success_from_any[sqlite]",
    ),
    mutant(
        "a map sends on while a pause is requested",
        (
            "store.task_answers:_answer_item",
            "row.status is Status.PAUSED or row.pause_requested",
            "row.status is Status.PAUSED",
        ),
        caught_by=_MAPS + "test_a_pause_that_is_requested_of_a_running_instance_sends_no_more_items[sqlite]",
    ),
    mutant(
        "a map sends on while its instance is paused",
        (_ANSWER_ITEM, "row.status is Status.PAUSED or row.pause_requested", "False"),
    ),
    mutant(
        "an answer sends two items after it",
        (_ANSWER_ITEM, "items.mark_ready_as_sent(tx, step, limit=1)", "items.mark_ready_as_sent(tx, step, limit=2)"),
    ),
    mutant(
        "an item that is to be tried again later is sent at once",
        (
            "store.items:_select_ready",
            "has_status(s, ItemStatus.PENDING), is_ready(s)",
            "has_status(s, ItemStatus.PENDING)",
        ),
    ),
    mutant(
        "the message of an item that an answer sends is not kept",
        (_ANSWER_ITEM, "outbox.insert(tx, messages, ", "outbox.insert(tx, (), "),
    ),
    mutant(
        "a sender that is late sends what a sweep has taken",
        ("store.outbox:keep", ", o.c.attempts == 0)", ",)"),
        caught_by=_RESULTS + "test_a_sender_that_is_late_sends_nothing_that_a_sweep_is_about_to_send[sqlite]",
    ),
    mutant(
        "a sender that is late does not look for the sweep",
        ("tasks.outbox:Outbox._divide_and_keep", "is_late = number > 0 and left < grace / 2", "is_late = False"),
        caught_by=_RESULTS + "test_a_sender_that_is_late_leaves_the_rest_to_the_sweep[sqlite]",
    ),
    # --- lost tasks -----------------------------------------------------------------------------
    mutant(
        "a failure counts from any delivery of a task",
        (
            "store.task_answers:_delivery_parameters",
            '{"first_delivery": reference.delivery, "last_delivery": reference.delivery}',
            '{"first_delivery": 0, "last_delivery": _MAX_INTEGER}',
        ),
        caught_by=_LOST + "test_a_failure_counts_from_the_newest_delivery_alone[task-sqlite]",
    ),
    mutant(
        "a loss that is reported for an older copy counts",
        ("store.lost_tasks:report_loss", "row is None or row.loss_count != reference.delivery or", "row is None or"),
        ("store.lost_tasks:_count_loss", 'item.c.loss_count == param("delivery", sa.Integer),', ""),
        caught_by=_LOST + "test_a_loss_is_carried_out_once_however_many_report_it[map-sqlite]",
    ),
    mutant(
        "a retry of the task by itself counts as its loss",
        ("store.lost_tasks:report_loss", " or sent_us not in (None, row.sent_at)", ""),
        (
            "store.lost_tasks:_count_loss_if_sent_at",
            '.where(s.tables.item.c.sent_at == param("sent", sa.BigInteger))',
            "",
        ),
        caught_by=_LOST + "test_a_retry_of_the_task_by_itself_is_no_loss[map-sqlite]",
    ),
    mutant(
        "a lost task is sent again for ever",
        ("store.lost_tasks:report_loss", " or row.loss_count + 1 >= limit", ""),
        caught_by=_LOST + "test_a_task_that_is_lost_too_often_is_given_up[task-sqlite]",
    ),
    # --- how tasks end --------------------------------------------------------------------------
    mutant(
        "a forged answer is taken",
        ("store.task_answers:accept_answer", "if not hmac.compare_digest(", "if False and not hmac.compare_digest("),
        caught_by="tests/celery/test_forged.py::test_whatever_is_forged_changes_nothing_but_what_a_hint_may[sqlite]",
    ),
    # --- events that one statement sends --------------------------------------------------------
    mutant(
        "the statement of an event overlooks the wait that began while it waited",
        ("store.sent_events:_insert_and_wake", ", i.c.version == seen.c.version", ""),
        caught_by="tests/store/test_sent_events.py::test_it_does_not_overlook_the_wait_that_began_meanwhile[postgresql]",
    ),
    mutant(
        "the statement of an event wakes a paused run",
        ("store.sent_events:_insert_and_wake", "i.c.status == Status.WAITING.value, ", ""),
        caught_by="tests/store/test_sent_events.py",
    ),
    mutant(
        "an event in doubt that one statement sent is sent again",
        ("operations.events:_Sending.find_sent", "return None if self.inserted is None else ", "return None and "),
        caught_by="tests/engine/test_doubt.py::test_an_event_without_an_id_is_sent_once_also_if_in_doubt[after-postgresql]",
    ),
    # --- sleeps ---------------------------------------------------------------------------------
    mutant(
        "the statement of a sleep ignores the pause that it waited for",
        ("store.sleeps:_suspend_and_insert", "held.c.pause_requested", "sa.false()"),
        caught_by="tests/store/test_sleeps.py::test_it_obeys_the_pause_that_it_waited_for[postgresql]",
    ),
    mutant(
        "a sleep forgets the claim",
        ("store.sleeps:_suspend_and_insert", "**RELEASED,", ""),
        caught_by="tests/store/test_sleeps.py"
        "::test_it_leaves_the_rows_that_a_transaction_leaves[running-for-postgresql]",
    ),
)
