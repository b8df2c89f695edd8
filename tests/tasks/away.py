"""A result backend whose server is away."""

from __future__ import annotations

from typing import Any, NoReturn

from celery.backends.base import BaseBackend


class AwayBackend(BaseBackend):
    """It stores nothing, and says so."""

    def _store_result(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            raise OSError("refused")  # as its driver says
        except OSError as exc:
            raise ConnectionError("the result backend is away") from exc
