"""A certificate for an edge's HTTP, made by itself when it begins to serve.

Nobody signs it: apiservers take the one whose digest the edge named when it joined, over a connection that its
credentials opened. So there is no authority to keep, nothing expires in the middle, and the key never leaves the node.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from msgspec import Struct

DAYS = 3650


class Certificate(Struct, frozen=True):
    """Where it lies, and its SHA-256."""

    certificate: Path
    key: Path
    digest: str


def make_certificate(state: Path, name: str) -> Certificate:
    """A new key and its certificate in the state directory (mode 0600), in place of the one before."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .sign(key, hashes.SHA256())
    )
    found = Certificate(state / "edge.crt", state / "edge.key", made.fingerprint(hashes.SHA256()).hex())
    _write(found.certificate, made.public_bytes(serialization.Encoding.PEM))
    _write(
        found.key,
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    return found


def _write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
