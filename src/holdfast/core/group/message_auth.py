"""Seals: message authentication on a torch store, which has no password.

A process that reaches the port of a torch store may read, write and delete there.  So rank 0 draws a key
for each board and sends it to the other ranks without a store (`Exchange.confide`); every message on the
board carries a mark (MAC) of its place and content, which only a holder of the key can make:

    board     "save/3/answer" ──► mark(key, "save/3/answer", message) + message
    a rank    the mark is right: the message is from a rank of this run; else it is not there

Without the key nobody can forge or change a message, or move it to another place.  An attacker can still
delete messages or fill the store: that ends a run, as does a write to torch's own keys, but changes no
decision.

Secret texts are encrypted as well: a keyed digest of the text is both its mark and the nonce of the key
stream (SIV, RFC 5297), so that equal texts have equal ciphertexts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

KEY_BYTES = 32
MARK_BYTES = 16


class Seal:
    """Authentication and encryption with the key of one board."""

    def __init__(self, key: bytes) -> None:
        marking, hiding, self._masking = (
            hashlib.blake2b(key, digest_size=KEY_BYTES, person=use).digest()
            for use in (b"mark", b"hide", b"mask")
        )
        self._marks = hashlib.blake2b(key=marking, digest_size=MARK_BYTES)
        self._hides = hashlib.blake2b(key=hiding, digest_size=MARK_BYTES)

    def close(self, name: str, message: bytes) -> bytes:
        """Return a message with its mark for the place `name`."""
        return self._mark(name, message) + message

    def open(self, name: str, data: bytes) -> bytes | None:
        """Return the message from the place `name`; None if its mark is wrong."""
        mark, message = data[:MARK_BYTES], data[MARK_BYTES:]
        return message if hmac.compare_digest(mark, self._mark(name, message)) else None

    def hide(self, text: str) -> str:
        """Encrypt a text; only its length, and its equality with another, remain visible."""
        data = text.encode()
        mark = _digest(self._hides, data)
        return base64.b64encode(mark + self._masked(mark, data)).decode()

    def reveal(self, hidden: str) -> str:
        """Decrypt a text.  ValueError if it was not encrypted with this key."""
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
    """Return the keyed digest of parts, joined."""
    digest = keyed.copy()
    for part in parts:
        digest.update(part)
    return digest.digest()
