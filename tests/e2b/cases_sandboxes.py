"""Sandboxes, by E2B's client."""

from __future__ import annotations

import datetime
import http.client
import inspect
import os
import uuid

from case_kit import PATIENCE_S, raises, run, until

from e2b import (
    AuthenticationException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    Template,
)


def case_create_and_kill(_):
    with Sandbox.create() as box:
        assert box.sandbox_id.isalnum()
        assert box.sandbox_id == box.sandbox_id.lower()
        assert len(f"49983-{box.sandbox_id}") <= 63
        assert box.is_running()
        assert box.get_host(8080).startswith(f"8080-{box.sandbox_id}.")
    assert not box.is_running()
    assert box.kill() is False
    assert Sandbox.kill(box.sandbox_id) is False


def case_create_with_options(_):
    box = Sandbox.create(
        "debian",
        timeout=120,
        metadata={"run": "7", "who": "tést & co"},
        envs={"COLOUR": "blue"},
        allow_internet_access=False,
    )
    try:
        info = box.get_info()
        assert info.metadata == {"run": "7", "who": "tést & co"}
        assert info.template_id == "debian"
        assert info.state == SandboxState.RUNNING
        left = (info.end_at - datetime.datetime.now(datetime.UTC)).total_seconds()
        assert 60 < left <= 121
        assert info.cpu_count >= 1
        assert info.memory_mb >= 64
        assert box.commands.run("echo $COLOUR").stdout == "blue\n"
        assert box.commands.run("echo $COLOUR", envs={"COLOUR": "red"}).stdout == "red\n"
    finally:
        box.kill()


def ask(box, port, **headers):
    """Status and body of a request to a port, by the host name that the client says (of which no DNS knows here)."""
    server = os.environ["E2B_SANDBOX_URL"].removeprefix("http://")
    connection = http.client.HTTPConnection(server, timeout=PATIENCE_S)
    connection.request("GET", "/etc/hostname", headers={"Host": box.get_host(port), **headers})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def case_ports_by_host_name(_):
    with Sandbox.create() as box:
        status, body = ask(box, 8080)
        assert status == 502
        assert "port is not open" in body
        box.commands.run("python3 -m http.server -d / 8080", background=True)
        until(lambda: ask(box, 8080)[0] == 200, "the server inside")
        assert box.traffic_access_token is None
    status, body = ask(box, 8080)
    assert status == 502
    assert "was not found" in body


def case_private_ports(_):
    with Sandbox.create(network={"allow_public_traffic": False}) as box:
        token = {"e2b-traffic-access-token": box.traffic_access_token}
        box.commands.run("python3 -m http.server -d / 8080", background=True)
        until(lambda: ask(box, 8080, **token)[0] == 200, "the server inside")
        assert ask(box, 8080)[0] == 401
        assert Sandbox.connect(box.sandbox_id).traffic_access_token == box.traffic_access_token


def case_what_is_not_there_yet_says_so(box):
    def refused(work, words="not available"):
        error = raises(SandboxException, work, words)
        assert "KeyError" not in repr(error)

    refused(lambda: Sandbox.create(allow_internet_access=True), "internet")
    refused(lambda: Sandbox.create(volume_mounts={"/data": "volume"}))
    assert box.is_running()


def case_network_that_is_denied_is_met(_):
    box = Sandbox.create(network={"deny_out": ["0.0.0.0/0"], "allow_out": ["example.com"]})
    try:
        box.update_network({"deny_out": ["0.0.0.0/0"]})
        assert box.commands.run("getent hosts example.com || echo none").stdout == "none\n"
        box.update_network({"allow_out": ["example.com"], "deny_out": ["0.0.0.0/0"]})
        assert box.commands.run("getent hosts example.com").stdout.startswith("198.1")
    finally:
        box.kill()


def case_unknown_template(_):
    raises(SandboxException, lambda: Sandbox.create("no-such-template"), "no-such-template")


def case_templates_exist(_):
    assert Template.exists("base")
    assert Template.exists("debian")
    assert not Template.exists("no-such-template")


def case_wrong_keys_and_tokens(box):
    raises(AuthenticationException, lambda: Sandbox.create(api_key="e2b_" + "0" * 40))
    raises(AuthenticationException, lambda: Sandbox.list(api_key="dsk_wrong").next_items())
    assert Sandbox.kill("0" * 24) is False
    raises(SandboxNotFoundException, lambda: Sandbox.connect("0" * 24))


