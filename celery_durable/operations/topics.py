"""Topics: one payload for everybody who waits for it now, and the list of who does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from celery_durable import notify, values
from celery_durable.model import Page, Waiter
from celery_durable.operations.base import OperationsBase, check_limit
from celery_durable.store import emissions, topic_waits
from celery_durable.store.emissions import Progress
from celery_durable.store.engine import Store, Tx

_LONGEST_ID = 200
"""Of an emission; its events' ids are made of it."""


class TopicOperations(OperationsBase):
    """The verbs of topics."""

    def emit(self, topic: str, payload: Any = None, *, id: str | None = None) -> int:  # the public name
        """Hand a payload to all who wait on a topic now; answers with how many waits that were.

        It is recorded for each before he is woken, in batches, and for nobody twice. Should this process die in
        between, a dispatcher goes on. ``id``: yours; repeated under it, an emission that is under way is gone on with,
        and a run that got it before gets it no second time. Raises InvalidTopic, NameInvalid, NotSerializable,
        PayloadTooLarge, EmissionMismatch; nothing is written then.
        """
        values.topic(topic)
        emission_id = self._runtime.new_id() if id is None else values.label("Emission id", id, _LONGEST_ID)
        if self._scope is not None:  # ids are each caller's own
            emission_id = f"{self._scope.digest}:{emission_id}"
        text = values.encode(payload, what=f"Payload for topic {topic!r}", limits=self._settings.limits)

        def begin(tx: Tx) -> bool:
            started: dict[str, Any] = {
                "emission_id": emission_id,
                "topic": topic,
                "payload": text,
                "scope": self._scope,
            }
            return emissions.begin(tx, **started, lease=self._settings.lease)

        if not self._store.transact(begin, resolve=lambda tx: emissions.look(tx, emission_id) is not None or None):
            return 0
        resumed, is_over = 0, False
        while not is_over:
            progress = self._hand_out(emission_id)
            if progress is None:  # somebody else has finished it
                return resumed
            _tell(progress)
            self._wake(progress.due_runs)
            resumed, is_over = progress.resumed, progress.is_over
        return resumed

    def _hand_out(self, emission_id: str) -> Progress | None:
        """One batch."""
        made: list[Progress | None] = []

        def work(tx: Tx) -> Progress | None:
            made[:] = [emissions.hand_out(tx, emission_id, lease=self._settings.lease, grace=self._grace)]
            return made[0]

        def was_applied(tx: Tx) -> Progress | None:
            found, ours = emissions.look(tx, emission_id), made[0]
            return ours if ours is not None and (found is None or found.after_pk >= ours.after_pk) else None

        return self._store.transact(work, resolve=was_applied)

    def waiters(self, topic: str, *, cursor: str | None = None, limit: int = 25) -> Page[Waiter]:
        """Who waits on a topic now, oldest instances first; ``cursor`` continues an earlier page.

        Raises InvalidTopic, CursorInvalid.
        """
        values.topic(topic)
        check_limit(limit)
        cursors = self._cursors("waiters", topic)
        after = None if cursor is None else cast("tuple[int, str]", cursors.read(cursor))
        found = self._store.read(
            lambda tx: topic_waits.page(tx, topic, after=after, limit=limit + 1, scope=self._scope)
        )
        items = found[:limit]
        more = cursors.write(*items[-1][0]) if len(found) > limit else None
        return Page(tuple(waiter for _, waiter in items), more)


def go_on_emitting(store: Store) -> bool:
    """Hand out one batch of an emission whose emitter has died; False where there is none.

    Whoever sweeps calls it until then. It wakes nobody: who was made due is due for the very next look.
    """
    abandoned = store.read(emissions.find_abandoned)
    if abandoned is None:
        return False
    at_once = timedelta(0)
    progress = store.transact(lambda tx: emissions.hand_out(tx, abandoned, lease=at_once, grace=at_once))
    if progress is not None:
        _tell(progress)
    return True


def _tell(progress: Progress) -> None:
    for ref, topic, event_id in progress.received:
        notify.event_received(notify.AcceptedEvent(ref, topic, event_id))
