"""`python -m celery_durable.http` prints the OpenAPI description of the whole API, as docs/openapi.json keeps it."""

from __future__ import annotations

import json

from celery_durable.app import Durable
from celery_durable.http import asgi

_SCHEMES = {
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "bearer": {"type": "http", "scheme": "bearer"},
}
"""Examples: what credentials there are is the application's choice."""


def text() -> str:
    """The description as JSON, with the tick."""
    described = asgi(Durable(), allow_anonymous=True, tick=True, security_schemes=_SCHEMES).openapi()
    return json.dumps(described, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201  # that is what it is for
