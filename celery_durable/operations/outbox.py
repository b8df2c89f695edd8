"""Operations on the outbox: list it, retry events that were given up, delete entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from celery_durable import values
from celery_durable.errors import NameInvalid, NotGivenUp, NotInOutbox
from celery_durable.operations.base import OperationsBase
from celery_durable.store import outbox
from celery_durable.store.engine import Tx
from celery_durable.store.outbox import OutboxEntry

_MAX_ID_LENGTH = 36


class OutboxOperations(OperationsBase):
    """The operations on the outbox."""

    def outbox(self, *, given_up: bool = False, limit: int = 100) -> list[OutboxEntry]:
        """Return the unfinished tasks and outbound events, oldest first.

        ``given_up`` selects the events that were given up.
        """
        return self._store.read(lambda tx: outbox.read_entries(tx, given_up=given_up, limit=limit, scope=self._scope))

    def retry_outbox(self, ids: Sequence[str]) -> list[OutboxEntry]:
        """Retry events that were given up, with fresh attempts. Returns their entries as they were before.

        It changes all of them or none. Raises NotInOutbox, NotGivenUp.
        """

        def retry(tx: Tx) -> None:
            outbox.retry_events(tx, ids)

        def is_done(left: list[OutboxEntry]) -> bool:
            return not any(message.is_given_up for message in left)

        return self._change(ids, retry, is_done=is_done, only_given_up=True)

    def drop_outbox(self, ids: Sequence[str]) -> list[OutboxEntry]:
        """Delete tasks or events permanently, given up or not. Returns their entries as they were before.

        It deletes all of them or none. Raises NotInOutbox.
        """

        def drop(tx: Tx) -> None:
            outbox.delete(tx, ids)

        return self._change(ids, drop, is_done=lambda left: not left)

    def _change(
        self,
        ids: Sequence[str],
        change: Callable[[Tx], None],
        *,
        is_done: Callable[[list[OutboxEntry]], bool],
        only_given_up: bool = False,
    ) -> list[OutboxEntry]:
        """Apply a change to these entries. After a commit in doubt, ``is_done`` decides from the remaining entries."""
        # A NUL or a half surrogate pair must not reach the database, see `_is_possible_id`.
        if impossible := [each for each in ids if not _is_possible_id(each)]:
            raise NotInOutbox(impossible)
        found: list[OutboxEntry] = []

        def work(tx: Tx) -> list[OutboxEntry]:
            found[:] = outbox.lock_entries(tx, ids, scope=self._scope)
            there = {message.id for message in found}
            if missing := [each for each in ids if each not in there]:
                raise NotInOutbox(missing)
            for message in found if only_given_up else ():
                if not message.is_given_up:
                    raise NotGivenUp(message.id, message.kind, message.name)
            change(tx)
            return list(found)

        return self._store.transact(
            work,
            find_committed=lambda tx: list(found) if is_done(outbox.lock_entries(tx, ids, scope=self._scope)) else None,
        )


def _is_possible_id(id_: str) -> bool:
    """Whether a text can be an id. Databases treat a NUL or half of a surrogate pair differently."""
    try:
        values.check_text_name("Id", id_, _MAX_ID_LENGTH)
    except NameInvalid:
        return False
    return True
