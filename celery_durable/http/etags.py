"""ETags: an instance's version, which every change of it moves on, in quotes."""

from __future__ import annotations

import re
from collections.abc import Collection

_TAG = re.compile(r'(W/)?"([^"]*)"')
_VERSION = re.compile(r"[0-9]{1,18}")


def tag(version: int) -> str:
    """The ETag of a version."""
    return f'"{version}"'


def is_known(version: int, if_none_match: str | None) -> bool:
    """Whether an If-None-Match names this version."""
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or version in _versions(if_none_match, weak_too=True)


def wanted(if_match: str | None) -> Collection[int] | None:
    """The versions that an If-Match names; None where any will do. One that names nothing of ours names none."""
    if if_match is None or if_match.strip() == "*":
        return None
    return _versions(if_match, weak_too=False)


def _versions(header: str, *, weak_too: bool) -> set[int]:
    found = _TAG.findall(header)
    return {int(text) for weak, text in found if (weak_too or not weak) and _VERSION.fullmatch(text)}
