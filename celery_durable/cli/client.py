"""Requests to the HTTP API, with what Python brings along: no library, no app, no database.

What failed on the way is tried again where repeating it cannot do anything twice. Redirects are not followed: the
headers, and with them the credentials, go to nobody but the server that was named.
"""

from __future__ import annotations

import email.utils
import functools
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

from celery_durable.cli.command import REFUSED, UNREACHABLE, CliError, make_cli_error

T = TypeVar("T")

_PROBLEM = "application/problem+json"
_TEMPORARY = frozenset({429, 502, 503, 504})
"""What a server, or a proxy before it, answers with for a while."""
_RETRIED = _TEMPORARY | {500}
_MAX_PAUSE_SECONDS = 30.0
_MAX_BODY_BYTES = 256 * 2**20
"""In bytes. A page has up to 100 steps, each with a result of up to 1 MiB."""


class WrongApi(CliError):
    """What answers is not our API, or one of another version."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is no refusal; ``data`` None for 304."""

    data: Any
    etag: str | None
    tries: int


@dataclass(frozen=True, slots=True)
class _HttpResponse:
    """What a server sent; of a body that is too large one byte more than may be."""

    code: int
    reason: str
    headers: Message
    body: bytes


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``limit`` after the first, the first after ``delay_seconds``, then each time twice as long."""

    limit: int = 2
    delay_seconds: float = 0.5


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """One API.

    ``timeout_seconds``: for one request up to the last byte of its answer, beyond the time for which it asks the server
    to wait. ``max_body_bytes``: of an answer, in bytes.
    ``log_request``: gets each request as a command, in which the headers' values are left out: they may be secrets.
    """

    def __init__(
        self,
        base_url: str,
        headers: Sequence[tuple[str, str]],
        *,
        timeout_seconds: float,
        retries: RetryPolicy,
        sleep: Callable[[float], None],
        log_request: Callable[[str], None] | None = None,
        max_body_bytes: int = _MAX_BODY_BYTES,
    ) -> None:
        self.base_url, self._headers = base_url.rstrip("/"), headers
        self._max_body_bytes = max_body_bytes
        self._timeout_seconds, self._retries, self._sleep = timeout_seconds, retries, sleep
        self._log_request = log_request
        self._opener = urllib.request.build_opener(_NoRedirects())
        self.server_time: datetime | None = None
        """When the last answer was sent, by the server's clock."""

    def get(
        self, *path: str, query: Mapping[str, Any] | None = None, known_etag: object = None, wait_seconds: float = 0
    ) -> Reply:
        """Read something. ``known_etag``: an ETag, answered with None as long as it is of it.

        Of ``query`` what is None is left out, and a list is asked for by each of its items.
        """
        query_values = [(key, value if isinstance(value, list) else [value]) for key, value in (query or {}).items()]
        parameters = [(key, _text(value)) for key, values in query_values for value in values if value is not None]
        headers = [] if known_etag is None else [("If-None-Match", str(known_etag))]
        target = "/".join(quote(each, safe="") for each in path) + (f"?{urlencode(parameters)}" if parameters else "")
        return self._send_with_retries(
            "GET", target, None, headers, is_idempotent=True, wait_seconds=wait_seconds, subject=_target_of(path)
        )

    def post(
        self, *path: str, body: Mapping[str, Any] | None = None, is_idempotent: bool = False, new_id: str | None = None
    ) -> Reply:
        """Send a POST request.

        ``is_idempotent``: the request may be repeated after a failure. ``new_id``: the id of the instance that the
        request creates, for error messages.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = [] if body is None else [("Content-Type", "application/json")]
        target = "/".join(quote(each, safe="") for each in path)
        return self._send_with_retries(
            "POST", target, data, headers, is_idempotent=is_idempotent, subject=_target_of((*path, new_id or ""))
        )

    def _send_with_retries(
        self,
        method: str,
        target: str,
        data: bytes | None,
        headers: Sequence[tuple[str, str]],
        *,
        is_idempotent: bool,
        wait_seconds: float = 0,
        subject: Sequence[str],
    ) -> Reply:
        if self._log_request is not None:
            self._log_request(self._as_curl(method, target, data, headers))
        left, tries, pause = self._retries.limit if is_idempotent else 0, 1, self._retries.delay_seconds
        while True:
            request = urllib.request.Request(f"{self.base_url}/{target}", data, method=method)  # noqa: S310  # checked by the door
            for name, value in (("Accept", "application/json"), *self._headers, *headers):
                request.add_header(name, value)
            try:
                send = functools.partial(self._send, request, wait_seconds)
                response = _call_with_timeout(send, self._timeout_seconds + wait_seconds)
            except (OSError, http.client.HTTPException) as error:
                if left <= 0:
                    raise self._connection_error(error, is_change=method != "GET") from error
            else:
                if response.code not in _RETRIED or left <= 0:
                    return self._reply(response, subject, tries)
                pause = max(pause, _retry_after_seconds(response))
            self._sleep(min(pause, _MAX_PAUSE_SECONDS))
            left, tries, pause = left - 1, tries + 1, pause * 2

    def _as_curl(self, method: str, target: str, data: bytes | None, headers: Sequence[tuple[str, str]]) -> str:
        header_lines = [f"{name}: ***" for name, _ in self._headers]
        header_lines += [f"{name}: {value}" for name, value in headers if name != "Content-Type"]  # as --json says
        words = ["curl", *(word for line in header_lines for word in ("-H", line))]
        if data is not None:
            words += ["--json", data.decode()]
        elif method != "GET":
            words += ["-X", method]
        return shlex.join([*words, f"{self.base_url}/{target}"])

    def _send(self, request: urllib.request.Request, wait_seconds: float) -> _HttpResponse:
        try:
            response = self._opener.open(request, timeout=self._timeout_seconds + wait_seconds)
        except urllib.error.HTTPError as error_response:
            response = error_response
        with response:
            return _HttpResponse(
                response.status, response.reason, response.headers, response.read(self._max_body_bytes + 1)
            )

    def _reply(self, response: _HttpResponse, subject: Sequence[str], tries: int) -> Reply:
        self._record_server_time(response)
        if response.code == 304:
            return Reply(None, response.headers.get("ETag"), tries)
        if len(response.body) > self._max_body_bytes:
            raise self._wrong_api(f"answered with more than {self._max_body_bytes} bytes")
        if response.code >= 300:
            raise self._error_of_api(response, subject, tries)
        try:
            return Reply(json.loads(response.body), response.headers.get("ETag"), tries)
        except (ValueError, RecursionError) as exc:
            raise self._wrong_api(f"answered with {response.headers.get_content_type()}, not with JSON") from exc

    def _record_server_time(self, response: _HttpResponse) -> None:
        sent = response.headers.get("Date")
        try:
            self.server_time = self.server_time if sent is None else email.utils.parsedate_to_datetime(sent)
        except ValueError:
            return

    def _error_of_api(self, response: _HttpResponse, subject: Sequence[str], tries: int) -> CliError:
        if response.headers.get_content_type() != _PROBLEM:
            return self._error_of_other_server(response)
        try:
            problem = json.loads(response.body)
            message, code = str(problem["message"]), str(problem["code"])
            validation_errors = "; ".join(f"{each['where']}: {each['message']}" for each in problem.get("errors", []))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self._error_of_other_server(response)
        if code == "NOT_FOUND":
            return self._wrong_api("knows no such route")
        error = make_cli_error(
            message + (f" {validation_errors}" if validation_errors else ""),
            code=code,
            http_status=response.code,
            target=subject,
        )
        if code == "INSTANCE_ID_ALREADY_EXISTS" and tries > 1:
            error.hint = f"An earlier try of this command got no answer, and may have made it. {error.hint}"
        return error

    def _error_of_other_server(self, response: _HttpResponse) -> CliError:
        """Not our API's words: a proxy's, or a hook's own answer."""
        if response.code in (401, 403):
            return make_cli_error(
                f"The server refuses: {response.code} {response.reason}. Send your credentials: -H 'Name: value'",
                code="", http_status=response.code, target=[],
            )  # fmt: skip
        if 300 <= response.code < 400:
            return self._wrong_api(f"sends elsewhere, to {response.headers.get('Location')}")
        if response.code == 404:
            return self._wrong_api("knows no such route")
        code = UNREACHABLE if response.code in _TEMPORARY else REFUSED
        return CliError(f"The server answered with {response.code} {response.reason}.", exit_code=code)

    def _wrong_api(self, fault: str) -> WrongApi:
        hint = "The base URL is the one under which `GET /workflows` is served, such as https://shop.example/api"
        return WrongApi(f"{self.base_url} {fault}.", hint, exit_code=UNREACHABLE)

    def _connection_error(self, error: Exception, *, is_change: bool) -> CliError:
        reason = getattr(error, "reason", None) or error
        hint = "Is the server running, and is the base URL right?"
        if is_change:
            hint = "Whether it was done is not known: look before you repeat it."
        return CliError(
            f"{self.base_url} cannot be reached: {reason or type(error).__name__}", hint, exit_code=UNREACHABLE
        )


def _call_with_timeout(work: Callable[[], T], seconds: float) -> T:
    """What ``work`` returns; TimeoutError after so long.

    A socket's own timeout is one of each read: a server that sends a byte now and then would never exceed it.
    """
    outcome: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as exc:  # noqa: BLE001  # raised by the thread that waits
            outcome.put((None, exc))

    threading.Thread(target=run, name="celery-durable request", daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no complete answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # mypy does not narrow a pair by its other part


def _target_of(path: Sequence[str]) -> Sequence[str]:
    """The workflow and the instance of ``workflows/{}/instances/{}``."""
    return [path[1], path[3]] if len(path) > 3 else []


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _retry_after_seconds(response: _HttpResponse) -> float:
    try:
        return float(response.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0
