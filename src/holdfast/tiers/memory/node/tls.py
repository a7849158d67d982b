"""TLS between nodes without an authority.

Each agent draws a key and a certificate when it starts.  It gives the certificate's fingerprint, with
its token, to the ranks of its node, which pass it to each other.  A process that asks an agent compares
the fingerprint before it sends anything.
"""

from __future__ import annotations

import hashlib
import http.client
import ssl
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

from holdfast.base.errors import UsageError

DAYS = 3650
"""Days for which a certificate is valid, longer than any agent lives: only its fingerprint is
checked."""


def serving(folder: Path) -> tuple[ssl.SSLContext, str]:
    """Return a TLS context to serve with, and the fingerprint (SHA-256, hex) of its new certificate.

    The key lies in `folder` for the moment that Python's ssl takes to read it.  UsageError without the
    package `cryptography`.
    """
    key, certificate = _drawn()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile(dir=folder) as file:  # made with mode 0600
        file.write(key + certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context, _fingerprint(ssl.PEM_cert_to_DER_cert(certificate.decode()))


def _drawn() -> tuple[bytes, bytes]:
    """Return a new key and a self-signed certificate for it, both PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UsageError(
            "TLS needs the package cryptography", hint="pip install 'torch-holdfast[tls]'"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "holdfast agent")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(pem)


def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


class PinnedConnection(http.client.HTTPSConnection):
    """HTTPS to the agent whose certificate has a fingerprint; ssl.SSLError if it has another."""

    def __init__(self, address: str, fingerprint: str, timeout_s: float) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # `connect` compares the fingerprint
        super().__init__(address, timeout=timeout_s, context=context)
        self._fingerprint = fingerprint

    def connect(self) -> None:
        super().connect()
        found = _fingerprint(self.sock.getpeercert(binary_form=True) or b"")
        if found != self._fingerprint:
            self.close()
            raise ssl.SSLError(f"its certificate is {found}, not {self._fingerprint}")
