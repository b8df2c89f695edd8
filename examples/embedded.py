"""A broker and a database that need no server, so that the examples run on any machine.

Messages and tables lie in a folder of yours under the system's temporary one, or in ``DURABLE_EXAMPLES_DIR``.
Good for one machine and a first look; in earnest you set ``CELERY_BROKER_URL`` and ``DURABLE_DATABASE_URL``.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, filesystem

FOLDER = Path(os.environ.get("DURABLE_EXAMPLES_DIR") or Path(tempfile.gettempdir(), f"durable-examples-{os.getuid()}"))
TRANSPORT_ALIASES["embedded"] = "examples.embedded:Transport"


def settings() -> dict[str, Any]:
    """Celery settings from the environment, with defaults that need no server."""
    broker, database = os.environ.get("CELERY_BROKER_URL"), os.environ.get("DURABLE_DATABASE_URL")
    if not broker or not database:
        FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "broker_url": broker or "embedded://",
        "durable_database_url": database or f"sqlite:///{FOLDER}/durable.sqlite3",
    }
    return found if broker else found | {"broker_transport_options": _folders()}


def _folders() -> dict[str, Any]:
    queue, done = FOLDER / "queue", FOLDER / "queue-done"
    for folder in (queue, done):
        folder.mkdir(exist_ok=True)
    return {
        "data_folder_in": str(queue),
        "data_folder_out": str(queue),
        "control_folder": str(FOLDER / "queue-control"),
        "processed_folder": str(done),
        "store_processed": True,
        "polling_interval": 0.05,
    }


class Channel(filesystem.Channel):
    """Kombu's channel of files, except that a message appears whole: another process may look while it is written."""

    def _put(self, queue: str, payload: dict[str, Any], **_: Any) -> None:  # type: ignore[override]  # kombu's stubs differ
        name = f"{time.monotonic_ns()}_{uuid.uuid4()}.{queue}.msg"
        folder = Path(self.data_folder_out)
        part = folder / f".{name}"
        part.write_text(json.dumps(payload))
        part.rename(folder / name)


class Transport(filesystem.Transport):
    Channel = Channel
