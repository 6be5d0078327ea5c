"""Events, metrics, readiness over HTTP; request ids."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_kit import CutProxy, Served, served
from edge_kit import until

from dsec import AsyncSandbox
from dsec.api.metrics import exposition
from dsec.edge.tally import Family, Histogram, Sample, Tally
from dsec.errors import OutcomeUnknown, SandboxNotFound, Unavailable

LINE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*",?)*)\})? ([-+.0-9eInf]+)'
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as running:
        yield running


async def make(server: Served) -> str:
    async with server.client() as client:
        return (await client.create("base")).id


def parsed(text: str) -> dict[str, float]:
    """Series to value; every line is checked against the format."""
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds, f"{name} comes twice"
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            found = LINE.fullmatch(line)
            assert found, line
            series = line.rpartition(" ")[0]
            assert series not in values, f"{series} comes twice"
            values[series] = float(found[3])
            family = re.sub(r"_(bucket|sum|count)$", "", found[1])
            assert found[1] in kinds or kinds.get(family) == "histogram", line
            if kinds.get(found[1]) == "counter":
                assert found[1].endswith("_total")
    return values


async def scrape(server: Served) -> dict[str, float]:
    status, headers, body = await server.raw("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(body.decode())


async def test_metrics_count_what_happens(server: Served) -> None:
    async with server.client() as client:
        box = await client.create("base")
        await box.commands.run(["sh", "-c", "cat; printf 1234"], stdin=b"abc")
        await box.commands.run(["false"])
        await box.commands.run(["sleep", "60"], command_timeout_s=0.05)
        await box.files.write("/a", b"x" * 1000)
        assert await box.files.read_bytes("/a") == b"x" * 1000
        with pytest.raises(Exception, match="environment"):
            await client.create("nothing")
        before = await scrape(server)
        await client.kill(box.id)
        after = await scrape(server)
    assert before['dsec_sandboxes{state="running"}'] == 1
    assert after['dsec_sandboxes{state="running"}'] == 0
    assert before["dsec_sandboxes_created_total"] == 1
    assert before["dsec_commands_started_total"] == 3
    assert before['dsec_commands_ended_total{cause="exited",infra="false"}'] == 2
    assert before['dsec_commands_ended_total{cause="command_timeout",infra="false"}'] == 1
    assert before['dsec_bytes_total{direction="in",by="stdin"}'] == 3
    assert before['dsec_bytes_total{direction="out",by="output"}'] == 7
    assert before['dsec_bytes_total{direction="in",by="files"}'] == 1000
    assert before['dsec_bytes_total{direction="out",by="files"}'] == 1000
    assert before['dsec_exec_seconds_bucket{le="+Inf"}'] == before["dsec_exec_seconds_count"] == 3
    assert before["dsec_exec_seconds_sum"] >= 0.05
    assert before["dsec_first_exec_seconds_count"] == 1
    assert before["dsec_queue_seconds_count"] == before["dsec_create_seconds_count"] == 1
    assert before['dsec_create_phase_seconds_count{phase="record"}'] == 1
    assert before["dsec_memory_committed_bytes"] == 1 << 30
    assert before['dsec_http_errors_total{code="environment_not_found"}'] == 1
    assert after["dsec_http_requests_total"] > before["dsec_http_requests_total"] >= 8
    assert after['dsec_sandboxes_ended_total{cause="deleted",infra="false"}'] == 1
    assert after["dsec_removal_seconds_count"] == 1
    assert before["dsec_disk_free_bytes"] > 0
    assert before["process_resident_memory_bytes"] > 1 << 20


async def test_histograms_are_cumulative(server: Served) -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    samples = {sample.suffix + sample.labels.get("le", ""): sample.value for sample in histogram.samples({})}
    assert samples == {"_bucket0.1": 2, "_bucket1": 3, "_bucket+Inf": 4, "_sum": pytest.approx(7.65), "_count": 4}
    values = parsed(exposition(Tally().families()).decode())
    assert values["dsec_exec_seconds_count"] == 0


def test_labels_are_escaped() -> None:
    family = Family("m", "gauge", "a\nb", [Sample(math.inf, {"l": 'a"b\\c\nd'})])
    assert exposition([family]) == b'# HELP m a\\nb\n# TYPE m gauge\nm{l="a\\"b\\\\c\\nd"} inf\n'


async def test_who_may_see_what(server: Served) -> None:
    async with server.client() as client:
        box = await client.create("base")
    token = box.info.token
    assert token is not None
    other = await server.edge.create_key("another", "x")
    assert (await server.raw("GET", "/metrics", key=""))[0] == 401
    assert (await server.error("GET", "/metrics", key=token))[:2] == (403, "permission_denied")
    assert (await server.raw("GET", "/readyz", key=""))[0] == 200
    for what in ("events", "events?follow=true", "trajectory", "trajectory?follow=true", "tripwires"):
        own = await server.error("GET", f"/v1/sandboxes/{box.id}/{what}", key=token)
        assert own[:2] == (403, "permission_denied"), what
    path = f"/v1/sandboxes/{box.id}/events"
    assert (await server.raw("GET", path))[0] == 200
    assert (await server.error("GET", path, key=other))[:2] == (404, "sandbox_not_found")
    assert (await server.error("GET", f"{path}?after=-1"))[:2] == (400, "invalid_request")
    assert (await server.error("GET", f"{path}?since=1"))[:2] == (400, "invalid_request")
    assert (await server.error("POST", path))[:2] == (405, "method_not_allowed")


async def test_ready_says_what_is_missing(server: Served) -> None:
    status, _, body = await server.raw("GET", "/readyz", key="")
    assert (status, json.loads(body)["ok"]) == (200, True)
    server.kit.room.disk_free = 0
    status, _, body = await server.raw("GET", "/readyz", key="")
    assert status == 503
    assert [check["name"] for check in json.loads(body)["checks"] if not check["ok"]] == ["volume"]


async def test_events_as_lines(server: Served) -> None:
    box = await make(server)
    async with server.client() as client:
        await (await client.connect(box)).commands.run(["true"], key="mine")
    status, headers, body = await server.raw("GET", f"/v1/sandboxes/{box}/events", x_request_id="r1")
    lines = [json.loads(line) for line in body.splitlines()]
    assert (status, headers["content-type"], headers["x-request-id"]) == (200, "application/x-ndjson", "r1")
    assert [line["type"] for line in lines] == ["created", "command_started", "first_exec", "command_ended"]
    assert lines[1]["data"]["command"] == "mine"
    _, _, body = await server.raw("GET", f"/v1/sandboxes/{box}/events?after=3")
    assert [json.loads(line) for line in body.splitlines()] == lines[3:]


async def test_following_goes_on_until_the_sandbox_has_ended(server: Served) -> None:
    box = await make(server)
    following = asyncio.ensure_future(server.raw("GET", f"/v1/sandboxes/{box}/events?follow=true"))
    await asyncio.sleep(0.05)
    async with server.client() as client:
        await (await client.connect(box)).commands.run(["true"])
        await client.kill(box)
    status, _, body = await asyncio.wait_for(following, 60)
    assert status == 200
    assert [json.loads(line)["type"] for line in body.splitlines()][-2:] == ["ending", "ended"]


async def test_who_stops_following_costs_nothing(server: Served) -> None:
    box = await make(server)
    reader, writer = await server.dial()
    request = (
        f"GET /v1/sandboxes/{box}/events?follow=1 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {server.key}\r\n\r\n"
    )
    writer.write(request.encode())
    await reader.readuntil(b"created")
    log = server.edge._events._logs[box]
    await until(lambda: log.news._waiters)
    writer.transport.abort()
    await until(lambda: not log.news._waiters)


async def test_the_request_id_travels_to_the_event(server: Served) -> None:
    box = await make(server)
    spec = json.dumps({"argv": ["true"], "key": "k"}).encode()
    await server.raw(
        "POST", f"/v1/sandboxes/{box}/exec", spec, x_request_id="trace-17", content_type="application/json"
    )
    started = next(event for event in server.edge.events(box) if event.type == "command_started")
    assert started.data["request_id"] == "trace-17"
    assert started.data["op"] >= 1


async def test_the_sdk_follows_events(server: Served) -> None:
    async with server.client() as client:
        box = await client.create("base")
        seen = []

        async def follow(sandbox: AsyncSandbox) -> None:
            async for event in sandbox.events(follow=True):
                seen.append(event.type)

        following = asyncio.ensure_future(follow(box))
        await box.commands.run(["true"])
        await until(lambda: "command_ended" in seen)
        await server.restart()
        await box.commands.run(["true"])
        await box.kill()
        await asyncio.wait_for(following, 60)
        assert seen[0] == "created"
        assert seen[-1] == "ended"
        assert seen.count("command_ended") == 2
        assert "adopted" in seen
        assert [event.type async for event in box.events()] == seen


async def test_the_sdk_names_its_requests(server: Served) -> None:
    async with server.client() as client:
        box = await client.create("base")
        await box.commands.run(["true"])
        await box.files.write("/a", b"x")
        events = server.edge.events(box.id)
        named = {event.type: event.data["request_id"] for event in events if "request_id" in event.data}
        assert set(named) == {"created", "command_started", "file_written"}
        assert len(set(named.values())) == 3
        assert len({name.partition("-")[0] for name in named.values()}) == 1, "they are one client's"
        ids = []
        for _ in range(2):
            with pytest.raises(SandboxNotFound) as caught:
                await client.connect("0" * 24)
            ids.append(caught.value.details["request_id"])
        assert len(set(ids)) == 2


async def test_a_broken_connection_names_its_request(server: Served) -> None:
    async with CutProxy(server.url) as proxy, server.client(proxy.url, retry_s=0.2) as client:
        proxy.cuts = [0] * 100
        with pytest.raises(OutcomeUnknown) as caught:
            await client.create_key("label")
        assert caught.value.details["request_id"]
        with pytest.raises(Unavailable) as again:
            await client.connect("0" * 24)
        assert again.value.details["request_id"] != caught.value.details["request_id"]


async def test_failures_of_the_platform_are_in_the_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    server.kit.host.fail_next_create("mount")
    status, headers, _ = await server.raw(
        "POST", "/v1/sandboxes", b'{"environment":"base"}', x_request_id="trace-9", content_type="application/json"
    )
    assert (status, headers["x-request-id"]) == (502, "trace-9")
    assert [record.getMessage() for record in caplog.records if "trace-9" in record.getMessage()]
    caplog.clear()
    await server.raw("GET", "/v1/sandboxes/" + "0" * 24, x_request_id="trace-10")
    assert not caplog.records, "what the caller did wrong is not the operator's"
