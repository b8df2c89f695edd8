"""A bug to be planted, as data: where, which lines, and what they become."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """A replacement, wherever ``old`` is, in the source of one function: module:name, without ``celery_durable.``."""

    where: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A bug. ``caught_by``: a test, where it is not the simulation."""

    name: str
    edits: tuple[Edit, ...]
    caught_by: str | None = None


def mutant(name: str, *edits: tuple[str, str, str], caught_by: str | None = None) -> Mutant:
    return Mutant(name, tuple(Edit(*edit) for edit in edits), caught_by)
