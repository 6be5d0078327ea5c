"""Programs inside against the egress: real sandboxes, a real server, servers outside that record what reaches them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from egress_world import (
    ECHO,
    EVIL,
    FLOOD,
    FLOOD_BYTES,
    GET,
    PRELUDE,
    World,
    events,
    heard,
    inside,
    now,
    reasons,
    world,
)

import dsec
from dsec.egress.audit import BURST, WINDOW_S
from dsec.errors import PermissionDenied
from server_kit import PATIENCE_S, until

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def there(debian_module_state: Path) -> Iterator[World]:
    with world(debian_module_state) as found:
        yield found


@pytest.fixture(scope="module")
def box(there: World) -> Iterator[dsec.Sandbox]:
    with there.client.create(
        "debian", network={"good": True, "few": True, "little": True, "inner": True, "host:public.example": True}
    ) as box:
        yield box


def test_a_granted_name_is_reached_and_on_record(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    code = f'found = talk("GOOD.example.", 80, b"{GET.format(path="/", host="good.example")}")'
    assert inside(box, code).startswith("HTTP/1.1 200")
    (record,) = heard(box, at, "connection", len)
    assert (record["name"], record["address"], record["permission"]) == ("good.example", there.outside.address, "good")
    assert record["reason"] == "granted"
    assert record["in"] > 0 < record["out"]


def test_other_names_and_addresses_are_not(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    found = inside(
        box,
        f"""found = [reach(*where) for where in (
            ("other.example", 80), ("good.example.evil.example", 80), ("{there.outside.address}", 80),
            ("1.1.1.1", 53), ("8.8.8.8", 443), ("169.254.169.254", 80), ("198.18.255.254", 80), ("10.0.0.1", 22),
            ("good.example", 22), ("::1", 80), ("2606:4700::1111", 443))]""",
    )
    assert set(found) <= {"gaierror", "ConnectionResetError", "ConnectionRefusedError", "OSError"}, found
    assert {"address_not_granted", "port_not_granted", "unknown_address"} <= reasons(box, at)


@pytest.mark.parametrize("name", ["public.example", "metadata.example", "mapped.example"])
def test_names_that_lead_inwards(there: World, box: dsec.Sandbox, name: str) -> None:
    at = now(box)
    found = inside(box, f'found = talk("{name}", 80, b"{GET.format(path="/", host=name)}")')
    assert "private_address" in found
    assert reasons(box, at) == {"private_address"}


@pytest.mark.parametrize(
    "sent",
    [
        EVIL,
        GET.format(path="/", host="good.example") + EVIL,
        GET.format(path="http://evil.example/", host="good.example"),
        "CONNECT evil.example:443 HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n",
        "POST / HTTP/1.1\\r\\nHost: good.example\\r\\nContent-Length: 4\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0"
        + "\\r\\n\\r\\n"
        + EVIL,
        "POST / HTTP/1.1\\r\\nHost: good.example\\r\\nTransfer-Encoding:\\x0bchunked\\r\\n\\r\\n" + EVIL,
        "POST / HTTP/1.1\\r\\nHost: good.example\\r\\nContent-Length: 0\\r\\nContent-Length: 50\\r\\n\\r\\n" + EVIL,
        "GET / HTTP/1.1\\nHost: good.example\\n\\n" + EVIL,
        "GET / HTTP/1.1\\r\\nHost: good.example\\r\\nUpgrade: websocket\\r\\n\\r\\n" + EVIL,
    ],
)
def test_no_request_for_another_host_gets_out(there: World, box: dsec.Sandbox, sent: str) -> None:
    there.outside.received.clear()
    inside(box, f'found = talk("good.example", 80, b"{sent}", end=True)')
    assert b"evil" not in there.outside.received


def test_a_redirect_leads_nowhere(there: World, box: dsec.Sandbox) -> None:
    found = inside(
        box,
        """
import urllib.request, urllib.error
found = []
for handlers in ([urllib.request.ProxyHandler({})], []):
    try:
        found.append(urllib.request.build_opener(*handlers).open("http://good.example/redirect", timeout=90).status)
    except urllib.error.URLError as error:
        found.append(str(error))
""",
    )
    assert "not known" in found[0] or "Name" in found[0]
    assert "403" in found[1]


def test_tls_for_another_name(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    there.outside.received.clear()
    found = inside(
        box,
        """
