"""ETags: the version tag of an instance, in quotes. Every change of the instance replaces it."""

from __future__ import annotations

import re
from collections.abc import Collection

_TAG = re.compile(r'(W/)?"([^"]*)"')


def format_etag(tag: str) -> str:
    """Return the ETag header for a version tag."""
    return f'"{tag}"'


def matches_if_none_match(tag: str, if_none_match: str | None) -> bool:
    """Return whether the header If-None-Match lists this tag."""
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or tag in _tags(if_none_match, weak_too=True)


def parse_if_match(if_match: str | None) -> Collection[str] | None:
    """Return the tags that the header If-Match lists, or None if it accepts any."""
    if if_match is None or if_match.strip() == "*":
        return None
    return _tags(if_match, weak_too=False)


def _tags(header: str, *, weak_too: bool) -> set[str]:
    return {text for weak, text in _TAG.findall(header) if weak_too or not weak}
