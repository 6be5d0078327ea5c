"""The HTTP proxy inside: another spelling of connections, which reaches nothing that they don't."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from egress_world import AUTHORITY, ECHO, EVIL, GET, TLS, World, events, heard, inside, now, reasons, world

import dsec

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def there(debian_module_state: Path) -> Iterator[World]:
    with world(debian_module_state) as found:
        yield found


@pytest.fixture(scope="module")
def box(there: World) -> Iterator[dsec.Sandbox]:
    with there.client.create("debian", network={"good": True, "host:public.example": True}) as box:
        yield box


CONNECT = "CONNECT {to} HTTP/1.1\\r\\nHost: {to}\\r\\n\\r\\n"


def test_the_proxy_reaches_what_is_granted(box: dsec.Sandbox) -> None:
    at = now(box)
    found = inside(
        box,
        f"""
import os, urllib.request
found = [urllib.request.urlopen("http://good.example/x", timeout=90).read().decode(), os.environ["http_proxy"]]
os.environ.clear()
found.append(urllib.request.urlopen("http://good.example/x", timeout=90).read().decode())
s = tcp("proxy.dsec", 3128)
s.sendall(b"{CONNECT.format(to=f"good.example:{ECHO}")}")
found.append(s.recv(100).decode()[:12])
s.sendall(b"hello")
found.append(s.recv(100).decode())
""",
    )
    assert found == ["ok", "http://proxy.dsec:3128", "ok", "HTTP/1.1 200", "hello"]
    made = heard(box, at, "connection", lambda found: len(found) > 2)
    assert {(each["name"], each["port"], each["permission"]) for each in made} == {
        ("good.example", 80, "good"), ("good.example", ECHO, "good")
    }  # fmt: skip


TOOLS = (
    f"git ls-remote https://tls.example:{TLS}/git",
    f"python3 -m pip download --no-deps --retries 0 --index-url https://tls.example:{TLS}/pip tool",
    f"""python3 -c 'import urllib.request as u; u.urlopen("https://tls.example:{TLS}/urllib")'""",
)


def test_tools_work_by_the_proxy_and_without(there: World) -> None:
    trust = dict.fromkeys(("SSL_CERT_FILE", "GIT_SSL_CAINFO", "PIP_CERT"), "/tmp/ca.pem")
    with there.client.create("debian", network={"tls": True}, env=trust) as box:
        box.files.write("/tmp/ca.pem", AUTHORITY.certificate())
        for proxy in ({}, {"https_proxy": "", "http_proxy": ""}):
            there.outside.received.clear()
            results = [box.commands.run(tool, env=proxy, merge_stderr=True) for tool in TOOLS]
            for path in (b"/git/info/refs", b"/pip/tool/", b"/urllib"):
                assert b"GET " + path in there.outside.received, results


AROUND = [
    (CONNECT.format(to="evil.example:443"), "not_granted"),
    (CONNECT.format(to="good.example:22"), "port_not_granted"),
    (CONNECT.format(to="127.0.0.1:80"), "address_not_granted"),
    (CONNECT.format(to="[::1]:80"), "address_not_granted"),
    (CONNECT.format(to="0.0.0.0:80"), "address_not_granted"),
    (CONNECT.format(to="1.1.1.1:53"), "address_not_granted"),
    (CONNECT.format(to="169.254.169.254:80"), "address_not_granted"),
    (CONNECT.format(to="[::ffff:169.254.169.254]:80"), "address_not_granted"),
    (CONNECT.format(to="proxy.dsec:3128"), "not_granted"),
    (CONNECT.format(to="198.18.0.1:3128"), "unknown_address"),
    (CONNECT.format(to="http.dsec:80"), "not_granted"),
    (GET.format(path="http://http.dsec/api.example/v1/x", host="http.dsec"), "not_granted"),
    (GET.format(path="http://evil.example/", host="evil.example"), "not_granted"),
    (GET.format(path="http://good.example/", host="evil.example"), "http_host_mismatch"),
    (GET.format(path="http://evil.example/", host="good.example"), "not_granted"),
    (GET.format(path="http://evil.example@good.example/", host="good.example"), "http_malformed"),
    (GET.format(path="http://good.example:443/", host="good.example:443"), "not_tls"),
    (GET.format(path="/", host="good.example"), "http_malformed"),
    ("CONNECT good.example:443 HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n", "http_host_mismatch"),
    (CONNECT.format(to="good.example:80") + EVIL, "http_malformed"),
    ("CONNECT good.example:80 HTTP/1.1\\r\\nContent-Length: 9\\r\\n\\r\\n" + EVIL, "http_malformed"),
]  # fmt: skip


def test_the_proxy_is_no_way_around_the_policy(there: World) -> None:
    """Whatever is asked of it, in whatever form, is decided as the connection that it stands for."""
    with there.client.create("debian", network={"good": True, "http:api.example/v1/*": True}) as box:
        _go_around(there, box)


def _go_around(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    there.outside.received.clear()
    asked = ", ".join(f'talk("proxy.dsec", 3128, b"{sent}", end=True)' for sent, _ in AROUND)
    for answer, (sent, _) in zip(inside(box, f"found = [{asked}]"), AROUND, strict=True):
        assert answer.startswith("HTTP/1.1 403"), (sent, answer)
    found = [each.data["reason"] for each in events(box, at) if each.type == "connection_refused"]
    assert found == [reason for _, reason in AROUND]
    assert not there.outside.received


def test_later_requests_to_the_proxy_are_for_the_same_target(there: World, box: dsec.Sandbox) -> None:
    first = GET.format(path="http://good.example/", host="good.example")
    for second in (
        EVIL,
        GET.format(path="http://evil.example/", host="evil.example"),
        CONNECT.format(to="evil.example:1"),
    ):
        there.outside.received.clear()
        inside(box, f'found = talk("proxy.dsec", 3128, b"{first}{second}", end=True)')
        assert b"evil" not in there.outside.received
    at = now(box)
    asked = CONNECT.format(to="public.example:80")
    inside(
        box,
        f"""