def shake(name):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    s = tcp("good.example", 443)
    try:
        context.wrap_socket(s, server_hostname=name)
    except OSError as error:
        return type(error).__name__
found = [shake("evil.example"), shake(None), talk("good.example", 443, b"SSH-2.0-hello\\r\\n"), shake("good.example")]
""",
    )
    assert found[0] == found[1] == found[2] == "ConnectionResetError"
    assert reasons(box, at) == {"tls_name_mismatch", "tls_name_missing", "not_tls"}
    assert b"good.example" in there.outside.received  # the echo answers no TLS, but the hello got there
    assert b"evil.example" not in there.outside.received
    assert b"SSH" not in there.outside.received


def test_who_says_nothing_is_let_go(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    found = inside(
        box,
        """
def drip(port):
    s = tcp("good.example", port)
    try:
        for byte in b"GET / HTTP/1.1 and so on, very slowly, for a long time" * 9:
            s.sendall(bytes([byte])); time.sleep(0.1)
    except OSError as error:
        return type(error).__name__
found = drip(80)
""",
    )
    assert found is not None, "it went on for as long as it dripped"
    assert "said_nothing" in reasons(box, at)


def test_half_closed_and_slow_readers(there: World, box: dsec.Sandbox) -> None:
    found = inside(
        box,
        f"""
slow = tcp("good.example", {FLOOD})
time.sleep(1)
found = talk("good.example", {ECHO}, b"hello", end=True)
""",
    )
    assert found == "hello<end>"
    until(lambda: there.outside.flooded > 0)
    assert there.outside.flooded < FLOOD_BYTES / 2, "what nobody reads isn't taken"


def test_limits(there: World, box: dsec.Sandbox) -> None:
    at = now(box)
    found = inside(
        box,
        f"""
held = []
for _ in range(6):
    s = tcp("few.example", {ECHO})  # a word where the reset comes at once
    try:
        s.sendall(b"x")
        held.append((s.recv(1).decode(), s))
    except (OSError, AttributeError):
        held.append(("", s))
found = [said for said, _ in held]
found.append(len(talk("little.example", {ECHO}, b"y" * 300000, end=True)))
""",
    )
    assert found[:6] == ["x", "x", "x", "", "", ""]
    assert found[6] < 150_000
    assert "connections_limit" in reasons(box, at)
    heard(box, at, "connection", lambda found: "bytes_limit" in {each["reason"] for each in found})


def test_a_change_cuts_what_is_open(there: World, box: dsec.Sandbox) -> None:
    now(box)
    there.outside.received.clear()
    command = box.commands.start(
        [
            "python3",
            "-uc",
            f"{PRELUDE}\ns = tcp('good.example', {ECHO}); s.sendall(b'a')\n"
            "s.settimeout(150)\ntry: print(s.recv(1), s.recv(1))\nexcept OSError as error: print(type(error).__name__)",
        ]
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not there.outside.received and time.monotonic() < deadline:
            time.sleep(0.05)
        box.network.update({"good": False})
        assert "ConnectionResetError" in command.wait().stdout
        assert inside(box, f'found = reach("good.example", {ECHO})') == "gaierror"
        heard(box, 0, "connection", lambda found: "policy_changed" in {each["reason"] for each in found})
    finally:
        box.network.update({"good": True})


def test_a_policy_is_not_widened_from_inside(there: World, box: dsec.Sandbox) -> None:
    made = there.client.create("debian")
    try:
        assert made.info.token is not None
        mine = dsec.Client(there.server.url, made.info.token)
        with mine, pytest.raises(PermissionDenied):
            mine.connect(made.id).network.update({"good": True})
        with pytest.raises(PermissionDenied):
            made.network.update({"internet": True})
        assert inside(made, 'found = [reach("good.example", 80), reach("1.1.1.1", 80)]')[0] == "gaierror"
        assert made.network.get().policy == {}
    finally:
        made.kill()


def test_a_key_gives_no_more_than_it_has(there: World) -> None:
    narrow = there.client.create_key("narrow", policy=dsec.KeyPolicy(allow=("good", "host:*.example.com")))
    with dsec.Client(there.server.url, narrow) as client:
        client.create("debian", network={"good": True, "host:a.example.com": False}).kill()
        for network in ({"few": True}, {"internet": True}, {"host:example.com": True}, {"ip:1.1.1.1": True}):
            with pytest.raises(PermissionDenied):
                client.create("debian", network=network)
        with pytest.raises(PermissionDenied):
            client.create_key(policy=dsec.KeyPolicy())
        with dsec.Client(there.server.url, client.create_key("heir")) as heir, pytest.raises(PermissionDenied):
            heir.create("debian", network={"few": True})


def test_a_gateway_serves_while_it_is_granted(there: World, box: dsec.Sandbox) -> None:
    ask = """
