"""Dockerfiles become environments: built in real sandboxes, remembered step by step, refused with their line."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from image_kit import tar

from dsec import Client
from dsec.errors import BuildFailed, InvalidRequest, PermissionDenied, Unavailable, Unsupported
from dsec.spec.network import Network, PermissionOptions
from server_kit import Server, serving
from trees import link_store

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("builds") / "state"
    state.mkdir(mode=0o700)
    link_store(debian_store, state / "store")  # a store of its own
    (state / "native").symlink_to(debian_store.parent / "native")
    (state / "network.toml").write_text(
        'keys = {private = true}\nhosts = {"files.example" = ["127.0.0.1"], "other.example" = ["127.0.0.1"]}\n'
    )
    with serving(state) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    endpoint = server.endpoint()
    with Client(endpoint.url, endpoint.api_key) as made:
        yield made


def context(top: Path, dockerfile: str, **files: str) -> Path:
    (top / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        path = top / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


DOCKERFILE = """\
# the whole of it
ARG BASE=debian
FROM ${BASE} AS made
ARG WORD=hello
ENV GREETING="$WORD there"
WORKDIR /work
COPY src ./src
RUN echo "$GREETING" >out \\
    && mkdir -p gone/deep && rm -rf /usr/share/debianutils && id -u >uid
RUN ["/bin/sh", "-c", "echo exec >form"]

FROM debian
LABEL a=b
RUN <<EOF
echo worker:x:70:71::/home/worker:/bin/sh >>/etc/passwd; echo worker:x:71: >>/etc/group
echo 'from a heredoc' >/heredoc
ln /heredoc /hard
EOF
COPY --from=made /work/out /work/form /copied/
COPY --chown=worker:worker --chmod=0750 src/tool.sh /bin/tool
COPY <<EOF /etc/said
x${GREETING:-nothing}
EOF
USER worker
WORKDIR /home/worker
EXPOSE 80
ENTRYPOINT ["/bin/tool"]
"""


def mounting(count: str) -> str:
    return f"""\
FROM debian AS tools
RUN echo tool > /tool && mkdir -p /kit/deep && echo kit > /kit/deep/file && ln -s /var/hidden /links
FROM debian
RUN mkdir -p /var/hidden && echo below > /var/hidden/below && echo kept > /kept && ln -s /var/hidden /link
WORKDIR /w
RUN --mount=type=cache,target=/link,id=things \\
    --mount=type=bind,from=tools,source=/tool,target=/usr/bin/tool \\
    --mount=from=tools,source=/kit,target=kit,ro \\
    --mount=type=bind,source=src,target=/src \\
    --mount=type=tmpfs,target=/scratch \\
    set -e; test ! -e /var/hidden/below; test "$(cat /usr/bin/tool kit/deep/file)" = "$(printf 'tool\\nkit')"; \\
    test "$(cat /src/a.txt)" = ours; \\
    echo secret > /scratch/trace; echo gone > kit/gone; rm -f /link/stale; ls /link > /seen; \\
    echo {count} > /link/{count}; echo x > /link/stale; ln -s /etc /link/way; rm /link/way; rm /kept; touch /made
