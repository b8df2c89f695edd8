"""Bugs in the store: task steps, maps, their answers and lost tasks."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_MAPS = "tests/engine/test_maps.py::"
_LOST = "tests/engine/test_lost.py::"
_TASKS = "tests/engine/test_tasks.py::"
_ANSWER_ITEM = "store.task_answers:_answer_item"

MUTANTS = (
    # --- steps that others do -------------------------------------------------------------------
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
    ),
    # --- maps -----------------------------------------------------------------------------------
    mutant(
        "an item takes what an earlier attempt answers",
        ("store.task_answers:_update_item", 'item.c.attempts == param("attempt", sa.Integer),', ""),
        ("store.sent_attempts:map_item_conditions", 'item.attempts == param("attempt", sa.Integer),', ""),
        ("store.task_answers:accept_answer", "if not hmac.compare_digest(", "if False and not hmac.compare_digest("),
        caught_by=_MAPS + "test_an_item_that_failed_is_tried_again_later_under_a_new_id[sqlite]",
    ),
    mutant(
        "an item is answered as often as somebody likes",
        ("store.task_answers:_update_item", "item.c.status == sa.literal_column(f\"'{ItemStatus.SENT.value}'\"),", ""),
        (
            "store.sent_attempts:_unanswered_conditions",
            "item.status == sa.literal_column(f\"'{ItemStatus.SENT.value}'\"),",
            "",
        ),
        caught_by=_MAPS + "test_an_item_is_answered_once[sqlite]",
    ),
    mutant(
        "nobody is woken when the last item has answered",
        (
            "store.task_answers:_answer_item",
            "needs_pass = status is ItemStatus.FAILED or (not messages and items.are_all_finished(tx, *step_key))",
            "needs_pass = False",
        ),
        caught_by=_MAPS + "test_each_item_is_done_by_a_task_of_its_own[sqlite]",
    ),
    mutant(
        "every answer wakes the workflow",
        ("store.task_answers:_answer_item", "if needs_pass and is_suspended", "if is_suspended"),
        caught_by=_MAPS + "test_each_item_is_done_by_a_task_of_its_own[sqlite]",
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
            "sa.or_(_has_status(s, ItemStatus.FAILED), _is_late(s))",
            "_has_status(s, ItemStatus.FAILED)",
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
            "_has_status(s, ItemStatus.PENDING), _is_ready(s)",
            "_has_status(s, ItemStatus.PENDING)",
        ),
    ),
    mutant(
        "the message of an item that an answer sends is not kept",
        (_ANSWER_ITEM, "outbox.insert(tx, messages, ", "outbox.insert(tx, (), "),
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
)
