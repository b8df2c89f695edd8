"""An HTTP client for the API. It repeats failed requests only if a repetition cannot have a second effect.

Redirects are not followed, so headers and credentials go only to the server that the user named.
"""

from __future__ import annotations

import email.utils
import json
import shlex
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from celery_durable.cli.errors import REFUSED, UNREACHABLE, CliError, make_cli_error

# httpx imports its own command line, with rich and pygments, unless that module is missing. None marks it as missing
# (encode/httpx#3547).
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # typeshed knows only modules
import httpx  # noqa: E402

_PROBLEM = "application/problem+json"
_TEMPORARY = frozenset({429, 502, 503, 504})
_RETRIED = _TEMPORARY | {500}
_MAX_PAUSE_SECONDS = 30.0
_MAX_BODY_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful response. ``data`` is None for 304 Not Modified."""

    data: Any
    etag: str | None


@dataclass(frozen=True, slots=True)
class _HttpResponse:
    """A response. A body that is too large is cut after the limit."""

    code: int
    reason: str
    headers: httpx.Headers
    body: bytes

    @property
    def content_type(self) -> str:
        return str(self.headers.get("Content-Type", "text/plain")).partition(";")[0].strip().lower()


class Client:
    """A client of one API.

    ``timeout_seconds``: for one request up to the last byte of its response, without a long poll.
    ``retry_delay_seconds``: the first pause, which doubles each time. ``log_request``: is called with each request as a
    curl command, without the values of the headers, which may be secrets.
    """

    def __init__(
        self,
        base_url: str,
        headers: Sequence[tuple[str, str]],
        *,
        timeout_seconds: float,
        retries: int,
        retry_delay_seconds: float,
        sleep: Callable[[float], None],
        log_request: Callable[[str], None] | None = None,
        max_body_bytes: int = _MAX_BODY_BYTES,
    ) -> None:
        self.base_url, self._headers = base_url.rstrip("/"), headers
        self._max_body_bytes = max_body_bytes
        self._timeout_seconds, self._sleep = timeout_seconds, sleep
        self._retries, self._retry_delay_seconds = retries, retry_delay_seconds
        self._log_request = log_request
        # The system's certificates, as other programs on this machine trust them; httpx would use its own.
        verify = ssl.create_default_context() if self.base_url.startswith("https") else False
        self._http = httpx.Client(verify=verify, headers=[("Accept", "application/json"), *headers])
        self.close = self._http.close
        self.server_time: datetime | None = None
        """When the server sent its last response, by its own clock."""

    def get(
        self, *path: str, query: Mapping[str, Any] | None = None, known_etag: object = None, wait_seconds: float = 0
    ) -> Reply:
        """Send a GET request; the reply has no data as long as the resource has the ETag ``known_etag``."""
        parameters = httpx.QueryParams({key: value for key, value in (query or {}).items() if value is not None})
        headers = [] if known_etag is None else [("If-None-Match", str(known_etag))]
        target = "/".join(quote(each, safe="") for each in path) + (f"?{parameters}" if parameters else "")
        return self._send_with_retries(
            "GET", target, None, headers, is_idempotent=True, wait_seconds=wait_seconds, subject=_target_of(path)
        )

    def post(
        self, *path: str, body: Mapping[str, Any] | None = None, is_idempotent: bool = False, new_id: str | None = None
    ) -> Reply:
        """Send a POST request. ``new_id``: of the instance that it creates, for error messages."""
        return self._change("POST", path, body, is_idempotent=is_idempotent, subject=_target_of((*path, new_id or "")))

    def patch(self, *path: str, body: Mapping[str, Any]) -> Reply:
        """Send a PATCH request, which sets values and may be repeated."""
        return self._change("PATCH", path, body, is_idempotent=True, subject=())

    def _change(
        self,
        method: str,
        path: Sequence[str],
        body: Mapping[str, Any] | None,
        *,
        is_idempotent: bool,
        subject: Sequence[str],
    ) -> Reply:
        data = None if body is None else json.dumps(body).encode()
        headers = [] if body is None else [("Content-Type", "application/json")]
        target = "/".join(quote(each, safe="") for each in path)
        return self._send_with_retries(method, target, data, headers, is_idempotent=is_idempotent, subject=subject)

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
        left, tries, pause = self._retries if is_idempotent else 0, 1, self._retry_delay_seconds
        while True:
            try:
                response = self._send(method, target, data, headers, self._timeout_seconds + wait_seconds)
            except (httpx.RequestError, httpx.InvalidURL, TimeoutError) as error:
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
        if method == "PATCH" or (method == "POST" and data is None):
            words += ["-X", method]
        return shlex.join([*words, f"{self.base_url}/{target}"])

    def _send(
        self, method: str, target: str, data: bytes | None, headers: Sequence[tuple[str, str]], seconds: float
    ) -> _HttpResponse:
        """Send one request; raises TimeoutError after ``seconds``: httpx's own limits each read, even of a byte."""
        end, body = time.monotonic() + seconds, bytearray()
        try:
            with self._http.stream(
                method, f"{self.base_url}/{target}", content=data, headers=list(headers), timeout=seconds
            ) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > self._max_body_bytes:
                        break
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("")
                return _HttpResponse(response.status_code, response.reason_phrase, response.headers, bytes(body))
        except httpx.TimeoutException as exc:
            raise TimeoutError(f"no complete answer within {seconds:g} s") from exc

    def _reply(self, response: _HttpResponse, subject: Sequence[str], tries: int) -> Reply:
        self._record_server_time(response)
        if response.code == 304:
            return Reply(None, response.headers.get("ETag"))
        if len(response.body) > self._max_body_bytes:
            raise self._wrong_api(f"answered with more than {self._max_body_bytes} bytes")
        if response.code >= 300:
            raise self._error_of_api(response, subject, tries)
        try:
            return Reply(json.loads(response.body), response.headers.get("ETag"))
        except (ValueError, RecursionError) as exc:
            raise self._wrong_api(f"answered with {response.content_type}, not with JSON") from exc

    def _record_server_time(self, response: _HttpResponse) -> None:
        sent = response.headers.get("Date")
        try:
            self.server_time = self.server_time if sent is None else email.utils.parsedate_to_datetime(sent)
        except ValueError:
            return

    def _error_of_api(self, response: _HttpResponse, subject: Sequence[str], tries: int) -> CliError:
        if response.content_type != _PROBLEM:
            return self._error_of_other_server(response)
        try:
            problem = json.loads(response.body)
            message, code = str(problem["message"]), str(problem["code"])
            found = [f"{each['where']}: {each['message']}" for each in problem.get("errors", [])]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self._error_of_other_server(response)
        if code == "NOT_FOUND":
            return self._wrong_api("knows no such route")
        untold = "; ".join(each for each in found if each not in message)
        error = make_cli_error(
            message + (f" {untold}" if untold else ""),
            code=code,
            http_status=response.code,
            target=subject,
        )
        if code == "INSTANCE_ID_ALREADY_EXISTS" and tries > 1:
            error.hint = f"An earlier attempt of this command got no response, and may have created it. {error.hint}"
        return error

    def _error_of_other_server(self, response: _HttpResponse) -> CliError:
        """Make an error from a response that is not of the API, but of a proxy or of a hook of the application."""
        if response.code in (401, 403):
            return make_cli_error(
                f"The server refuses: {response.code} {response.reason}. Send your credentials: -H 'Name: value'",
                code="", http_status=response.code, target=[],
            )  # fmt: skip
        if 300 <= response.code < 400:
            return self._wrong_api(f"redirects to {response.headers.get('Location')}")
        if response.code == 404:
            return self._wrong_api("knows no such route")
        code = UNREACHABLE if response.code in _TEMPORARY else REFUSED
        return CliError(f"The server answered with {response.code} {response.reason}.", exit_code=code)

    def _wrong_api(self, fault: str) -> CliError:
        hint = "The base URL is the one under which `GET /workflows` is served, such as https://shop.example/api"
        return CliError(f"{self.base_url} {fault}.", hint, exit_code=UNREACHABLE)

    def _connection_error(self, error: Exception, *, is_change: bool) -> CliError:
        hint = "Is the server running, and is the base URL right?"
        if is_change:
            hint = "The change may have been made. Check before you repeat it."
        return CliError(
            f"{self.base_url} cannot be reached: {str(error) or type(error).__name__}", hint, exit_code=UNREACHABLE
        )


def _target_of(path: Sequence[str]) -> Sequence[str]:
    """Return the workflow and the instance in the path ``workflows/{}/instances/{}``, for error messages."""
    return [path[1], path[3]] if len(path) > 3 else []


def _retry_after_seconds(response: _HttpResponse) -> float:
    try:
        return float(response.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0
