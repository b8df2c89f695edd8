"""Templates and files. Pages hold no inline script and no inline style, so the policy of their content allows none."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from celery_durable.errors.base import name_error
from celery_durable.insight.explain import summaries
from celery_durable.model import ErrorInfo, format_duration, iso

STATIC_FILES = "static"
_MEDIA_TYPES = {
    "htmx.min.js": "text/javascript",
    "dashboard.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "style.css": "text/css",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "private, no-store",
}
_MAX_SHOWN = 2000
_JUST_NOW = timedelta(seconds=1)


def render(name: str, context: Mapping[str, Any], *, status: int = 200) -> Response:
    """Return a page."""
    html = _environment().get_template(name).render(context)
    return Response(html, status, _HEADERS, "text/html")


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("celery_durable.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        attempts=summaries.format_attempts,
        duration=format_duration,
        error=format_error,
        iso=iso,
        json=format_json,
        position=summaries.describe_position,
        took=summaries.format_time_taken,
        wait=summaries.describe_wait,
    )
    made.globals["moment"] = format_moment
    made.globals["static"] = {name: f"{STATIC_FILES}/{version}/{name}" for name, (version, _) in _files().items()}
    return made


def format_moment(instant: datetime | None, now: datetime) -> Markup:
    """Return a time as ``3 min ago`` or ``in 2 h``, with the exact one in UTC as its title."""
    if instant is None:
        return Markup()
    left = instant - now
    if abs(left) < _JUST_NOW:
        text = "now"
    elif left > timedelta(0):
        text = f"in {format_duration(left)}"
    else:
        text = f"{format_duration(-left, units=1)} ago"
    exact = iso(instant)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(exact, exact, text)


def format_error(error: ErrorInfo | None) -> str:
    """Return name and message of an error; "" for None."""
    return "" if error is None else name_error(error.name, error.message)


def format_json(value: Any) -> str:
    """Return a value as JSON text, cut if it is long."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ... ({len(text)} characters)"


# --- files ----------------------------------------------------------------------------------------


@functools.cache
def _files() -> dict[str, tuple[str, bytes]]:
    """Return the files by name, each with a version of which a change makes a new address."""
    folder = resources.files(__package__) / STATIC_FILES
    contents = {name: (folder / name).read_bytes() for name in _MEDIA_TYPES}
    return {name: (hashlib.sha256(content).hexdigest()[:12], content) for name, content in contents.items()}


async def serve_static(request: Request) -> Response:
    """Serve a file. Files hold no data of the application, so no hook is asked."""
    name = request.path_params["name"]
    if name not in _MEDIA_TYPES:
        raise HTTPException(404)
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return Response(_files()[name][1], headers=headers, media_type=_MEDIA_TYPES[name])