"""


def test_mounts_are_seen_by_a_command_and_by_nothing_else(client: Client, tmp_path: Path) -> None:
    for count, seen in (("one", []), ("two", ["one"]), ("three", ["one", "two"])):
        files = {"src__a.txt": "ours", "src__b.txt": "theirs"}
        client.catalog.build_dockerfile(context(tmp_path, mounting(count), **files), "mounted")
        with client.create("mounted") as box:
            assert box.commands.run("cat /seen").stdout.split() == seen
            found = box.commands.run(
                "ls -d /made /kept /tool /usr/bin/tool /w/kit /src/* /scratch/* /var/hidden/* /link 2>/dev/null"
            )
            assert found.stdout.split() == ["/link", "/made", "/var/hidden/below"]
    other = context(tmp_path, "FROM debian\nRUN --mount=type=cache,target=/c,id=things ls /c > /seen\n")
    client.catalog.build_dockerfile(other, "mounted")
    with client.create("mounted") as box:
        assert box.commands.run("cat /seen").stdout.split() == ["one", "stale", "three", "two"]


def test_a_dockerfile_becomes_an_environment(client: Client, tmp_path: Path) -> None:
    top = context(tmp_path, DOCKERFILE, src__a="1", src__skipped__b="2", _dockerignore="")
    (top / "src" / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (top / ".dockerignore").write_text("**/skipped\n")
    said: list[str] = []
    found = client.catalog.build_dockerfile(top, "built", args={"WORD": "good day"}, on_log=said.append)
    assert found["environment"] == "built"
    with client.create("built") as box:
        script = "cat /copied/out /copied/form /heredoc /etc/said; stat -c '%U %a %h' /bin/tool /hard; "
        script += "id -un; pwd; /bin/tool"
        assert box.commands.run(script).check().stdout == (
            "good day there\nexec\nfrom a heredoc\nxnothing\nworker 750 1\nroot 644 2\nworker\n/home/worker\ntool\n"
        )
    assert "FROM debian AS made" in said
    before = client.catalog.environment("built")["environment"]["layers"]
    said.clear()
    client.catalog.build_dockerfile(top, "again", args={"WORD": "good day"}, on_log=said.append)
    assert client.catalog.environment("again")["environment"]["layers"] == before
    assert said.count("  as before") >= 6
    assert not any(line.startswith("  ") and "as before" not in line and "note" not in line for line in said)
    (top / "src" / "a").write_text("changed")
    said.clear()
    client.catalog.build_dockerfile(top, "again", args={"WORD": "good day"}, target="made", on_log=said.append)
    assert said.count("  as before") == 1  # the working directory
    with client.create("again") as box:
        ran = box.commands.run("ls /work /work/src; cat /work/uid; test -e /usr/share/debianutils || echo gone")
        assert ran.check().stdout == "/work:\nform\ngone\nout\nsrc\nuid\n\n/work/src:\na\ntool.sh\n0\ngone\n"


def test_the_command_line_builds(server: Server, tmp_path: Path) -> None:
    top = context(tmp_path, "FROM debian\nARG A\nCOPY f /f\nRUN echo $A >>/f\n", f="file\n")
    command = [sys.executable, "-m", "dsec.cli.main"]

    def dsec(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*command, *arguments], env=server.environment(), capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == code, done.stderr
        return done

    made = dsec("env", "build", "by-hand", str(top), "--build-arg", "A=b")
    assert json.loads(made.stdout)["environment"] == "by-hand"
    assert "RUN echo $A >>/f" in made.stderr
    assert dsec("run", "by-hand", "--", "cat", "/f").stdout == "file\nb\n"
    (top / "Other").write_text("FROM by-hand\nRUN exit 3\n")
    failed = dsec("env", "build", "never", str(top), "-f", str(top / "Other"), code=2)
    assert "Dockerfile line 2: RUN exit 3: it ended with exit code 3" in failed.stderr
    names = {each["name"] for each in json.loads(dsec("env", "ls", "--json").stdout)}
    assert "by-hand" in names
    assert "never" not in names


@pytest.mark.parametrize(
    ("dockerfile", "error", "message"),
    [
        ("FROM debian\n\nFLY away", Unsupported, "line 3: unknown instruction 'FLY'"),
        ("FROM debian\nONBUILD RUN x", Unsupported, "line 2: ONBUILD"),
        ("FROM debian\nCOPY ../x /", InvalidRequest, "line 2: COPY: '../x' leads out of the context"),
        ("FROM debian\nCOPY absent /", InvalidRequest, "line 2: COPY: there is no 'absent'"),
        ("FROM debian\nCOPY up /", InvalidRequest, "line 2: COPY: 'up': it leads out"),
        ("FROM debian\nCOPY absolute /", InvalidRequest, "line 2: COPY: there is no 'absolute'"),
        ("FROM debian\nCOPY --chown=stranger f /", InvalidRequest, "the image has no user 'stranger'"),
        ("FROM debian\nADD https://example.com/x /", InvalidRequest, "line 2: ADD: the build doesn't name example.com"),
        ("FROM debian\nADD https://a:b@example.com/x /", InvalidRequest, "line 2: ADD: a URL of example.com holds"),
        ("FROM debian\nADD git@example.com:a/b.git /", InvalidRequest, "line 2: ADD: 'git@example.com:a/b.git': only"),
        ("FROM debian\nADD --checksum=sha256:12 http://x/y /z", InvalidRequest, "line 2: ADD: --checksum=sha256:12 is"),
        ("FROM debian\nADD --checksum=sha256:12 f /z", InvalidRequest, "line 2: ADD --checksum is for a single URL"),
        ("FROM debian\nRUN --mount=type=secret,id=x cat /x", Unsupported, "line 2: RUN --mount=type=secret is not"),
        ("FROM debian\nRUN --mount=type=ssh true", Unsupported, "line 2: RUN --mount=type=ssh is not supported"),
        ("FROM debian\nRUN --mount=type=cache,target=/x,size=1 true", Unsupported, "type=cache,size is not supported"),
        ("FROM debian\nRUN --mount=type=cache true", InvalidRequest, "line 2: RUN --mount: it has no target"),
        (
            "FROM debian\nRUN --mount=target=/x,source=../x true",
            InvalidRequest,
            "line 2: RUN --mount: '../x' leads out of",
        ),
        ("FROM debian\nRUN --mount=type=tmpfs,target=/ true", InvalidRequest, "line 2: RUN: nothing can be mounted"),
        ("FROM debian\nADD sparse.tar /", Unsupported, "line 2: ADD: the archive has sparse files"),
        ("FROM debian\nADD cut.tgz /", InvalidRequest, "line 2: ADD: the archive can't be uncompressed"),
        ("FROM debian\nCOPY f /etc/passwd/", InvalidRequest, "line 2: COPY: '/etc/passwd' is to be a directory"),
        ("FROM debian\nFROM 10.1.2.3/app\n", PermissionDenied, "line 2: a registry may not lead to 10.1.2.3"),
        ("FROM absent\n", InvalidRequest, "line 1: no earlier stage, environment or layer is called 'absent'"),
        ("FROM debian\nENV A=${A", InvalidRequest, "line 2: a ${ is not closed"),
        ("FROM debian\nRUN echo last words; exit 7", BuildFailed, "line 2: RUN echo last words; exit 7: it ended"),
        ("FROM debian\nUSER stranger\nRUN true", BuildFailed, "stranger"),
    ],
)
def test_what_cannot_be_built(
    client: Client, tmp_path: Path, dockerfile: str, error: type[Exception], message: str
) -> None:
    top = context(tmp_path, dockerfile, f="")
    (top / "up").symlink_to("../../etc/passwd")
    (top / "absolute").symlink_to("/etc/passwd")
    (top / "sparse.tar").write_bytes(tar(("f", {"pax_headers": {"GNU.sparse.major": "1"}})))
    (top / "cut.tgz").write_bytes(gzip.compress(tar(("f", os.urandom(200_000))))[:-50_000])
    with pytest.raises(error) as raised:
        client.catalog.build_dockerfile(top, "bad")
    assert message in str(raised.value)
    if isinstance(raised.value, BuildFailed) and "exit 7" in dockerfile:
        assert raised.value.details["exit_code"] == 7
        assert raised.value.details["output"] == "last words\n"
        assert raised.value.details["line"] == 2
    assert [each.spec for each in client.list()] == []


def test_commands_reach_what_the_build_names(client: Client, tmp_path: Path) -> None:
    dockerfile = """\
