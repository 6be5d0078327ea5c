"""The network of container sandboxes, as far as the edge's two sockets: who connects where, DNS, restarts, ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from network_kit import Box, NetworkWatch, a_record, box_of, make, open_backend, spec, tracked_connections, until

from dsec.backends.container.backend import ContainerBackend
from dsec.errors import Unavailable, Unsupported
from dsec.ports import NetworkHost

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(
    debian_module_state: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ContainerBackend]:
    backend = open_backend(debian_module_state, tmp_path_factory.mktemp("net") / f"run-{os.getpid()}")
    await backend.open({})
    yield backend
    await backend.close(keep=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(backend: ContainerBackend) -> AsyncIterator[Box]:
    """One that is served, for tests that only look."""
    async with box_of(backend) as box:
        yield box


async def test_every_address_and_port_arrives_with_its_name(box: Box) -> None:
    assert isinstance(box.instance, NetworkHost)
    wanted = ["198.18.0.5:443", "1.2.3.4:80", "10.0.0.1:1", "192.0.2.1:61053", "8.8.8.8:65535", "8.8.8.8:53"]
    out = await box.python(
        f"for to in {wanted!r}: print(say(*to.split(':')))\n"
        "s = dial('1.1.1.1', 443); print(s.getsockname()[0], s.getpeername())\n"
        "print(socket.create_connection(('::ffff:1.1.1.1', 80)).makefile().read())"
    )
    assert out.split("\n") == [*wanted, "127.0.0.1 ('1.1.1.1', 443)", "1.1.1.1:80"]


async def test_dns_is_answered_at_any_address(box: Box) -> None:
    servers = ("8.8.8.8", "127.0.0.1", "127.0.0.53", "198.18.0.1")
    out = await box.python(f"for to in {servers}: print(to, ask(to)); print(say(to, 53))")
    assert out.split("\n") == [line for to in servers for line in (f"{to} answer to who", f"{to}:53")]
    assert await box.python("print(fails(ask, '8.8.8.8', 53, b'silence', 0.3))") == "('TimeoutError', None)"
    assert await box.python("print(ask('8.8.8.8', text=bytes(4096))[:6])") == "answer"


@pytest.mark.parametrize("text", ["nameserver 9.9.9.9\n", "nameserver 127.0.0.53\n", "", None])
async def test_the_c_library_asks_whatever_resolv_conf_says(box: Box, text: str | None) -> None:
    """Without one, or with an empty one, it asks 127.0.0.1."""
    write = "os.unlink(p)" if text is None else f"open(p, 'w').write({text!r})"
    before = len(box.outside.queries)
    asked = f"/tmp/asked-{before}"
    asking = asyncio.create_task(
        box.python(
            f"p = '/etc/resolv.conf'\nif os.path.exists(p) or {text is not None}: {write}\n"
            "threading.Thread(target=fails, args=(socket.gethostbyname, 'name.example'), daemon=True).start()\n"
            f"while not os.path.exists('{asked}'): time.sleep(0.02)\n"
            "os._exit(0)"
        )
    )
    await until(lambda: len(box.outside.queries) > before)
    await box.python(f"open('{asked}', 'w')")
    await asking
    assert b"\4name\7example\0" in box.outside.queries[before]


async def test_the_c_library_asks_for_ipv4_alone(backend: ContainerBackend) -> None:
    """AI_ADDRCONFIG: where 127.0.0.1 is the only address of a machine, there is no IPv4 and nobody is asked."""
    async with box_of(backend) as box:
        box.outside.answer = a_record
        lookup = "socket.getaddrinfo('name.example', 1, {family}, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)[0][4][0]"
        families = ("socket.AF_INET", "socket.AF_UNSPEC")
        out = await box.python(f"print({', '.join(lookup.format(family=family) for family in families)})")
        assert out == "198.18.7.7 198.18.7.7"
        assert (await box.run("getent", "ahostsv4", "name.example")).startswith("198.18.7.7")
        assert (await box.run("getent", "hosts", "name.example")).startswith("198.18.7.7")


async def test_a_name_server_of_the_sandboxs_own_keeps_its_queries(backend: ContainerBackend) -> None:
    async with box_of(backend) as box:
        out = await box.python(
            "for where in ('127.0.0.1', '0.0.0.0', '127.0.0.53'):\n"
            "    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind((where, 53))\n"
            "    t = socket.create_server((where, 53))\n"
            "    asker = '127.0.0.1' if where == '0.0.0.0' else where\n"
            "    c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); c.connect((asker, 53)); c.send(b'mine')\n"
            "    print(u.recv(99).decode(), dial(asker, 53).getpeername() == t.accept()[0].getsockname())\n"
            "    print(ask('8.8.8.8'), say('8.8.8.8', 53))\n"  # its upstream is not itself
            "    u.close(); t.close()"
        )
        assert out.split("\n") == ["mine True", "answer to who 8.8.8.8:53"] * 3
        assert b"mine" not in box.outside.queries


async def test_loopback_is_the_sandboxs_own(box: Box) -> None:
    before = len(box.outside.seen)
    out = await box.python(
        "for where in ('127.0.0.1', '127.0.0.2', '127.9.9.9', '0.0.0.0', '::1'):\n"
        "    t = socket.create_server((where, 80), family=socket.AF_INET6 if ':' in where else socket.AF_INET)\n"
        "    a = dial(where, 80); b = t.accept()[0]; a.sendall(b'x' * 100000); a.close()\n"
        "    print(len(b.makefile().read())); t.close()\n"
        "print(fails(dial, '127.0.0.1', 81), fails(dial, '127.0.0.1', 61053), fails(dial, '2001:db8::1', 80))\n"
        "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect(('8.8.8.8', 123)); u.send(b'ntp')\n"
        "print(fails(u.recv, 9))"
    )
    refused = "('ConnectionRefusedError', 111)"
    assert out.split("\n") == ["100000"] * 5 + [f"{refused} {refused} ('OSError', 101)", refused]
    assert len(box.outside.seen) == before


async def test_a_port_that_is_connected_to_can_be_listened_on(backend: ContainerBackend) -> None:
    async with box_of(backend) as box:
        box.outside.hold = True
        out = await box.python(
            "s = dial('1.2.3.4', 8080); t = socket.create_server(('', 8080)); print(dial('127.0.0.1', 8080) != s)"
        )
        assert out == "True"


async def test_data_flows_both_ways(backend: ContainerBackend) -> None:
    async with box_of(backend) as box:
        box.outside.hold = True
        dialog = asyncio.create_task(
            box.python(
                "s = dial('5.5.5.5', 5); s.sendall(b'q' * 3000000); s.shutdown(1); print(len(s.makefile().read()))"
            )
        )
        await until(lambda: bool(box.outside.held))
        reader, writer = await asyncio.open_connection(sock=box.outside.held[0])
        assert len(await reader.read()) == 3_000_000
        writer.write(b"a" * 5_000_000)
        writer.close()
        assert await dialog == "5000000"


async def test_until_it_is_served_nothing_is_reached(backend: ContainerBackend) -> None:
    refused = "('ConnectionRefusedError', 111)"
    look = "print(fails(dial, '1.2.3.4', 80), fails(dial, '127.0.0.1', 53))"
    async with box_of(backend, serve=False) as box:
        assert await box.python(look) == f"{refused} {refused}"
        await box.serve()
        assert await box.python("print(say('1.2.3.4', 80))") == "1.2.3.4:80"
        await box.instance.end_network()
        await box.instance.end_network()
        assert await box.python(look) == f"{refused} {refused}"
        await box.serve()
        await box.serve()
        assert await box.python("print(say('1.2.3.4', 81), ask('9.9.9.9'))") == "1.2.3.4:81 answer to who"


async def test_the_callbacks_can_be_replaced(backend: ContainerBackend) -> None:
    async with box_of(backend) as box, box_of(backend, serve=False) as other:
        await box.instance.serve_network(other.outside.connected, other.outside.query)
        assert await box.python("print(say('1.2.3.4', 80), ask('1.1.1.1'))") == "1.2.3.4:80 answer to who"
        assert box.outside.seen == box.outside.queries == []
        assert other.outside.seen == [("1.2.3.4", 80)]


async def test_a_callback_that_fails_ends_one_connection(backend: ContainerBackend) -> None:
    async with box_of(backend, serve=False) as box:

        def fail(*_: object) -> None:
            raise ValueError("on purpose")

        await box.instance.serve_network(fail, fail)  # type: ignore[arg-type]
        assert await box.python("print(repr(say('1.2.3.4', 80)), fails(ask, '1.1.1.1', 53, b'x', 0.3))") == (
            "'' ('TimeoutError', None)"
        )
        await box.serve()
        assert await box.python("print(say('1.2.3.4', 80))") == "1.2.3.4:80"


async def test_a_thousand_connections_at_once(backend: ContainerBackend) -> None:
    async with box_of(backend) as box:
        box.outside.hold = True
        dialog = asyncio.create_task(
            box.python(
                "held = []\n"
                "for i in range(1000):\n"
                "    s = socket.socket(); s.setblocking(False); held.append(s)\n"
                "    s.connect_ex(('198.18.0.9', 1000 + i))\n"
                "for s in held: s.settimeout(120)\n"
                "print(sum(s.recv(9) == b'hello' for s in held))"
            )
        )
        await until(lambda: len(box.outside.held) == 1000)
        assert {port for _, port in box.outside.seen} == set(range(1000, 2000))
        assert tracked_connections(box.instance.pid) == 0, "the host has one table for all, which this must not fill"
        for connection in box.outside.held:
            connection.send(b"hello")
        assert await dialog == "1000"


async def test_a_network_given_later(backend: ContainerBackend) -> None:
    """To a sandbox that was made without one, while programs in it run and hold ports."""
    async with box_of(backend, network=False, serve=False) as box:
        assert await box.python("print(fails(dial, '1.2.3.4', 80), fails(dial, '127.0.0.1', 53))") == (
            "('OSError', 101) ('ConnectionRefusedError', 111)"
        )
        holder = asyncio.create_task(
            box.python(
                "held = []\n"
                "for port in (61053, 61052):\n"
                "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):\n"
                "        s = socket.socket(socket.AF_INET, kind); held.append(s)\n"
                "        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
                "        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
                "        s.bind(('', port))\n"
                "        if kind == socket.SOCK_STREAM: s.listen()\n"
                "open('/tmp/ready', 'w').close()\n"
                "while not os.path.exists('/tmp/done'): time.sleep(0.05)\n"
                "for s in held:\n"
                "    s.setblocking(False)\n"
                "    print(fails(s.accept) if s.type == socket.SOCK_STREAM else fails(s.recv, 9))"
            )
        )
        await box.python("while not os.path.exists('/tmp/ready'): time.sleep(0.02)")
        await box.serve()
        out = await box.python(
            "print(say('1.2.3.4', 80), ask('127.0.0.1'), say('8.8.8.8', 61053)); open('/tmp/done', 'w')"
        )
        assert out == "1.2.3.4:80 answer to who 8.8.8.8:61053"
        assert await holder == "\n".join(["('BlockingIOError', 11)"] * 4)


async def test_a_network_given_later_where_every_port_is_held(backend: ContainerBackend) -> None:
    """Every one that the zygote tries: it is refused, and tried again."""
    async with box_of(backend, network=False, serve=False) as box:
        holder = asyncio.create_task(
            box.python(
                "held = [socket.socket() for _ in range(1200)]\n"
                "for i, s in enumerate(held): s.bind(('', 61053 - i))\n"
                "open('/tmp/ready', 'w').close()\n"
                "while not os.path.exists('/tmp/done'): time.sleep(0.05)"
            )
        )
        await box.python("while not os.path.exists('/tmp/ready'): time.sleep(0.02)")
        with pytest.raises(Unavailable, match="in use"):
            await box.serve()
        await box.python("open('/tmp/done', 'w')")
        await holder
        await box.serve()
        assert await box.python("print(say('1.2.3.4', 80))") == "1.2.3.4:80"


async def test_the_namespace_is_gone_with_its_sandbox(backend: ContainerBackend) -> None:
    watch = NetworkWatch()
    try:
        early, late = await make(backend), await make(backend, network=False)
        for number, box in enumerate((early, late), 1):
            await box.serve()
            watch.add(box.instance.pid, number)
            assert await box.python("print(say('1.2.3.4', 80))") == "1.2.3.4:80"
        assert watch.existing() == {1, 2}
        await early.end()
        await until(lambda: watch.existing() == {2})
        late.outside.hold = True
        waiting = asyncio.create_task(late.python("print(say('1.2.3.4', 80))"))
        await until(lambda: bool(late.outside.held))
        await late.end()
        waiting.cancel()
        await until(lambda: watch.existing() == set())
    finally:
        watch.close()


async def test_a_host_that_cannot_says_so(backend: ContainerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    async with box_of(backend, network=False, serve=False) as box:
        monkeypatch.setattr(backend, "_network_missing", "no tproxy")
        with pytest.raises(Unsupported, match="no tproxy"):
            backend.check(spec())
        backend.check(spec(network=False))
        with pytest.raises(Unsupported, match="no tproxy"):
            await box.serve()
