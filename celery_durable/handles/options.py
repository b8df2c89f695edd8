"""The options with which instances are created, for type checkers. The methods of `Workflow` document them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Required, TypedDict

from celery_durable.model import IfExists, Status
from celery_durable.values import Duration

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


class StartOptions(TypedDict, total=False):
    """The options of `Workflow.create` and `Workflow.acreate`."""

    id: str | None
    if_exists: IfExists
    run_at: datetime | None
    max_run: Duration | None
    labels: Mapping[str, str] | None
    using: str | None


class CreateOptions(StartOptions, total=False):
    """The options of `Workflow.create`."""

    session: Session | None


class AsyncCreateOptions(StartOptions, total=False):
    """The options of `Workflow.acreate`."""

    session: AsyncSession | None


class RestartOptions(TypedDict, total=False):
    """The options of `Workflow.restart_or_create`."""

    id: Required[str]
    if_status: Collection[Status | str]
    if_version: Collection[str] | None
    reason: str | None
    labels: Mapping[str, str] | None
