"""Signed texts for links in mails: data that whoever has the text can read, and nobody can change without the key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any

_PURPOSE = b"celery_durable answer 1\0"
"""Keeps a signature from being valid for anything else that the same key signs."""


def sign(key: str, data: Sequence[str | int]) -> str:
    """Return a text for URLs that contains the data and its signature."""
    body = _encode(json.dumps(data, separators=(",", ":")).encode())
    return f"{body}.{_encode(_mac(key, body))}"


def read_signed(key: str, text: str) -> list[Any] | None:
    """Return the data of a text from `sign`, or None if it was not signed with this key."""
    body, _, signature = text.partition(".")
    if not hmac.compare_digest(_encode(_mac(key, body)).encode(), signature.encode()):
        return None
    data: list[Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return data


def _mac(key: str, body: str) -> bytes:
    return hmac.digest(key.encode(), _PURPOSE + body.encode(), hashlib.sha256)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
