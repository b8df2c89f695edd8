"""The outbox: look what is in it, have what was given up delivered again, drop what is not wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from celery_durable import values
from celery_durable.errors import NameInvalid, NotGivenUp, NotInOutbox
from celery_durable.operations.base import OperationsBase
from celery_durable.store import outbox
from celery_durable.store.engine import Tx
from celery_durable.store.outbox import OutboxEntry

_LONGEST = 36


class OutboxOperations(OperationsBase):
    """The verbs."""

    def outbox(self, *, given_up: bool = False, limit: int = 100) -> list[OutboxEntry]:
        """The tasks and outbound events that are not done with, oldest first; ``given_up``: only what was."""
        return self._store.read(lambda tx: outbox.read(tx, given_up=given_up, limit=limit, scope=self._scope))

    def retry_outbox(self, ids: Sequence[str]) -> list[OutboxEntry]:
        """Have events that were given up delivered again, with fresh attempts; answers with what they were.

        All of them or none. Raises NotInOutbox, NotGivenUp.
        """

        def retry(tx: Tx) -> None:
            outbox.retry(tx, ids)

        def is_done(left: list[OutboxEntry]) -> bool:
            return not any(message.is_given_up for message in left)

        return self._change(ids, retry, is_done=is_done, only_given_up=True)

    def drop_outbox(self, ids: Sequence[str]) -> list[OutboxEntry]:
        """Delete tasks or events for good, whether they were given up or not; answers with what they were.

        All of them or none. Raises NotInOutbox.
        """

        def drop(tx: Tx) -> None:
            outbox.remove(tx, ids)

        return self._change(ids, drop, is_done=lambda left: not left)

    def _change(
        self,
        ids: Sequence[str],
        change: Callable[[Tx], None],
        *,
        is_done: Callable[[list[OutboxEntry]], bool],
        only_given_up: bool = False,
    ) -> list[OutboxEntry]:
        """``is_done``: judges from what is left whether a change of which nobody knows has happened."""
        if impossible := [each for each in ids if not _can_be_one(each)]:
            raise NotInOutbox(impossible)
        found: list[OutboxEntry] = []

        def work(tx: Tx) -> list[OutboxEntry]:
            found[:] = outbox.lock(tx, ids, scope=self._scope)
            there = {message.id for message in found}
            if missing := [each for each in ids if each not in there]:
                raise NotInOutbox(missing)
            for message in found if only_given_up else ():
                if not message.is_given_up:
                    raise NotGivenUp(message.id, message.kind, message.name)
            change(tx)
            return list(found)

        return self._store.transact(
            work, resolve=lambda tx: list(found) if is_done(outbox.lock(tx, ids, scope=self._scope)) else None
        )


def _can_be_one(id_: str) -> bool:
    """Databases differ in what they make of a NUL or of half a surrogate pair."""
    try:
        values.label("Id", id_, _LONGEST)
    except NameInvalid:
        return False
    return True
