"""Problem responses (`application/problem+json`, RFC 9457), each with the ``code`` and ``message`` of its error."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from celery_durable.errors import DurableError, EventRefused, StoreUnavailable, WorkflowParamsInvalid
from celery_durable.http import timeouts
from celery_durable.store.engine.faults import describe_fault, is_transient
from celery_durable.wire.encoding import to_json
from celery_durable.wire.responses import InvalidField, Problem, describe_refusal

logger = logging.getLogger("celery_durable.http")

MEDIA_TYPE = "application/problem+json"
_MESSAGES = {
    "dataclass_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "unexpected_keyword_argument": "Unknown field",
}
"""The messages for errors whose own message names a class or a type of Python, by the type of the error."""


class NoAuthorization(DurableError):
    """The HTTP API was created with neither a hook nor ``allow_anonymous=True``, or with both."""

    code = "NO_AUTHORIZATION"

    def __init__(self, *, is_contradiction: bool = False) -> None:
        what = (
            "Both authorize= and allow_anonymous=True were given"
            if is_contradiction
            else "The HTTP API has no authorize= hook, so any client could start, read and end workflows"
        )
        super().__init__(
            f"{what}. Pass authorize=your_hook (see celery_durable.http.Authorize), or, if only trusted clients "
            "can reach it, allow_anonymous=True."
        )


class Unauthenticated(DurableError):
    """Raised by your hooks if a request has no valid credentials. ``challenge`` is the header WWW-Authenticate."""

    code, http_status = "UNAUTHENTICATED", 401

    def __init__(self, message: str = "Credentials are needed.", *, challenge: str = "Bearer") -> None:
        self.challenge = challenge
        super().__init__(message)


class Forbidden(DurableError):
    """Raised by your hooks to refuse a request, and by the API if a hook does not allow it."""

    code, http_status = "FORBIDDEN", 403

    def __init__(self, message: str = "You may not do this.") -> None:
        super().__init__(message)


class BodyTooLarge(DurableError):
    """The request's body exceeds the limit."""

    code, http_status = "BODY_TOO_LARGE", 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The body of a request may have at most {limit_bytes} bytes.")


class UnsupportedEncoding(DurableError):
    """The request's body is compressed."""

    code, http_status = "UNSUPPORTED_ENCODING", 415

    def __init__(self) -> None:
        super().__init__("Request bodies are not decoded. Send this one without Content-Encoding.")


class NotReady(DurableError):
    """The database cannot be reached, or has not been migrated."""

    code, http_status = "NOT_READY", 503

    def __init__(self) -> None:
        super().__init__("The database does not answer, or its tables are missing or outdated. See the server's log.")


def build_problem(
    status: int, code: str, message: str, *, headers: Any = None, invalid_fields: list[InvalidField] | None = None
) -> Response:
    """Return a response with a problem as its body."""
    body = Problem(
        title=_status_phrase(status), status=status, detail=message, code=code, message=message, errors=invalid_fields
    )
    return Response(to_json(body), status, headers, MEDIA_TYPE)


def _status_phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def build_error_response(error: Exception) -> Response:
    """Return the response to an error. An unexpected one is logged, and nothing of it is sent."""
    match error:
        case DurableError() if error.http_status < 500 or isinstance(error, NotReady):
            return _build_refusal(error)
        case timeouts.HookTimeout():
            logger.warning("A request was refused: a hook did not return within %g s", timeouts.HOOK_SECONDS)
            return build_problem(503, error.code, str(error), headers={"Retry-After": "2"})
        case StoreUnavailable():
            return _build_unavailable(error)
        case ClientDisconnect():  # not a server error; the client does not read the response
            logger.debug("A client broke off its request")
            return build_problem(400, "CLIENT_DISCONNECTED", "The request ended before its body did.")
        case RequestValidationError():
            return build_problem(
                400, "INVALID_REQUEST", "The request is not valid.", invalid_fields=_list_invalid_fields(error.errors())
            )
        case HTTPException():
            return build_http_exception_response(error)
    if is_transient(error):
        return _build_unavailable(error)
    logger.error("A request failed", exc_info=error)
    code = error.code if isinstance(error, DurableError) else "INTERNAL_ERROR"
    return build_problem(500, code, "The request failed. See the server's log.")


def _build_unavailable(error: Exception) -> Response:
    logger.warning("A request was refused because of the database: %s", describe_fault(error))
    code, detail = StoreUnavailable.code, "The database does not answer."
    if isinstance(error, StoreUnavailable) and error.is_in_doubt:
        detail += " The change may have been applied."
    return build_problem(503, code, detail, headers={"Retry-After": "2"})


def _build_refusal(error: DurableError) -> Response:
    headers = {"WWW-Authenticate": error.challenge} if isinstance(error, Unauthenticated) else None
    if isinstance(error, UnsupportedEncoding):
        headers = {"Accept-Encoding": "identity"}
    if error.http_status == HTTPStatus.TOO_MANY_REQUESTS:
        headers = {"Retry-After": "10"}
    fields = None
    if isinstance(error, (EventRefused, WorkflowParamsInvalid)):
        fields = [InvalidField(where=where, message=what) for where, what in error.problems[:20]]
    return build_problem(error.http_status, error.code, describe_refusal(error), headers=headers, invalid_fields=fields)


def build_http_exception_response(error: HTTPException) -> Response:
    """Return the response for an HTTPException of a hook or of the routing."""
    if error.status_code in (204, 304):
        return Response(status_code=error.status_code, headers=error.headers)
    code = _status_phrase(error.status_code).upper().replace(" ", "_").replace("-", "_")
    return build_problem(error.status_code, code, str(error.detail), headers=error.headers)


def _list_invalid_fields(errors: Any) -> list[InvalidField]:
    """Return the field and the message of each error, without the value: clients may log the response."""
    return [
        InvalidField(
            where=".".join(map(str, error["loc"])), message=_MESSAGES.get(error.get("type"), str(error["msg"]))
        )
        for error in errors[:20]
    ]
