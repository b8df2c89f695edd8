"""The permissions that requests require."""

from __future__ import annotations

from enum import StrEnum


class Permission(StrEnum):
    """The permission that a route requires. Every route requires one."""

    CREATION = "creation"
    READING = "reading"
    MANAGEMENT = "management"
    EVENTS = "events"
    TICK = "tick"
    HEALTH = "health"
