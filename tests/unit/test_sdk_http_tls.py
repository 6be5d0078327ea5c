"""The client's own HTTP over TLS: a server whose certificate this machine trusts, and those that it doesn't."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from yarl import URL

from dsec.sdk._http import ConnectFailed, Pool

BODY = bytes(range(256)) * 4000


def make_certificate(path: Path, *names: x509.GeneralName, days: int = 1) -> Path:
    """A certificate that signs itself, and its key, in one file. `days`: until it ends, from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dsec test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(made.public_bytes(pem) + private)
    return path


@asynccontextmanager
async def pool_of(certificate: Path, *, cut: bool = False, pinned: str = "") -> AsyncIterator[Pool]:
    """To a server that answers with `BODY`; `cut`: it goes without saying that this is the end; `pinned`: the digest
    of the only certificate that is taken."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                if cut:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY[:1000])
                    await writer.drain()
                    writer.transport.abort()
                    return
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    pool = Pool(URL(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"), certificate=pinned)
    try:
        async with asyncio.timeout(120):
            yield pool
    finally:
        await pool.close()
        listening.close()


LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A certificate of 127.0.0.1 that this machine trusts."""
    path = make_certificate(tmp_path / "trusted.pem", LOOPBACK)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    return path


async def test_answers_come_whole_and_the_connection_is_used_again(trusted: Path) -> None:
    async with pool_of(trusted) as pool:
        for _ in range(3):
            answer = await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
            assert (answer.status, await answer.read()) == (200, BODY)
        assert len(pool._all) == 1


async def test_an_answer_that_is_cut_is_an_error(trusted: Path) -> None:
    async with pool_of(trusted, cut=True) as pool:
        answer = await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionError):
            await answer.read()


@pytest.mark.parametrize("what", ["a stranger's", "of another name", "that has ended"])
async def test_a_certificate_that_is_not_good_is_refused(
    what: str, trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [x509.DNSName("elsewhere.example")] if what == "of another name" else [LOOPBACK]
    shown = make_certificate(tmp_path / "shown.pem", *names, days=-1 if what == "that has ended" else 1)
    if what != "a stranger's":
        monkeypatch.setenv("SSL_CERT_FILE", str(shown))
    async with pool_of(shown) as pool:
        with pytest.raises(ConnectFailed, match="certificate"):
            await pool.ask(b"GET / HTTP/1.1\r\n\r\n")


async def test_the_one_certificate_that_was_named_is_taken_and_no_other(trusted: Path, tmp_path: Path) -> None:
    shown = make_certificate(tmp_path / "shown.pem", x509.DNSName("edge-7"))
    pinned = x509.load_pem_x509_certificate(shown.read_bytes()).fingerprint(hashes.SHA256()).hex()
    async with pool_of(shown, pinned=pinned) as pool:
        answer = await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
        assert (answer.status, await answer.read()) == (200, BODY)
    async with pool_of(trusted, pinned=pinned) as pool:
        with pytest.raises(ConnectFailed, match="another certificate"):
            await pool.ask(b"GET / HTTP/1.1\r\n\r\n")


async def test_a_server_without_tls_is_an_error(trusted: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = Pool(URL(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"))
    try:
        with pytest.raises(ConnectFailed):
            await pool.ask(b"GET / HTTP/1.1\r\n\r\n")
    finally:
        await pool.close()
        listening.close()