FROM debian
RUN getent hosts example.com >/named; getent hosts example.org >/other || true
RUN --network=none getent hosts example.com >/none || true
"""
    top = context(tmp_path, dockerfile)
    for name, network, lines in (("named", {"host:example.com": True}, "1 0 0\n"), ("nothing", {}, "0 0 0\n")):
        client.catalog.build_dockerfile(top, name, network=network)
        with client.create(name) as box:
            assert (
                box.commands.run("echo $(cat /named | wc -l) $(cat /other | wc -l) $(cat /none | wc -l)").stdout
                == lines
            )


class _Remote(BaseHTTPRequestHandler):
    """Files of a server elsewhere."""

    CONTENT = bytes(range(256)) * 3000

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        moved = {"/moved": f"http://files.example:{port}/kit.tar", "/away": f"http://other.example:{port}/kit.tar"}
        self.send_response(302 if self.path in moved else 200 if self.path in ("/kit.tar", "/", "/half") else 404)
        if self.path in moved:
            self.send_header("Location", moved[self.path])
        self.send_header("Last-Modified", "Tue, 15 Nov 1994 12:45:26 GMT")
        self.send_header("Content-Length", str(0 if self.path in moved else len(self.CONTENT)))
        self.end_headers()
        if self.path not in moved:
            self.wfile.write(self.CONTENT[: 1000 if self.path == "/half" else None])

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def remote() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Remote) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http.server_address[1]
        http.shutdown()
        thread.join()


def test_add_fetches_what_the_build_names(client: Client, tmp_path: Path, remote: int) -> None:
    digest = hashlib.sha256(_Remote.CONTENT).hexdigest()
    dockerfile = f"""\
