"""The agenda as a dispatcher reads it, several times a second."""

from __future__ import annotations

import functools

from celery_durable.runtime import Runtime
from celery_durable.store import schedule
from celery_durable.store.engine import Store
from celery_durable.store.schedule import Agenda
from celery_durable.store.time_limits import LOOP

_SLOW_SECONDS = 0.005
_PAUSE_FACTOR, _MAX_PAUSE_SECONDS = 100, 5.0


class AgendaReader:
    """Reads the agenda. While reading all of it is slow, it reads most times only what it knows to be there.

    It is slow while a transaction keeps an old snapshot, and with it the index entries of rows that were moved. After
    two slow reads the next complete one waits for a hundred times the time that it took, at most five seconds. So late
    are, in that state alone, the first run of a new queue, and a row that was committed a minute after its time.
    """

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store, self._runtime = store, runtime
        self._known: Agenda | None = None
        """The last complete agenda, if reading it was slow."""
        self._complete_at = 0.0

    def read(self) -> Agenda:
        """Read the agenda, or what is left of it in the queues that are known."""
        if self._known is not None and self._runtime.monotonic() < self._complete_at:
            agenda = self._store.read(functools.partial(schedule.read_known, known=self._known), timeouts=LOOP)
            if agenda.now >= self._known.now:  # else the database's clock was set back: all known times are too late
                return agenda
        began = self._runtime.monotonic()
        agenda = self._store.read(schedule.read, timeouts=LOOP)
        seconds = self._runtime.monotonic() - began
        was_slow, self._known = self._known is not None, agenda if seconds > _SLOW_SECONDS else None
        pause = min(_PAUSE_FACTOR * seconds, _MAX_PAUSE_SECONDS) if was_slow else 0.0
        self._complete_at = began + seconds + pause
        return agenda
