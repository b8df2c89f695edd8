"""The codes of problem responses, each with its HTTP status. Hooks of the application may return other codes."""

from __future__ import annotations

from enum import StrEnum

STATUS = {
    "INVALID_REQUEST": 400,
    "INVALID_INSTANCE_ID": 400,
    "INVALID_EVENT_TYPE": 400,
    "INVALID_TOPIC": 400,
    "INVALID_LABEL": 400,
    "TOO_MANY_LABELS": 400,
    "INVALID_CURSOR": 400,
    "NAME_INVALID": 400,
    "INSTANT_INVALID": 400,
    "DURATION_INVALID": 400,
    "FILTER_TOO_BROAD": 400,
    "VALUE_REFUSED": 400,
    "NOT_SERIALIZABLE": 400,
    "WORKFLOW_PARAMS_INVALID": 400,
    "BATCH_TOO_LARGE": 400,
    "UNAUTHENTICATED": 401,
    "FORBIDDEN": 403,
    "OUT_OF_SCOPE": 403,
    "NOT_FOUND": 404,
    "WORKFLOW_NOT_FOUND": 404,
    "INSTANCE_NOT_FOUND": 404,
    "RUN_NOT_FOUND": 404,
    "STEP_NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "CREATE_DISABLED": 409,
    "INSTANCE_ID_ALREADY_EXISTS": 409,
    "INSTANCE_TERMINAL": 409,
    "EMISSION_MISMATCH": 409,
    "INSTANCE_NOT_ERRORED": 409,
    "STEP_NOT_OPEN": 409,
    "PRECONDITION_FAILED": 412,
    "BODY_TOO_LARGE": 413,
    "PAYLOAD_TOO_LARGE": 413,
    "UNSUPPORTED_ENCODING": 415,
    "TOO_MANY_STREAMS": 429,
    "INTERNAL_ERROR": 500,
    "HOOK_TIMEOUT": 503,
    "STORE_UNAVAILABLE": 503,
    "NOT_READY": 503,
}

ProblemCode = StrEnum("ProblemCode", {code: code for code in STATUS})  # type: ignore[misc]  # computed members
ProblemCode.__doc__ = "Why a request was refused."
