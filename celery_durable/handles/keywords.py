"""Keyword arguments of the methods that create instances, for type checkers. `Workflow` documents them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Required, TypedDict

from celery_durable.model import IfExists, Status
from celery_durable.values import Duration

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


class StartKeywords(TypedDict, total=False):
    """The keyword arguments of `Workflow.create` and `Workflow.acreate`."""

    id: str | None
    if_exists: IfExists
    run_at: datetime | None
    max_run: Duration | None
    labels: Mapping[str, str] | None
    using: str | None


class CreateKeywords(StartKeywords, total=False):
    """The keyword arguments of `Workflow.create`."""

    session: Session | None


class AsyncCreateKeywords(StartKeywords, total=False):
    """The keyword arguments of `Workflow.acreate`."""

    session: AsyncSession | None


class RestartKeywords(TypedDict, total=False):
    """The keyword arguments of `Workflow.restart_or_create`."""

    id: Required[str]
    if_status: Collection[Status | str]
    if_version: Collection[str] | None
    reason: str | None
    labels: Mapping[str, str] | None
