"""What queries return about limits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from pydantic import Field

from celery_durable.model.overview import Count
from celery_durable.model.record import Milliseconds, Record, WorkflowName
from celery_durable.model.states import HoldState


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRecord(Record):
    """A limit, or one key of it, as it is now.

    Attributes:
        name: The limit's name.
        key: What its function ``by`` returned; empty without one.
        at_once: How many may hold it at the same time; None for no limit.
        rate: How many start in a time, as text; None for no limit.
        set_by: Who has set these numbers; None if they are those of the code.
        held: How many hold it, or may take it now.
        waiting: How many wait for it, counted to 10,000.
        longest_wait: How long the first of them has waited; None if nothing waits.
    """

    name: str
    key: str
    at_once: int | None = None
    rate: str | None = None
    set_by: str | None = None
    held: int
    waiting: Count
    longest_wait: Annotated[Milliseconds | None, Field(alias="longestWaitMs")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitHold(Record):
    """A step that holds a limit, or waits for it.

    Attributes:
        key: The limit's key.
        workflow: The workflow's name.
        instance_id: The instance's id.
        run_number: The number of the run.
        step_key: The step; None if the run holds the limit, for its workflow.
        position: The position of a map's item; None if the step itself holds the limit.
        state: What the step has of the limit.
        fair_key: What the limit's function ``fair`` returned; empty without one.
        since: When the step got the limit, or asked for it if it waits.
    """

    key: str
    workflow: WorkflowName
    instance_id: str
    run_number: int
    step_key: str | None = None
    position: int | None = None
    state: HoldState
    fair_key: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDetails(Record):
    """One key of a limit, with the steps that hold it and the first ones that wait.

    Attributes:
        limit: The limit.
        holders: Those that hold it, longest first, at most 100.
        waiting: The first 20 that wait. With ``fair``, the first one of each of up to 20 values.
    """

    limit: LimitRecord
    holders: tuple[LimitHold, ...]
    waiting: tuple[LimitHold, ...]


@dataclass(frozen=True, slots=True)
class LimitWait(Record):
    """A step that waits for a limit. ``place``: how many of its value of ``fair`` are before it, plus one."""

    step_key: str
    limit: LimitRecord
    place: Count
    has_turns: bool
    """Whether the values of ``fair`` take turns."""
    longest_holder: LimitHold | None
    ancestor: LimitHold | None = None
    """A holder that waits for this run: its parent, or another ancestor."""