FROM debian
ARG AT=http://files.example:{remote}
ADD --checksum=sha256:{digest} $AT/moved /a/
ADD --chmod=0755 $AT/kit.tar README /b/
ADD $AT/ /c
RUN sha256sum /a/moved /b/kit.tar /c | cut -c1-64 | sort -u >/sums; stat -c '%a %u %Y' /c /b/kit.tar >/stats
"""
    network: Network = {f"host:files.example:{remote}": PermissionOptions(private=True)}
    top = context(tmp_path, dockerfile, README="of the context")
    client.catalog.build_dockerfile(top, "added", network=network)
    with client.create("added") as box:
        assert box.commands.run("cat /sums /stats /b/README").check().stdout == (
            f"{digest}\n600 0 784903526\n755 0 784903526\nof the context"
        )


class _Refused(NamedTuple):
    line: str
    private: bool
    error: type[Exception]
    message: str


@pytest.mark.parametrize(
    "case",
    [
        _Refused("ADD $AT/kit.tar /", False, BuildFailed, "no address that the build may reach"),
        _Refused("ADD http://127.0.0.1:$PORT/kit.tar /", True, InvalidRequest, "doesn't name 127.0.0.1 at port"),
        _Refused("ADD http://other.example:$PORT/kit.tar /", True, InvalidRequest, "doesn't name other.example at"),
        _Refused("ADD $AT/away /", True, InvalidRequest, "doesn't name other.example at port"),
        _Refused("ADD $AT/none /", True, BuildFailed, "answered 404"),
        _Refused("ADD $AT/half /", True, BuildFailed, "can't be fetched"),
        _Refused("ADD $AT/ /", True, InvalidRequest, "ends with no file's name"),
        _Refused("ADD --checksum=sha256:" + "0" * 64 + " $AT/kit.tar /", True, BuildFailed, "not sha256:0000"),
    ],
)
def test_what_add_does_not_fetch(client: Client, tmp_path: Path, remote: int, case: _Refused) -> None:
    line, private, error, message = case
    dockerfile = f"FROM scratch\nARG PORT={remote}\nARG AT=http://files.example:{remote}\n{line}\n"
    network: Network = {f"host:files.example:{remote}": PermissionOptions(private=private)}
    with pytest.raises(error, match=message) as raised:
        client.catalog.build_dockerfile(context(tmp_path, dockerfile), "never", network=network)
    assert "Dockerfile line 4: ADD: " in str(raised.value)


def test_links_in_a_stage_lead_nowhere_else(client: Client, tmp_path: Path) -> None:
    """COPY reads what is in the stage, never this machine's files."""
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    dockerfile = f"""\
FROM debian AS a
RUN mkdir /d && ln -s {secret} /d/host && ln -s ../../../../../../..{secret} /d/up && ln -s /etc/said /leak
RUN echo inside >/etc/said; mknod /d/device c 1 3 || true; setfattr -n trusted.overlay.opaque -v y /d || true
FROM debian
COPY --from=a /d /d/
COPY --from=a /leak /got
"""
    client.catalog.build_dockerfile(context(tmp_path, dockerfile), "links")
    with client.create("links") as box:
        assert box.commands.run("cat /got; readlink /d/host /d/up; ls /d").check().stdout == (
            f"inside\n{secret}\n../../../../../../..{secret}\nhost\nup\n"
        )
    with pytest.raises(InvalidRequest, match=r"line 5.*there is no|line 5.*leads out"):
        client.catalog.build_dockerfile(
            context(tmp_path, dockerfile.split("COPY", maxsplit=1)[0] + "COPY --from=a /d/host /x"), "no"
        )


