"""Calls from async code: in the caller's own transaction, or on the thread of async calls.

That thread is one of the event loop's executor. If a web framework's connection belongs to a thread, the integration
chooses that thread, so that the call joins the transaction that is open there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from celery_durable.errors import ValueRefused
from celery_durable.handles.host import HostInternals

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
