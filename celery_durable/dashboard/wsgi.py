"""The pages for WSGI servers: each request runs the ASGI application in an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from starlette.types import ASGIApp

from celery_durable.dashboard.visits import BUFFERED

_PART_BYTES = 64 * 1024
"""The body is read in parts, so that one which exceeds the limit is refused before it is read as a whole."""
StartResponse = Callable[[str, list[tuple[str, str]]], object]
"""How a WSGI application begins its response (PEP 3333)."""


class WsgiPages:
    """A WSGI application that serves an ASGI application whose responses are short."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, environ: Mapping[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Serve a request. Hooks run in the context variables of the caller, so they find what it has set."""
        sent: list[MutableMapping[str, Any]] = []
        asyncio.run(self._serve(environ, sent))
        start, *body = sent
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
        start_response(f"{start['status']} Status", headers)
        return [b"".join(each.get("body", b"") for each in body)]

    async def _serve(self, environ: Mapping[str, Any], sent: list[MutableMapping[str, Any]]) -> None:
        left = int(environ.get("CONTENT_LENGTH") or 0)

        async def receive() -> MutableMapping[str, Any]:
            nonlocal left
            if left < 0:
                return await asyncio.Future()  # nobody disconnects
            part = environ["wsgi.input"].read(min(left, _PART_BYTES))
            left = left - len(part) if part and left > len(part) else -1
            return {"type": "http.request", "body": part, "more_body": left > 0}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await self._app(_build_scope(environ), receive, send)


def _build_scope(environ: Mapping[str, Any]) -> MutableMapping[str, Any]:
    # WSGI hands over the bytes of a path as characters of Latin-1.
    root, path = (environ.get(name, "").encode("latin-1").decode() for name in ("SCRIPT_NAME", "PATH_INFO"))
    headers = {name[5:]: value for name, value in environ.items() if name.startswith("HTTP_")}
    headers |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": environ["REQUEST_METHOD"],
        "scheme": environ["wsgi.url_scheme"],
        "path": root + path,
        "raw_path": (root + path).encode(),
        "root_path": root,
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1"),
        "headers": [
            (name.replace("_", "-").lower().encode(), value.encode("latin-1")) for name, value in headers.items()
        ],
        BUFFERED: True,
        "server": (environ.get("SERVER_NAME", ""), int(environ.get("SERVER_PORT") or 80)),
    }
