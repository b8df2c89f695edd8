"""The `Durable` through which handles act."""

from __future__ import annotations

from typing import Protocol

from celery_durable.operations import Operations
from celery_durable.runtime import Runtime


class HostInternals(Protocol):
    """The parts of a `Durable` that handles use."""

    @property
    def operations(self) -> Operations:
        """Creates, reads and changes instances."""

    @property
    def runtime(self) -> Runtime:
        """The clock."""


class Host(Protocol):
    """The `Durable` through which a handle acts."""

    @property
    def internals(self) -> HostInternals:
        """Its parts."""
