"""A certificate authority of one sandbox, for names whose TLS the sandbox's policy lets the edge answer.

Owns its keys, which never leave this process: inside are the certificate and the names. Invariants: the authority's key
is made of the node's and the sandbox's id, so that an edge's successor has the same and nothing is stored; a
certificate is for one name; a handshake that asks for another name, or for none, fails.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import hmac
import os
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BUNDLE = "/etc/dsec/ca.pem"
"""Inside: the node's roots and the sandbox's own."""
VARIABLES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256: a private key is 1 to this, exclusive."""
_DAY = datetime.timedelta(days=1)
_KEPT = 256
_UNUSED = (
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)


class Authority:
    """Made when the first name is granted; `context` is what a connection is answered with."""

    def __init__(self, secret: bytes, sandbox_id: str) -> None:
        """`secret`: the node's; nothing else of it can be told from what is signed."""
        digest = hmac.digest(secret, f"certificate authority {sandbox_id}".encode(), hashlib.sha512)
        self._key = ec.derive_private_key(int.from_bytes(digest, "big") % (_ORDER - 1) + 1, ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dsec sandbox {sandbox_id}"[:64])])
        self._contexts: dict[str, tuple[datetime.datetime, ssl.SSLContext]] = {}

    def certificate(self) -> bytes:
        """The authority's own, PEM."""
        key = self._key.public_key()
        made = self._builder(self._name, key, 3650 * _DAY).add_extension(x509.BasicConstraints(True, 0), critical=True)
        return self._signed(made.add_extension(_usage(signs=True), critical=True))

    def bundle(self) -> bytes:
        """What programs inside trust: the node's roots, then this authority. Takes tens of milliseconds once."""
        return _roots() + self.certificate()

    def context(self, name: str) -> ssl.SSLContext:
        """For connections to a name in its one form. Kept for a day."""
        now = datetime.datetime.now(datetime.UTC)
        found = self._contexts.get(name)
        if found is None or now - found[0] > _DAY:
            if len(self._contexts) >= _KEPT:
                self._contexts.pop(next(iter(self._contexts)))
            found = self._contexts[name] = (now, self._make(name))
        return found[1]

    def _make(self, name: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(x509.Name([]), key.public_key(), 30 * _DAY)
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True)
        made = made.add_extension(x509.BasicConstraints(False, None), critical=True)
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        pem += self._signed(made.add_extension(_usage(signs=False), critical=True))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])

        def named(_: ssl.SSLObject, asked: str | None, __: ssl.SSLContext) -> int | None:
            right = asked is not None and asked.lower().rstrip(".") == name
            return None if right else int(ssl.AlertDescription.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)

        context.sni_callback = named
        fd = os.memfd_create("leaf")  # the library loads from files only, and this is on no disk
        try:
            os.write(fd, pem)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, lasts: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + lasts)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(issuer, critical=False)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


@functools.cache
def _roots() -> bytes:
    roots = ssl.create_default_context().get_ca_certs(binary_form=True)
    return b"".join(ssl.DER_cert_to_PEM_cert(each).encode() for each in roots)


def environment() -> dict[str, str]:
    """The variables by which tools find the bundle."""
    return dict.fromkeys(VARIABLES, BUNDLE)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **dict.fromkeys(_UNUSED, False)
    )
