"""The Durable that an application shared by many tests serves."""

from __future__ import annotations

from typing import Any

from celery_durable import Durable


class Served:
    """Stands for the Durable of the running test.

    To build an application takes FastAPI ten times as long as a request.
    """

    durable: Durable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.durable, name)
