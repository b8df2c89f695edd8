"""Which instances a caller may reach, in all that he asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scope:
    """The instances that have all of ``labels``, and whose ids begin with ``id_prefix``.

    It says something: a scope without labels and without a prefix is a ValueError, since it would be everything.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    id_prefix: str = ""

    def __post_init__(self) -> None:
        texts = [self.id_prefix, *self.labels, *self.labels.values()]
        if not all(isinstance(text, str) for text in texts) or not all(texts[1:]) or not any(texts):
            raise ValueError("A scope names labels with their values, a prefix of ids, or both.")

    def intersect(self, other: Scope) -> Scope | None:
        """What is in both; None where nothing can be."""
        shorter, longer = sorted((self.id_prefix, other.id_prefix), key=len)
        labels = {**self.labels, **other.labels}
        if not longer.startswith(shorter) or any(labels[name] != value for name, value in self.labels.items()):
            return None
        return Scope(labels, longer)

    def allows_id(self, instance_id: str) -> bool:
        """Whether an instance of this id may be in it."""
        return instance_id.startswith(self.id_prefix)

    def to_text(self) -> str:
        """As it is stored; equal for equal scopes."""
        return json.dumps([dict(sorted(self.labels.items())), self.id_prefix], ensure_ascii=True)

    @classmethod
    def from_text(cls, text: str) -> Scope:
        """From what `to_text` wrote."""
        return cls(*json.loads(text))

    @property
    def digest(self) -> str:
        """Short, and another one for another scope."""
        return hashlib.blake2b(self.to_text().encode(), digest_size=12).hexdigest()
