"""Requests to the HTTP API, with what Python brings along: no library, no app, no database.

What failed on the way is tried again where repeating it cannot do anything twice. Redirects are not followed: the
headers, and with them the credentials, go to nobody but the server that was named.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import queue
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.message import Message
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from celery_durable.cli.command import REFUSED, UNREACHABLE, CliError, cli_error

T = TypeVar("T")

_PROBLEM = "application/problem+json"
_PASSING = frozenset({429, 502, 503, 504})
"""What a server, or a proxy before it, answers with for a while."""
_REPEATED = _PASSING | {500}
_LONGEST_PAUSE_SECONDS = 30.0
_LARGEST_BODY = 256 * 2**20
"""In bytes. A page has up to 100 steps, each with a result of up to 1 MiB."""


class NoApi(CliError):
    """What answers is not our API, or one of another version."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is no refusal; ``data`` None for 304."""

    data: Any
    etag: str | None
    tries: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a server sent; of a body that is too large one byte more than may be."""

    code: int
    reason: str
    headers: Message
    body: bytes


@dataclass(frozen=True, slots=True)
class Retries:
    """``limit`` after the first, the first after ``delay_seconds``, then each time twice as long."""

    limit: int = 2
    delay_seconds: float = 0.5


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """One API.

    ``timeout_seconds``: for one request up to the last byte of its answer, beyond the time for which it asks the server
    to wait. ``largest_body``: of an answer, in bytes.
    ``tell``: gets each request as a command, in which the headers' values are left out: they may be secrets.
    """

    def __init__(
        self,
        base_url: str,
        headers: Sequence[tuple[str, str]],
        *,
        timeout_seconds: float,
        retries: Retries,
        sleep: Callable[[float], None],
        tell: Callable[[str], None] | None = None,
        largest_body: int = _LARGEST_BODY,
    ) -> None:
        self.base_url, self._headers = base_url.rstrip("/"), headers
        self._largest_body = largest_body
        self._timeout_seconds, self._retries, self._sleep = timeout_seconds, retries, sleep
        self._tell = tell
        self._opener = urllib.request.build_opener(_NoRedirects())
        self.server_time: datetime | None = None
        """When the last answer was sent, by the server's clock."""

    def get(self, *path: str, query: Mapping[str, Any] | None = None, known: object = None, wait: float = 0) -> Reply:
        """Read something. ``known``: an ETag, answered with None as long as it is of it.

        Of ``query`` what is None is left out, and a list is asked for by each of its items.
        """
        given = [(key, value if isinstance(value, list) else [value]) for key, value in (query or {}).items()]
        asked = [(key, _text(each)) for key, several in given for each in several if each is not None]
        headers = [] if known is None else [("If-None-Match", str(known))]
        target = "/".join(quote(each, safe="") for each in path) + (f"?{urlencode(asked)}" if asked else "")
        return self._insist("GET", target, None, headers, is_safe=True, wait=wait, about=_about(path))

    def post(
        self, *path: str, body: Mapping[str, Any] | None = None, is_safe: bool = False, makes: str | None = None
    ) -> Reply:
        """Change something. ``is_safe``: the server does it once however often it is asked. ``makes``: this id."""
        data = None if body is None else json.dumps(body).encode()
        headers = [] if body is None else [("Content-Type", "application/json")]
        target = "/".join(quote(each, safe="") for each in path)
        return self._insist("POST", target, data, headers, is_safe=is_safe, about=_about((*path, makes or "")))

    def _insist(
        self,
        method: str,
        target: str,
        data: bytes | None,
        headers: Sequence[tuple[str, str]],
        *,
        is_safe: bool,
        wait: float = 0,
        about: Sequence[str],
    ) -> Reply:
        if self._tell is not None:
            self._tell(self._as_curl(method, target, data, headers))
        left, tries, pause = self._retries.limit if is_safe else 0, 1, self._retries.delay_seconds
        while True:
            request = urllib.request.Request(f"{self.base_url}/{target}", data, method=method)  # noqa: S310  # checked by the door
            for name, value in (("Accept", "application/json"), *self._headers, *headers):
                request.add_header(name, value)
            try:
                answer = _in_time(lambda: self._send(request, wait), self._timeout_seconds + wait)  # noqa: B023
            except (OSError, http.client.HTTPException) as failed:
                if left <= 0:
                    raise self._unreached(failed, is_change=method != "GET") from failed
            else:
                if answer.code not in _REPEATED or left <= 0:
                    return self._reply(answer, about, tries)
                pause = max(pause, _asked_pause(answer))
            self._sleep(min(pause, _LONGEST_PAUSE_SECONDS))
            left, tries, pause = left - 1, tries + 1, pause * 2

    def _as_curl(self, method: str, target: str, data: bytes | None, headers: Sequence[tuple[str, str]]) -> str:
        said = [f"{name}: ***" for name, _ in self._headers]
        said += [f"{name}: {value}" for name, value in headers if name != "Content-Type"]  # as --json says
        words = ["curl", *(word for each in said for word in ("-H", each))]
        if data is not None:
            words += ["--json", data.decode()]
        elif method != "GET":
            words += ["-X", method]
        return shlex.join([*words, f"{self.base_url}/{target}"])

    def _send(self, request: urllib.request.Request, wait: float) -> _Answer:
        try:
            response = self._opener.open(request, timeout=self._timeout_seconds + wait)
        except urllib.error.HTTPError as answered:
            response = answered
        with response:
            return _Answer(response.status, response.reason, response.headers, response.read(self._largest_body + 1))

    def _reply(self, answer: _Answer, about: Sequence[str], tries: int) -> Reply:
        self._note(answer)
        if answer.code == 304:
            return Reply(None, answer.headers.get("ETag"), tries)
        if len(answer.body) > self._largest_body:
            raise self._no_api(f"answered with more than {self._largest_body} bytes")
        if answer.code >= 300:
            raise self._refused(answer, about, tries)
        try:
            return Reply(json.loads(answer.body), answer.headers.get("ETag"), tries)
        except (ValueError, RecursionError) as exc:
            raise self._no_api(f"answered with {answer.headers.get_content_type()}, not with JSON") from exc

    def _note(self, answer: _Answer) -> None:
        sent = answer.headers.get("Date")
        try:
            self.server_time = self.server_time if sent is None else email.utils.parsedate_to_datetime(sent)
        except ValueError:
            return

    def _refused(self, answered: _Answer, about: Sequence[str], tries: int) -> CliError:
        if answered.headers.get_content_type() != _PROBLEM:
            return self._foreign(answered)
        try:
            said = json.loads(answered.body)
            message, code = str(said["message"]), str(said["code"])
            flaws = "; ".join(f"{each['where']}: {each['message']}" for each in said.get("errors", []))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self._foreign(answered)
        if code == "NOT_FOUND":
            return self._no_api("knows no such route")
        found = cli_error(
            message + (f" {flaws}" if flaws else ""),
            code=code,
            http_status=answered.code,
            target=about,
        )
        if code == "INSTANCE_ID_ALREADY_EXISTS" and tries > 1:
            found.hint = f"An earlier try of this command got no answer, and may have made it. {found.hint}"
        return found

    def _foreign(self, answered: _Answer) -> CliError:
        """Not our API's words: a proxy's, or a hook's own answer."""
        if answered.code in (401, 403):
            return cli_error(
                f"The server refuses: {answered.code} {answered.reason}. Send your credentials: -H 'Name: value'",
                code="", http_status=answered.code, target=[],
            )  # fmt: skip
        if 300 <= answered.code < 400:
            return self._no_api(f"sends elsewhere, to {answered.headers.get('Location')}")
        if answered.code == 404:
            return self._no_api("knows no such route")
        code = UNREACHABLE if answered.code in _PASSING else REFUSED
        return CliError(f"The server answered with {answered.code} {answered.reason}.", exit_code=code)

    def _no_api(self, what: str) -> NoApi:
        hint = "The base URL is the one under which `GET /workflows` is served, such as https://shop.example/api"
        return NoApi(f"{self.base_url} {what}.", hint, exit_code=UNREACHABLE)

    def _unreached(self, failed: Exception, *, is_change: bool) -> CliError:
        why = getattr(failed, "reason", None) or failed
        hint = "Is the server running, and is the base URL right?"
        if is_change:
            hint = "Whether it was done is not known: look before you repeat it."
        return CliError(
            f"{self.base_url} cannot be reached: {why or type(failed).__name__}", hint, exit_code=UNREACHABLE
        )


def _in_time(work: Callable[[], T], seconds: float) -> T:
    """What ``work`` returns; TimeoutError after so long.

    A socket's own timeout is one of each read: a server that sends a byte now and then would never exceed it.
    """
    found: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put((work(), None))
        except BaseException as exc:  # noqa: BLE001  # raised by the thread that waits
            found.put((None, exc))

    threading.Thread(target=run, name="celery-durable request", daemon=True).start()
    try:
        result, error = found.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no complete answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # mypy does not narrow a pair by its other part


def _about(path: Sequence[str]) -> Sequence[str]:
    """The workflow and the instance of ``workflows/{}/instances/{}``."""
    return [path[1], path[3]] if len(path) > 3 else []


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _asked_pause(answered: _Answer) -> float:
    try:
        return float(answered.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0
