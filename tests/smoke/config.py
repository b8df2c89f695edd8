"""Where the processes of one test meet: database, broker, files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Config:
    """Where an application lives; processes get it in their environment."""

    name: str
    folder: str
    broker_url: str
    database_url: str
    bodies_url: str
    control_port: int = 0
    role: str = "client"
    settings: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return {"DURABLE_SMOKE": json.dumps(asdict(self))}

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Config:
        return cls(**json.loads(environment["DURABLE_SMOKE"]))

    def path(self, *parts: str) -> Path:
        return Path(self.folder, *parts)
