"""Page cursors: opaque text that holds the position of the next page and reveals nothing of the listed items.

A cursor is authenticated and encrypted with keys derived from a secret of the store, and valid only for its list,
filter and caller. The MAC is also the nonce (as in SIV modes), so equal positions have equal cursors.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass

from celery_durable.errors import CursorInvalid

_MAX_CURSOR_LENGTH = 4096
_MAC_BYTES = 16

CursorPart = int | str


@dataclass(frozen=True, slots=True)
class Cursors:
    """The cursors of one list, of its filter and the scope of the caller. ``secret`` belongs to the store."""

    secret: str
    of: tuple[object, ...]

    def write(self, *parts: CursorPart) -> str:
        """Return the cursor for the position after the item with the sort key ``parts``."""
        text = json.dumps(parts, separators=(",", ":")).encode()
        mac = self._compute_mac(text)
        return base64.urlsafe_b64encode(mac + self._apply_mask(text, mac)).decode().rstrip("=")

    def read(self, cursor: object) -> list[CursorPart]:
        """Return the parts that `write` got. Raises CursorInvalid for a text that `write` did not return."""
        if not isinstance(cursor, str) or len(cursor) > _MAX_CURSOR_LENGTH:
            raise CursorInvalid(cursor)
        try:
            found = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        except ValueError as exc:
            raise CursorInvalid(cursor) from exc
        mac = found[:_MAC_BYTES]
        text = self._apply_mask(found[_MAC_BYTES:], mac)
        if not hmac.compare_digest(self._compute_mac(text), mac):
            raise CursorInvalid(cursor)
        parts: list[CursorPart] = json.loads(text)
        return parts

    def _compute_mac(self, text: bytes) -> bytes:
        of = json.dumps(self.of, ensure_ascii=True).encode()
        key = self._derive_key(b"seal")
        inner = hashlib.blake2b(of, key=key).digest()  # of fixed length, so it cannot be confused with the text
        return hashlib.blake2b(inner + text, key=key, digest_size=_MAC_BYTES).digest()

    def _apply_mask(self, text: bytes, mac: bytes) -> bytes:
        mask = hashlib.shake_256(self._derive_key(b"mask") + mac).digest(len(text))
        return bytes(a ^ b for a, b in zip(text, mask, strict=True))

    def _derive_key(self, use: bytes) -> bytes:
        return hashlib.blake2b(self.secret.encode(), person=use).digest()


def make_version_tag(*parts: int) -> str:
    """Return an opaque text that is different for different numbers."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