def case_idempotent_creation(_):
    if "idempotency_key" not in inspect.signature(Sandbox.create).parameters:
        return
    key = uuid.uuid4().hex
    first, again = Sandbox.create(idempotency_key=key), Sandbox.create(idempotency_key=key)
    try:
        assert first.sandbox_id == again.sandbox_id
        assert again.commands.run("echo hi").stdout == "hi\n"
    finally:
        first.kill()


def case_connect(box):
    box.commands.run("echo kept > /tmp/kept")
    other = Sandbox.connect(box.sandbox_id)
    assert other.sandbox_id == box.sandbox_id
    assert other.files.read("/tmp/kept") == "kept\n"
    assert box.connect().commands.run("cat /tmp/kept").stdout == "kept\n"


def case_connect_puts_the_end_off_only(_):
    box = Sandbox.create(timeout=600)
    try:
        end_at = box.get_info().end_at
        Sandbox.connect(box.sandbox_id, timeout=30)
        assert box.get_info().end_at == end_at
        Sandbox.connect(box.sandbox_id, timeout=1200)
        assert (box.get_info().end_at - end_at).total_seconds() > 500
    finally:
        box.kill()


def case_set_timeout(box):
    box.set_timeout(1000)
    info = box.get_info()
    assert 900 < (info.end_at - info.started_at).total_seconds() < 1100
    box.set_timeout(1)
    until(lambda: not box.is_running(), "the end")
    raises(SandboxNotFoundException, box.get_info)
    raises(SandboxNotFoundException, lambda: box.set_timeout(10))
    raises(SandboxException, lambda: box.commands.run("true"), "not found")
    raises(SandboxException, lambda: box.files.read("/etc/passwd"), "not found")
    raises(SandboxException, lambda: box.files.exists("/etc/passwd"), "not found")


def case_list_with_pages_and_filters(_):
    mark = uuid.uuid4().hex
    boxes = [Sandbox.create(metadata={"mark": mark, "n": str(n), "odd": "a b&c=d+é"}) for n in range(5)]
    try:
        ids = [box.sandbox_id for box in boxes]
        query = SandboxQuery(metadata={"mark": mark, "odd": "a b&c=d+é"})
        pages = Sandbox.list(query=query, limit=2, order="asc")
        found = []
        sizes = []
        while pages.has_next:
            items = pages.next_items()
            sizes.append(len(items))
            found += [item.sandbox_id for item in items]
        assert sizes == [2, 2, 1]
        assert found == ids
        newest = Sandbox.list(query=query, limit=2)
        assert [item.sandbox_id for item in newest.next_items()] == ids[:2:-1]
        token = newest.next_token
        assert [item.sandbox_id for item in Sandbox.list(query=query, next_token=token).next_items()] == ids[2::-1]
        assert [
            i.metadata["n"] for i in Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "n": "3"})).next_items()
        ] == ["3"]
        states = SandboxQuery(metadata={"mark": mark}, state=[SandboxState.RUNNING, SandboxState.PAUSED])
        assert len(Sandbox.list(query=states).next_items()) == 5
        assert Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED])).next_items() == []
        later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        assert Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, started_after=later)).next_items() == []
        early = later - datetime.timedelta(hours=2)
        assert len(Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, started_after=early)).next_items()) == 5
        assert len(Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, template="base")).next_items()) == 5
        assert Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, template="other")).next_items() == []
        raises(SandboxException, lambda: Sandbox.list(next_token="broken").next_items(), "nextToken")
    finally:
        for box in boxes:
            box.kill()
    assert Sandbox.list(query=query).next_items() == []


def case_metrics(box):
    box.commands.run("head -c 3000000 /dev/zero > /tmp/data; for i in $(seq 20000); do :; done")
    (sample,) = box.get_metrics()
    assert sample.cpu_count >= 1
    assert sample.cpu_used_pct > 0
    assert 0 < sample.mem_used < sample.mem_total
    assert 3_000_000 <= sample.disk_used < sample.disk_total
    now = datetime.datetime.now(datetime.UTC)
    assert abs((sample.timestamp - now).total_seconds()) < 30
    assert box.get_metrics(end=now - datetime.timedelta(hours=1)) == []


if __name__ == "__main__":
    run(globals())