def post(server: Server, archive: bytes, options: dict[str, object]) -> list[dict[str, Any]]:
    """A context by hand."""
    url = f"{server.url}/v1/builds?options={quote(json.dumps(options))}"
    headers = {"Authorization": f"Bearer {server.endpoint().api_key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=archive, headers=headers), timeout=60) as answer:
            return [json.loads(line) for line in answer]
    except urllib.error.HTTPError as error:
        return [{"error": json.loads(error.read())}]


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ([("../out", b"x")], "invalid_request"),
        ([("a/../../out", b"x")], "invalid_request"),
        ([("a", "/etc"), ("a/passwd", b"x"), ("Dockerfile", b"FROM scratch\nCOPY a/passwd /x")], None),
        ([("Dockerfile", "/etc/passwd")], "invalid_request"),
        ([("Dockerfile", "../Dockerfile")], "invalid_request"),
        ([(".wh.x", b"x"), ("Dockerfile", b"FROM scratch\nCOPY .wh.x /")], None),
        ([("huge", b""), ("Dockerfile", b"FROM scratch")], "too_large"),
    ],
)  # fmt: skip
def test_hostile_contexts(server: Server, entries: list[tuple[str, Any]], code: str | None) -> None:
    archive = tar(*entries)
    if entries[0][0] == "huge":  # a size that no content stands behind
        header = bytearray(archive[:512])
        header[124:136] = b"\x80" + (1 << 40).to_bytes(11, "big")
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        archive = bytes(header) + archive[512:]
    last = post(server, archive, {"name": "hostile"})[-1]
    assert last.get("error", {}).get("code") == code, last


@pytest.mark.parametrize("archive", [b"no archive", b"\x1f\x8bbroken", b"BZh9broken", b"\xfd7zXZ\0broken", b""])
def test_what_is_no_context(server: Server, archive: bytes) -> None:
    assert post(server, archive, {"name": "none"})[-1]["error"]["code"] == "invalid_request"


def test_options_are_checked(server: Server) -> None:
    for options in ({}, {"name": "x", "other": 1}, {"name": "x", "network": {"pypi": {"what": 1}}}, {"name": "../x"}):
        assert post(server, tar(("Dockerfile", b"FROM scratch")), options)[-1]["error"]["code"] == "invalid_request"
    network = {"name": "x", "network": {"no-such-permission": True}}
    assert "error" in post(server, tar(("Dockerfile", b"FROM scratch")), network)[-1]


def left(server: Server) -> list[str]:
    return [each.name for each in (server.state / "store" / "tmp").iterdir()]


async def test_a_build_that_is_left_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """Its client goes away; then its server."""
    top = context(tmp_path, "FROM debian\nRUN echo begun; sleep 1000")
    for killed in (False, True):
        begun = asyncio.Event()
        async with server.client() as client:
            building = asyncio.create_task(
                client.catalog.build_dockerfile(
                    top,
                    "never",
                    on_log=lambda line: begun.set() if line == "  begun" else None,  # noqa: B023
                )
            )
            await asyncio.wait_for(begun.wait(), 60)
            assert len(await client.list()) == 1
            if killed:
                server.kill()
                with pytest.raises(Unavailable):
                    await building
                server.start()
            else:
                building.cancel()
                await asyncio.gather(building, return_exceptions=True)
        async with server.client() as client:
            async with asyncio.timeout(60):
                live = await client.list()
                while live or left(server):
                    await asyncio.sleep(0.05)
                    live = await client.list()
            assert "never" not in await client.environments()
