"""Both ways to the same instances: `celery -A proj durable` in this process, `celery-durable` over a real server."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import uvicorn
from click.testing import CliRunner
from fastapi import FastAPI

from celery_durable import Durable
from celery_durable.cli.remote import celery_durable
from celery_durable.http import Access, Unauthenticated, asgi
from tests.cli.conftest import Said, Shop
from tests.http.served import Served


class Connection(Protocol):
    """Calls a command."""

    name: str

    def __call__(self, *words: str, stdin: str | None = None) -> Said: ...


class Direct:
    name = "celery -A <your app> durable"

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    def __call__(self, *words: str, stdin: str | None = None) -> Said:
        return self._shop.pipe(*words, stdin=stdin)

    @contextmanager
    def when_it_waits(self, do: Callable[[], object]) -> Iterator[None]:
        """Do something once a command has nothing to tell for the moment."""
        todo = [do]
        self._shop.clock.meanwhile = lambda: todo.pop()() if todo else None
        yield
        assert not todo


class OverHttp:
    name = "celery-durable"

    def __init__(self, url: str, polls: list[Callable[[], object]]) -> None:
        self.url, self._polls = url, polls

    def __call__(self, *words: str, stdin: str | None = None) -> Said:
        return remote("-b", self.url, "-H", "X-Api-Key: sesame", *words, stdin=stdin)

    @contextmanager
    def when_it_waits(self, do: Callable[[], object]) -> Iterator[None]:
        self._polls.append(do)
        yield
        assert not self._polls


def remote(*words: str, stdin: str | None = None) -> Said:
    done = CliRunner().invoke(celery_durable, words, input=stdin, prog_name="celery-durable")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Said(done.stdout, done.stderr, done.exit_code)


def served(shop: Shop) -> OverHttp:
    """The shop's API behind uvicorn on a free port of this machine."""
    _served.durable = shop.durable
    _polls.clear()
    return OverHttp(_start_server(), _polls)


_served = Served()
_polls: list[Callable[[], object]] = []


def _make_api() -> FastAPI:

    def with_key(access: Access) -> bool:
        if access.request.headers.get("X-Api-Key") != "sesame":
            raise Unauthenticated("Send your key as the header X-Api-Key.")
        if _polls and "wait" in access.request.query_params:
            _polls.pop()()
        return True

    return asgi(cast(Durable, _served), authorize=with_key)


@functools.cache
def _start_server() -> str:
    """Start a server for all tests, because to stop one takes longer than a command. It ends with the process."""
    server = uvicorn.Server(uvicorn.Config(_make_api(), host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    started = threading.Event()
    startup = server.startup

    async def tell(*args: Any, **options: Any) -> None:
        await startup(*args, **options)
        started.set()

    server.startup = tell
    threading.Thread(target=server.run, daemon=True).start()
    started.wait()
    [listening] = server.servers[0].sockets
    return f"http://127.0.0.1:{listening.getsockname()[1]}"
