"""A server of the dashboard for one person on this machine. The browser that first opens its link may use it."""

from __future__ import annotations

import getpass
import hashlib
import socket
from hmac import compare_digest

import uvicorn
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from celery_durable.app import Durable
from celery_durable.dashboard.app import make_pages
from celery_durable.dashboard.visits import Site
from celery_durable.http import Access, Authorize, Unauthenticated
from celery_durable.runtime import Runtime

_HOST = "127.0.0.1"
_PARAMETER = "link"


class LocalServer:
    """Serves the pages on 127.0.0.1. Raises OSError if the port cannot be used; 0 is any free one.

    ``visitor``: the secret of the cookie, for a process that continues another one. By default a new one.
    """

    def __init__(
        self, durable: Durable, *, port: int, read_only: bool, has_broker: bool = True, visitor: str | None = None
    ) -> None:
        hook = OneTimeLink(durable.internals.runtime, visitor=visitor)
        hooks = Authorize(request=hook, actor=_find_user)
        site = Site(durable, hooks, allow_anonymous=False, is_read_only=read_only, has_broker=has_broker)
        self._listening = socket.create_server((_HOST, port))
        # An open page of an instance holds a stream, which does not end by itself.
        config = uvicorn.Config(make_pages(site), log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self.link = hook.make_url(f"http://{_HOST}:{self._listening.getsockname()[1]}/")

    def run(self) -> None:
        """Serve until the process gets SIGINT or SIGTERM; in a thread, until `stop`."""
        self._server.run([self._listening])

    def stop(self) -> None:
        """End `run`, after the requests that are open, or a second."""
        self._server.should_exit = True


def _find_user(_: Access) -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may have no name
        return None


class OneTimeLink:
    """A hook for every request. The link that it makes works once, and leaves a cookie."""

    def __init__(self, runtime: Runtime, *, visitor: str | None = None) -> None:
        self._unused = {runtime.new_secret()}
        self._visitor = visitor or runtime.new_secret()
        # Browsers share the cookies of all ports of a machine, so each dashboard needs a name of its own.
        self._cookie = f"durable_visitor_{hashlib.sha256(self._visitor.encode()).hexdigest()[:8]}"

    def make_url(self, address: str) -> str:
        """Return the link. ``address``: the first page."""
        (link,) = self._unused
        return f"{address}?{_PARAMETER}={link}"

    def __call__(self, access: Access) -> bool | Response:
        """Allow the browser with the cookie, and give it to the one that opens the link."""
        request = access.request
        if compare_digest(request.cookies.get(self._cookie, "").encode(), self._visitor.encode()):
            return True
        if self._use(request.query_params.get(_PARAMETER, "")):
            return self._welcome(request)
        raise Unauthenticated("Open the link that the command printed. It works once.", challenge="Link")

    def _use(self, link: str) -> bool:
        try:
            self._unused.remove(link)
        except KeyError:
            return False
        return True

    def _welcome(self, request: Request) -> Response:
        response = RedirectResponse(request.url.path, 303)
        response.set_cookie(self._cookie, self._visitor, httponly=True, samesite="lax")
        return response