s = tcp("proxy.dsec", 3128)
s.sendall(b"{asked}")
s.recv(100)
s.sendall(b"{GET.format(path="/", host="public.example")}")
found = s.recv(100).decode()
""",
    )
    assert reasons(box, at) == {"private_address"}


def test_what_is_said_behind_connect_is_checked(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    there.outside.received.clear()
    found = inside(
        box,
        f"""
def through(to, data):
    s = tcp("proxy.dsec", 3128)
    s.sendall(b"CONNECT %s HTTP/1.1\\r\\n\\r\\n" % to)
    assert s.recv(100).startswith(b"HTTP/1.1 200")
    try:
        s.sendall(data)
        return s.recv(100).decode("latin-1")
    except OSError as error:
        return type(error).__name__
def hello(name):
    out, context = ssl.MemoryBIO(), ssl.create_default_context()
    try:
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        return out.read()
found = [through(b"good.example:443", hello("evil.example")), through(b"good.example:443", b"SSH-2.0-x\\r\\n"),
         through(b"good.example:80", b"{EVIL}"), through(b"good.example:443", hello("good.example"))]
""",
    )
    assert found[:2] == ["ConnectionResetError"] * 2
    assert "403" in found[2]
    assert found[3]
    assert reasons(box, at) == {"tls_name_mismatch", "not_tls", "http_host_mismatch"}
    assert b"evil" not in there.outside.received
    assert b"SSH" not in there.outside.received


def test_callers_say_which_proxy(there: World, box: dsec.Sandbox) -> None:
    shown = ["sh", "-c", 'echo "$http_proxy,$HTTP_PROXY,$https_proxy"']
    assert box.commands.run(shown, env={"HTTP_PROXY": "mine"}).stdout == ",mine,http://proxy.dsec:3128\n"
    with there.client.create("debian") as other:
        assert other.commands.run(shown).stdout == ",,\n"
        assert inside(other, 'found = reach("proxy.dsec", 3128)') == "gaierror"
        other.network.set({"good": True})
        assert other.commands.run(shown).stdout.startswith("http://proxy.dsec:3128,")
        other.network.set({})
        assert other.commands.run(shown).stdout == ",,\n"
        assert "HTTP" not in inside(other, 'found = reach("198.18.0.1", 3128)')
