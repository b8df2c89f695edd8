"""Limits as operators see and set them. What they set counts until it is reset."""

from __future__ import annotations

import functools
import logging
from typing import cast

from celery_durable import values
from celery_durable.errors import ConfigInvalid, LimitNotFound
from celery_durable.model import LimitDetails, LimitRecord, Page
from celery_durable.operations.context import OperationContext, check_limit
from celery_durable.operations.limit_queue import LimitQueue
from celery_durable.store.engine import Tx
from celery_durable.store.instances import limit_reads, limit_waits
from celery_durable.store.runs.holds import LimitKey
from celery_durable.values import UNSET

logger = logging.getLogger("celery_durable.limits")

_MAX_ACTOR_LENGTH, _MAX_SERVED = 255, 100


class LimitOperations:
    """The operations on limits."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context
        self.queue = LimitQueue(context.store, context.settings, context.publish_runs)

    def list(self, *, name: str | None = None, cursor: str | None = None, limit: int = 25) -> Page[LimitRecord]:
        """Return a page of limits and keys, in order; of one limit if ``name`` is given."""
        check_limit(limit)
        cursors = self._context.cursors("limits", name)
        after = None if cursor is None else LimitKey(*cast("tuple[str, str]", cursors.read(cursor)))
        found = self._context.read_list(
            functools.partial(limit_reads.read_limits, name=name, after=after, limit=limit + 1)
        )
        items = found[:limit]
        more = cursors.write(items[-1].name, items[-1].key) if len(found) > limit else None
        return Page(tuple(items), more)

    def get(self, name: str, *, key: str = "") -> LimitDetails:
        """Return one key of a limit with its holders and the first that wait; raises LimitNotFound."""

        def read(tx: Tx) -> LimitDetails:
            found = limit_reads.read_details(tx, LimitKey(name, key))
            if found is None:
                raise LimitNotFound(name, key, has_keys=not key and limit_reads.has_keys(tx, name))
            return found

        return self._context.read_list(read)

    def set(
        self, name: str, *, by: str, key: str | None = None, at_once: int | None = UNSET, rate: str | None = UNSET
    ) -> None:
        """Set numbers of a limit, of all its keys if ``key`` is None. What is left out stays as it is.

        None is the number of the code: two of them reset the limit. ``by``: who does it. Raises LimitNotFound and
        ConfigInvalid.
        """
        given = {name: each for name, each in (("at_once", at_once), ("rate", rate)) if each is not UNSET}
        if not given:
            raise ConfigInvalid("at_once", None, "give at_once=, rate=, or both")
        values.check_numbers(given.get("at_once"), given.get("rate"))
        actor = values.check_text_name("The person who does it", by, _MAX_ACTOR_LENGTH)
        is_reset = len(given) == 2 and not any(given.values())
        numbers = {f"set_{number}": each for number, each in given.items()} | {"set_by": None if is_reset else actor}

        def write(tx: Tx) -> list[LimitKey]:
            if not limit_reads.set_numbers(tx, name, key, numbers):
                raise LimitNotFound(name, key)
            if key is not None:
                return [LimitKey(name, key)]
            found = limit_waits.find_keys(tx, after=LimitKey(name, ""), limit=_MAX_SERVED)
            return [LimitKey(name, ""), *(each for each in found if each.name == name)]  # a job serves the others

        keys = self._context.store.transact(write)
        logger.info("Limit %r was %s by %s: %s", name, "reset" if is_reset else "set", actor, given)
        self.queue.serve(keys)
