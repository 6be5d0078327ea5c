"""TLS that the edge answers, for names whose permission says so: what it gives, and what it gives away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from egress_world import SECRET, World, heard, inside, now, reasons, world

import dsec

pytestmark = pytest.mark.root

GRANT = {"http:api.example/v1/*": {"intercept": True}}
FETCH = """
import urllib.request, urllib.error
def fetch(url, **options):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, **options), timeout=90).read().decode()
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return str(error)
"""
SHAKE = """
def shake(sni, host="api.example", where="api.example"):
    context = ssl.create_default_context()
    context.check_hostname = False
    s = tcp(where, 443)
    if isinstance(s, str):
        return s
    try:
        with context.wrap_socket(s, server_hostname=sni) as t:
            t.sendall(b"GET /v1/x HTTP/1.1\\r\\nHost: %s\\r\\nConnection: close\\r\\n\\r\\n" % host.encode())
            return t.recv(12).decode()
    except OSError as error:
        return "failed"
"""


KEPT = """
import http.client
c = http.client.HTTPSConnection("api.example", timeout=90)
for _ in range(2):
    try:
        c.request("GET", "/v1/x")
        r = c.getresponse()
        r.read()
        c.auto_open = 0
        print(r.status)
    except (OSError, http.client.HTTPException) as error:
        print("cut", error)
    input()
"""


@pytest.fixture(scope="module")
def there(debian_module_state: Path) -> Iterator[World]:
    with world(debian_module_state) as found:
        yield found


@pytest.fixture(scope="module")
def box(there: World) -> Iterator[dsec.Sandbox]:
    with there.client.create("debian", network={**GRANT, "good": True}) as box:
        yield box


def test_paths_headers_and_the_log_hold_for_https(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    there.outside.received.clear()
    urls = ("v1/x?q=1", "v2/x", "v1/../v2/x", "v1%2f..%2fv2")
    found = inside(box, f'{FETCH}found = [fetch("https://api.example/" + path) for path in {urls}]')
    assert found[0] == "ok"
    assert set(found[1:]) <= {400, 403}
    assert b"GET /v1/x?q=1 HTTP/1.1" in there.outside.received
    assert f"Bearer {SECRET}".encode() in there.outside.received
    assert b"v2" not in there.outside.received
    assert inside(box, f'{FETCH}found = fetch("https://api.example/v1/x", method="DELETE")') == 403
    seen = heard(box, at, "gateway", lambda found: len(found) > 1)
    assert [(each["status"], each["permission"]) for each in seen[:2]] == [
        (200, "http:api.example/v1/*"), (403, "http:api.example/v1/*")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "git ls-remote https://api.example/v1/repo",
        "python3 -m pip download --no-deps --index-url https://api.example/v1/simple tool",
    ],
)
def test_tools_trust_it(there: World, box: dsec.Sandbox, command: str) -> None:
    there.outside.received.clear()
    box.commands.run(command)
    assert b"GET /v1/" in there.outside.received


def test_it_answers_for_the_granted_name_alone(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    there.outside.received.clear()
    found = inside(
        box,
        f"""{SHAKE}
found = [shake("api.example"), shake("evil.example"), shake(None), shake("api.example", host="http.dsec"),
         shake("api.example", host="evil.example"), talk("api.example", 443, b"GET / HTTP/1.1\\\\r\\\\n\\\\r\\\\n"),
         shake("api.example", where="good.example"), reach("api.example", 80)]
""",
    )
    assert found[0] == "HTTP/1.1 200"
    assert found[1:3] == ["failed"] * 2
    assert found[3:5] == ["HTTP/1.1 421"] * 2
    assert "HTTP/1.1 200" not in found[5]
    assert found[6] == "failed", "another name is not intercepted: the echo behind it speaks no TLS"
    assert "Reset" in found[7]
    assert b"evil" not in there.outside.received
    assert reasons(box, at) == {"tls_name_mismatch", "not_tls", "port_not_granted"}


def test_no_key_is_inside(there: World, box: dsec.Sandbox) -> None:
    """And nothing of it can be used for another sandbox."""
    with there.client.create("debian", network=GRANT) as other:
        one, two = (str(each.files.read("/etc/dsec/ca.pem")) for each in (box, other))
        assert "PRIVATE" not in one
        assert one.split("-----BEGIN")[-1] != two.split("-----BEGIN")[-1]
        found = box.commands.run(f"grep -rIl -e 'PRIVATE KEY' -e '{SECRET}' /etc/dsec /tmp /root /proc/1 2>/dev/null")
        assert found.stdout == ""
        other.files.write("/etc/dsec/ca.pem", one)
        assert "CERTIFICATE_VERIFY_FAILED" in inside(other, f'{FETCH}found = fetch("https://api.example/v1/x")')


def test_the_server_outside_is_verified(there: World, box: dsec.Sandbox) -> None:
    box.network.update({"http:tls.example/*": {"intercept": True}})
    there.outside.received.clear()
    there.outside.refused = 0
    assert inside(box, f'{FETCH}found = fetch("https://tls.example/v1/x")') == 502
    assert there.outside.refused
    assert not there.outside.received


def test_it_comes_and_goes_with_the_policy_and_outlives_the_server(there: World) -> None:
    ask = f'{FETCH}found = fetch("https://api.example/v1/x")'
    with there.client.create("debian", network={"http:api.example/v1/*": True}) as box:
        assert "403" in inside(box, ask), "the proxy refuses"
        assert "SSL_CERT_FILE" not in box.commands.run("env").stdout
        box.network.update(GRANT)
        assert "SSL_CERT_FILE" in box.commands.run("env").stdout
        assert inside(box, ask) == "ok"
        kept = box.commands.start(["python3", "-uc", KEPT], stdin=True)
        assert "200" in next(iter(kept)).data.decode()
        box.network.update({"http:api.example/v1/*": True})
        kept.write_stdin("\n\n")
        assert "cut" in kept.wait().stdout
        box.network.update(GRANT)
        there.server.kill()
        there.server.start()
        assert inside(box, ask) == "ok"
        box.network.update({"http:api.example/v1/*": True})
        assert "403" in inside(box, ask)
        with pytest.raises(dsec.errors.InvalidRequest):
            box.network.update({"http:http.dsec/*": {"intercept": True}})
        with pytest.raises(dsec.errors.InvalidRequest):
            box.network.update({"http:api.example:8443/*": {"intercept": True}})
