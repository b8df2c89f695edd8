"""`LimitHandle`: a limit of the database, to read it and to change its numbers."""

from __future__ import annotations

from collections.abc import Callable

from celery_durable.all_operations import Operations
from celery_durable.model import LimitDetails
from celery_durable.values import UNSET

_ACTOR = "Durable.limits"


class LimitHandle:
    """A limit of the database.

    Attributes:
        name: The limit's name.
    """

    def __init__(self, name: str, operations: Callable[[], Operations]) -> None:
        self.name, self._operations = name, operations

    def get(self, *, key: str = "") -> LimitDetails:
        """Read who holds the limit, and who waits for it.

        Args:
            key: What the limit's function ``by`` returned; empty without one.

        Raises:
            LimitNotFound: No step has asked for this limit and key yet.
            StoreUnavailable: The database cannot do this now.
        """
        return self._operations().limits.get(self.name, key=key)

    def set(
        self, *, at_once: int | None = UNSET, rate: str | None = UNSET, key: str | None = None, by: str = _ACTOR
    ) -> None:
        """Replace numbers of the code, until `reset`. What is left out stays as it is.

        A lower number stops no step that runs. With a higher one, waiting steps continue at once.

        Args:
            at_once: How many may hold the limit at the same time; None for the number of the code.
            rate: How many start in a time, such as "90 per second"; None for the rate of the code.
            key: What the limit's function ``by`` returned; None for all keys, also for those that come later.
            by: Who does it. `LimitRecord.set_by` shows it.

        Raises:
            ConfigInvalid: A number cannot be used, or none is given.
            LimitNotFound: No step has asked for this limit and key yet.
            StoreUnavailable: The database cannot do this now.
        """
        self._operations().limits.set(self.name, by=by, key=key, at_once=at_once, rate=rate)

    def reset(self, *, key: str | None = None, by: str = _ACTOR) -> None:
        """Let the numbers of the code count again.

        Args:
            key: As in `set`.
            by: Who does it, for the log.

        Raises:
            LimitNotFound: No step has asked for this limit and key yet.
            StoreUnavailable: The database cannot do this now.
        """
        self.set(at_once=None, rate=None, key=key, by=by)


class Limits:
    """The limits of an app's database: ``durable.limits["stripe"]``."""

    def __init__(self, operations: Callable[[], Operations]) -> None:
        self._operations = operations

    def __getitem__(self, name: str) -> LimitHandle:
        return LimitHandle(name, self._operations)
