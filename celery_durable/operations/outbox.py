"""Operations on the outbox: list its messages, retry those that were given up, delete messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from celery_durable import values
from celery_durable.errors import NameInvalid, NotGivenUp, NotInOutbox
from celery_durable.operations.context import OperationContext
from celery_durable.store.engine import Tx
from celery_durable.store.runs import outbox
from celery_durable.store.runs.outbox import OutboxEntry

_MAX_ID_LENGTH = 36


class OutboxOperations:
    """The operations on the outbox."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def read(self, *, given_up: bool = False, limit: int = 100) -> list[OutboxEntry]:
        """Return the tasks and outbound events that are not sent or delivered yet, oldest first."""
        return self._context.read_list(lambda tx: outbox.read_entries(tx, given_up=given_up, limit=limit))

    def retry(self, ids: Sequence[str]) -> list[OutboxEntry]:
        """Retry messages that were given up, with fresh attempts: all of them or none."""
        return self._change(ids, outbox.retry, only_given_up=True)

    def drop(self, ids: Sequence[str]) -> list[OutboxEntry]:
        """Delete tasks or events permanently, given up or not: all of them or none."""
        return self._change(ids, outbox.delete)

    def _change(
        self, ids: Sequence[str], change: Callable[[Tx, Sequence[str]], object], *, only_given_up: bool = False
    ) -> list[OutboxEntry]:
        """Apply a change to these entries, and return them as they were before."""
        # A NUL or a half surrogate pair must not reach the database, see `_is_possible_id`.
        if impossible := [each for each in ids if not _is_possible_id(each)]:
            raise NotInOutbox(impossible)

        def work(tx: Tx) -> list[OutboxEntry]:
            found = outbox.lock_entries(tx, ids)
            found_ids = {entry.id for entry in found}
            if missing := [each for each in ids if each not in found_ids]:
                raise NotInOutbox(missing)
            for entry in found if only_given_up else ():
                if not entry.is_given_up:
                    raise NotGivenUp(entry.id, entry.kind, entry.name)
            change(tx, ids)
            return found

        return self._context.store.transact(work)


def _is_possible_id(id_: str) -> bool:
    """Whether a text can be an id. Databases treat a NUL, or half of a surrogate pair, differently."""
    try:
        values.check_text_name("Id", id_, _MAX_ID_LENGTH)
    except NameInvalid:
        return False
    return True
