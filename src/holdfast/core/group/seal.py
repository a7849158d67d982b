"""Seals: how ranks know each other's messages from a stranger's, on a store that has no password.

Whoever reaches the port of a torch store may read, write and delete there.  So rank 0 draws a key for each
board and confides it to the other ranks (`Exchange.confide`), by no store; and every message on the board
bears a mark that only who has the key can make, for the place where it lies:

    board     "save/3/answer" ──► mark(key, "save/3/answer", message) + message
    a rank    the mark is right: the message is from a rank of this run; else it is not there

Nobody without the key can make a message, change one or move it to another place.  He can still delete
messages or fill the store: that ends a run, as does a write to torch's own keys, but decides nothing.

What nobody else may read is hidden besides: a keyed digest of the text is its mark and the nonce of the
stream by which it is masked (SIV, RFC 5297), so that equal texts are hidden equally.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

KEY_BYTES = 32
MARK_BYTES = 16


class Seal:
    """The key of one board, and what can be done with it."""

    def __init__(self, key: bytes) -> None:
        marking, hiding, self._masking = (
            hashlib.blake2b(key, digest_size=KEY_BYTES, person=use).digest()
            for use in (b"mark", b"hide", b"mask")
        )
        self._marks = hashlib.blake2b(key=marking, digest_size=MARK_BYTES)
        self._hides = hashlib.blake2b(key=hiding, digest_size=MARK_BYTES)

    def close(self, name: str, message: bytes) -> bytes:
        """Return a message with its mark, for the place of that name."""
        return self._mark(name, message) + message

    def open(self, name: str, data: bytes) -> bytes | None:
        """Return the message that lies at a place; None if no rank of this run has put it there."""
        mark, message = data[:MARK_BYTES], data[MARK_BYTES:]
        return message if hmac.compare_digest(mark, self._mark(name, message)) else None

    def hide(self, text: str) -> str:
        """Return what tells nothing of a text but its length, and whether it equals another."""
        data = text.encode()
        mark = _digest(self._hides, data)
        return base64.b64encode(mark + self._masked(mark, data)).decode()

    def reveal(self, hidden: str) -> str:
        """Return the text that was hidden with this key; ValueError if it was not."""
        data = base64.b64decode(hidden)
        mark = data[:MARK_BYTES]
        text = self._masked(mark, data[MARK_BYTES:])
        if not hmac.compare_digest(mark, _digest(self._hides, text)):
            raise ValueError("hidden with another key")
        return text.decode()

    def _mark(self, name: str, message: bytes) -> bytes:
        return _digest(self._marks, f"{len(name)} {name}".encode(), message)

    def _masked(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._masking + nonce).digest(len(data))
        return bytes(a ^ b for a, b in zip(data, stream))


def _digest(keyed: hashlib.blake2b, *parts: bytes) -> bytes:
    """Return the digest of parts by a digest that has its key already."""
    digest = keyed.copy()
    for part in parts:
        digest.update(part)
    return digest.digest()
