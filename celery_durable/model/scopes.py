"""Scopes: they limit a caller to some of the instances, in every operation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Permission(StrEnum):
    """The permission that a route requires. Every route requires one."""

    CREATION = "creation"
    READING = "reading"
    MANAGEMENT = "management"
    EVENTS = "events"
    TICK = "tick"
    HEALTH = "health"


@dataclass(frozen=True, slots=True)
class Scope:
    """The instances that have all of ``labels``, and whose ids begin with ``id_prefix``.

    Raises ValueError if there are neither labels nor a prefix, because such a scope would allow every instance.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    id_prefix: str = ""

    def __post_init__(self) -> None:
        texts = [self.id_prefix, *self.labels, *self.labels.values()]
        if not all(isinstance(text, str) for text in texts) or not all(texts[1:]) or not any(texts):
            raise ValueError("A scope names labels with their values, a prefix of ids, or both.")

    def intersect(self, other: Scope) -> Scope | None:
        """Return the scope of the instances that are in both scopes, or None if there can be none."""
        shorter, longer = sorted((self.id_prefix, other.id_prefix), key=len)
        labels = {**self.labels, **other.labels}
        if not longer.startswith(shorter) or any(labels[name] != value for name, value in self.labels.items()):
            return None
        return Scope(labels, longer)

    def allows_id(self, instance_id: str) -> bool:
        """Whether an instance with this id can be in the scope. It does not check labels."""
        return instance_id.startswith(self.id_prefix)

    def to_text(self) -> str:
        """Return the stored form. Equal scopes have equal texts."""
        return json.dumps([dict(sorted(self.labels.items())), self.id_prefix], ensure_ascii=True)

    @classmethod
    def from_text(cls, text: str) -> Scope:
        """Parse the stored form."""
        return cls(*json.loads(text))

    @property
    def digest(self) -> str:
        """A short hash of the scope."""
        return hashlib.blake2b(self.to_text().encode(), digest_size=12).hexdigest()
