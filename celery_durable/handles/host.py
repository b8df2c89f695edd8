"""The `Durable` through which handles act."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from celery_durable.errors import ValueRefused
from celery_durable.operations import Operations
from celery_durable.runtime import CallAsync, Runtime
from celery_durable.tasks.start import StartDependencies

if TYPE_CHECKING:  # Celery is known to handles by its types alone
    from celery import Celery


class HostInternals(StartDependencies, Protocol):
    """The parts of a `Durable` that handles use."""

    @property
    def app(self) -> Celery:
        """The Celery app."""

    @property
    def operations(self) -> Operations:
        """Creates, reads and changes instances."""

    @property
    def call_async(self) -> CallAsync:
        """Calls a function for async code, on a thread."""

    @property
    def check_using(self) -> Callable[[str], None]:
        """Checks the option ``using``; raises AliasMismatch."""

    @property
    def runtime(self) -> Runtime:
        """The clock."""


class Host(Protocol):
    """The `Durable` through which a handle acts."""

    @property
    def internals(self) -> HostInternals:
        """Its parts."""


def refuse_using(using: str) -> None:
    """Raise ValueRefused for the option ``using``: the database of this `Durable` has no alias."""
    raise ValueRefused(
        f"using={using!r}: databases have aliases only in a Django project with celery_durable.contrib.django. To join "
        "a transaction of SQLAlchemy, pass session=."
    )
