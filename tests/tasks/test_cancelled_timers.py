"""The timer of a worker's main loop, from which cancelled entries are removed before their time."""

from __future__ import annotations

from types import SimpleNamespace

from celery import Celery
from kombu.asynchronous import Hub
from kombu.asynchronous.timer import Timer

from celery_durable import Durable
from celery_durable.tasks.worker import CancelledTimers, DurableStep

DAY_SECONDS = 86_400


def test_the_timer_stays_small_although_each_message_leaves_a_cancelled_entry() -> None:
    timer = Timer()
    cancelled_timers, sizes = CancelledTimers(timer), []
    for _ in range(20):
        for _ in range(500):
            timer.call_after(DAY_SECONDS, print).cancel()
        cancelled_timers.remove_if_many()
        sizes.append(len(timer))
    assert max(sizes) <= 1_000


def test_a_worker_removes_them_from_its_main_loop(app: Celery, durable: Durable) -> None:
    worker = app.WorkController(pool="solo", loglevel="critical")
    [step] = [each for each in worker.steps if isinstance(each, DurableStep)]
    hub, consumer = Hub(timer=Timer()), SimpleNamespace(connection=None)
    for _ in range(1_500):
        hub.call_later(DAY_SECONDS, print).cancel()
    step.register_with_event_loop(SimpleNamespace(pool=None, consumer=consumer), hub)
    live = [entry for _, _, entry in hub.timer.queue if not entry.canceled]
    assert len(hub.timer) == 1_500 + len(live)

    for entry in live:  # as the loop does when they are due
        entry()
    assert not [each for each in hub.timer.queue if each.entry.canceled]


def test_live_entries_keep_their_times_and_their_order() -> None:
    timer, fired = Timer(), []
    for number in reversed(range(1_500)):
        past = float(number) - DAY_SECONDS  # before the machine was started, so before every monotonic time
        timer.call_at(past, fired.append, (number,))
        timer.call_at(past, fired.append, (-1,)).cancel()
    later = timer.call_after(DAY_SECONDS, print)
    CancelledTimers(timer).remove_if_many()
    assert len(timer) == 1_501

    schedule = iter(timer)
    while (entry := next(schedule)[1]) is not None:
        entry()
    assert fired == list(range(1_500))
    later.cancel()


def test_many_live_entries_are_not_looked_at_again_until_they_have_doubled() -> None:
    timer = Timer()
    cancelled_timers = CancelledTimers(timer)
    for _ in range(1_500):
        timer.call_after(DAY_SECONDS, print)
    cancelled_timers.remove_if_many()
    for _ in range(2_400):
        timer.call_after(DAY_SECONDS, print).cancel()
    cancelled_timers.remove_if_many()
    assert len(timer) == 3_900
    for _ in range(200):
        timer.call_after(DAY_SECONDS, print).cancel()
    cancelled_timers.remove_if_many()
    assert len(timer) == 1_500