import urllib.request, urllib.error
try:
    found = urllib.request.urlopen("http://http.dsec/api.example/v1/x", timeout=90).read().decode()
except urllib.error.HTTPError as error:
    found = error.code
except OSError as error:
    found = type(error).__name__
"""
    at = now(box)
    assert inside(box, ask) == "URLError"
    box.network.update({"http:api.example/v1/*": True})
    assert inside(box, ask) == "ok"
    box.network.update({"http:api.example/v1/*": False, "http:api.example/v2/*": True})
    assert inside(box, ask) == 403
    box.network.update({"http:api.example/v2/*": False})
    assert inside(box, ask) == "URLError"
    assert [each["status"] for each in heard(box, at, "gateway", lambda found: len(found) > 1)] == [200, 403]


def test_a_link_leads_to_one_port_of_one_sandbox(there: World) -> None:
    with (
        there.client.create("debian", name="db", run="linked") as db,
        there.client.create("debian", run="linked", network={"sandbox:db:8000": True}) as box,
        there.client.create("debian", network={"sandbox:db:8000": True}) as stranger,
    ):
        db.commands.start(["python3", "-c", f"{PRELUDE}\ns = socket.create_server(('127.0.0.1', 8000))\nwhile True:\n"
                           " c, _ = s.accept(); c.sendall(c.recv(100) + b' by db'); c.close()"])  # fmt: skip
        found: Any = None
        deadline = time.monotonic() + PATIENCE_S
        while found != "hello by db" and time.monotonic() < deadline:
            found = inside(box, 'found = reach("db", 8000)')
        assert found == "hello by db"
        assert "hello" not in inside(box, 'found = reach("db", 8001)')
        assert "hello" not in inside(stranger, 'found = reach("db", 8000)')


def test_floods_leave_room_in_the_log(there: World, box: dsec.Sandbox) -> None:
    at, began = now(box), time.monotonic()
    inside(
        box,
        """
def ask(n):
    packet = struct.pack("!HHHHHH", n, 256, 1, 0, 0, 0)
    packet += bytes([40]) + (b"%040d" % n) + b"\\x06tunnel\\x07example\\0" + struct.pack("!HH", 16, 1)
    s.sendto(packet, ("9.9.9.9", 53))
    try:
        return s.recv(512)[3] & 15
    except OSError:
        return None
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20)
codes = {ask(n) for n in range(1500)}
for n in range(1500):
    c = socket.socket(); c.setblocking(False)
    try: c.connect(("10.1.%d.%d" % (n >> 8, n & 255), 1 + n % 1024))
    except OSError: pass
    if n % 50 == 0: time.sleep(0.02)
    c.close()
found = sorted(str(code) for code in codes)
""",
    )
    took_s = time.monotonic() - began
    time.sleep(WINDOW_S + 1)
    heard(box, at, "name_refused", lambda found: sum(each.get("count", 1) for each in found) >= 1400)
    seen = [each for each in events(box, at) if each.type in ("name_refused", "connection_refused")]
    assert len(seen) < max(400, (took_s / WINDOW_S + 2) * (BURST + 2))


def test_policy_and_names_outlive_the_server(there: World, box: dsec.Sandbox) -> None:
    before = inside(box, 'found = socket.gethostbyname("good.example")')
    there.server.kill()
    there.server.start()
    assert inside(box, 'found = socket.gethostbyname("good.example")') == before
    request = GET.format(path="/", host="good.example")
    assert inside(box, f'found = talk("{before}", 80, b"{request}")').startswith("HTTP/1.1 200")
    assert inside(box, 'found = reach("other.example", 80)') == "gaierror"
