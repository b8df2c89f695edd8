"""The `Durable` through which handles act."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from celery_durable.all_operations import Operations
from celery_durable.errors import ValueRefused
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


# Calls from async code: in the caller's own transaction, or on the thread of async calls.
#
# That thread is one of the event loop's executor. If a web framework's connection belongs to a thread, the integration
# chooses that thread, so that the call joins the transaction that is open there.


if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

T = TypeVar("T")


async def call_with(session: AsyncSession | None, internals: HostInternals, call: Callable[[Session | None], T]) -> T:
    """Call ``call`` with the session inside an AsyncSession, whose statements the event loop awaits.

    Without a session it is called on the thread of async calls, with None. Raises ValueRefused for a session that is
    not async.
    """
    if session is None:
        return await internals.call_async(lambda: call(None))
    if not hasattr(session, "run_sync"):
        raise ValueRefused(
            "session= is not an AsyncSession: pass it to the method that is not async, such as `create()`."
        )
    return await session.run_sync(call)
