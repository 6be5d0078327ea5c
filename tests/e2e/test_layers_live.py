"""Layers as callers have them: images imported from a real registry, environments made, started, merged, collected."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_kit import TinyImage, registry, tar

from dsec import AsyncClient, Client
from dsec.cli.layers import drawn
from dsec.errors import EnvironmentNotFound, InvalidRequest, LayerCorrupt, NotFound
from dsec.store.image import host_platform
from server_kit import Server, serving
from trees import link_store

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry")) as url:
        yield url


@pytest.fixture(scope="module")
def server(debian_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("layers") / "state"
    state.mkdir(mode=0o700)
    link_store(debian_store, state / "store")  # a store of its own
    (state / "native").symlink_to(debian_store.parent / "native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_STORE", str(tmp_path_factory.mktemp("shared")))
        with serving(state) as made:
            yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    endpoint = server.endpoint()
    with Client(endpoint.url, endpoint.api_key) as made:
        yield made


def dsec(server: Server, *arguments: str | Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "dsec.cli.main", *map(str, arguments)]
    done = subprocess.run(command, env=server.environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout


def busybox(*archives: bytes, **config: object) -> TinyImage:
    """An image that can run something: the host's shell, static or with what it loads."""
    entries: list[tuple[str, object]] = []
    shell = Path("/bin/sh").resolve()
    libraries = [word for word in subprocess.run(["ldd", shell], capture_output=True, text=True, check=False)
                 .stdout.split() if word.startswith("/")]  # fmt: skip
    for path in (shell, *map(Path, libraries)):
        entries.append((str(path).lstrip("/"), {"data": path.read_bytes(), "mode": 0o755}))
    entries.append(("bin/sh", {"data": shell.read_bytes(), "mode": 0o755}))
    entries.append(("etc/passwd", b"root:x:0:0::/root:/bin/sh\nworker:x:70:71::/home:/bin/sh\n"))
    return TinyImage(tar(*entries), *archives, architecture=host_platform().architecture, **config)


def test_an_image_is_imported_made_an_environment_and_run(server: Server, real: str, tmp_path: Path) -> None:
    """The README's way."""
    config = {"Env": ["FROM=image", "PATH=/bin"], "User": "worker", "WorkingDir": "/work"}
    busybox(tar(("work/", None), ("work/file", b"hello\n")), **config).push(real, "team/tool", "1")
    host = real.removeprefix("http://")
    made = json.loads(dsec(server, "layer", "import", f"{host}/team/tool:1", "tool"))
    assert made["environment"] == "tool"
    assert len(made["layers"]) == 2
    assert json.loads(dsec(server, "env", "show", "tool", "--json"))["environment"]["user"] == "worker"
    script = 'read line <file; echo "$line $FROM $(pwd)"; echo $HOME'
    assert dsec(server, "run", "tool", "--", "/bin/sh", "-c", script) == "hello image /work\n/home\n"
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "file").write_text("changed\n")
    dsec(server, "layer", "build", tmp_path / "extra", "extra@1", "--at", "/work")
    made2 = json.loads(
        dsec(server, "env", "create", "tool2", "extra@1", "env:tool", "--env", "FROM=env", "--user", "root")
    )
    assert dsec(server, "run", "tool2", "--", "/bin/sh", "-c", script) == "changed env /work\n/root\n"
    shown = "\n".join(drawn(json.loads(dsec(server, "env", "show", "tool2"))))
    assert "shared with tool" in shown
    assert "its own" in shown
    assert "extra@1" in shown
    assert "tool2" in dsec(server, "env", "ls")
    assert "extra@1" in dsec(server, "layer", "ls")
    assert json.loads(dsec(server, "layer", "verify", "extra@1")) == {"layer": made2["layers"][0]}
    inspected = json.loads(dsec(server, "layer", "inspect", "extra@1"))
    assert inspected["files"] == 3
    dsec(server, "layer", "export", "extra@1", tmp_path / "out.tar")
    with tarfile.open(tmp_path / "out.tar") as archive:
        assert archive.extractfile("work/file").read() == b"changed\n"  # type: ignore[union-attr]
    dsec(server, "layer", "import", f"{host}/team/absent:1", "absent", code=2)
    dsec(server, "env", "rm", "tool2")
    dsec(server, "env", "rm", "tool2", code=2)


def test_an_archive_and_a_layout_of_this_machine(server: Server, tmp_path: Path, client: Client) -> None:
    image = busybox(Env=["PATH=/bin"])
    archive = image.write_docker_archive(tmp_path / "image.tar")
    layout = image.write_layout(tmp_path / "layout")
    dsec(server, "layer", "import", archive, "from-archive", "--reader", "one", "--reader", "two")
    dsec(server, "layer", "import", layout, "from-layout")
    made = [client.catalog.environment(name)["environment"] for name in ("from-archive", "from-layout")]
    assert made[0]["layers"] == made[1]["layers"]
    assert made[0]["readers"] == ["one", "two"]


def test_what_a_directory_has_survives_as_a_layer(server: Server, tmp_path: Path, client: Client) -> None:
    """Packed by the command line, sent, made, written out again."""
    top = tmp_path / "top"
    (top / "opaque").mkdir(parents=True)
    (top / "tool").write_bytes(b"x" * 3000)
    (top / "again").hardlink_to(top / "tool")
    os.chown(top / "tool", 70, 71)
    (top / "tool").chmod(0o4755)
    os.utime(top / "tool", ns=(0, 1_700_000_000_123_456_789))
    capability = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
    os.setxattr(top / "tool", "security.capability", capability)
    os.setxattr(top / "tool", "user.note", b"\xff\0binary")
    os.setxattr(top / "opaque", "trusted.overlay.opaque", b"y")
    os.mknod(top / "gone", stat.S_IFCHR, 0)
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    dsec(server, "layer", "build", top, "whole@1", "--keep-owners")
    dsec(server, "layer", "build", top, "roots@1")
    with tarfile.open(fileobj=io.BytesIO(exported(server, tmp_path, "whole@1"))) as archive:
        found = {info.name: info for info in archive}
    assert found["again"].mode == 0o4755
    assert (found["again"].uid, found["again"].gid) == (70, 71)
    assert found["again"].pax_headers["mtime"] == "1700000000.123456789"
    assert found["again"].pax_headers["SCHILY.xattr.security.capability"].encode() == capability
    assert found["again"].pax_headers["SCHILY.xattr.user.note"].encode("utf-8", "surrogateescape") == b"\xff\0binary"
    assert found["tool"].linkname == "again"
    assert ".wh.gone" in found
    assert "opaque/.wh..wh..opq" in found
    assert (found["null"].devmajor, found["null"].devminor) == (1, 3)
    with tarfile.open(fileobj=io.BytesIO(exported(server, tmp_path, "roots@1"))) as archive:
        assert archive.getmember("again").uid == 0


def exported(server: Server, top: Path, name: str) -> bytes:
    dsec(server, "layer", "export", name, top / "exported.tar")
    return (top / "exported.tar").read_bytes()


def test_sixty_layers_are_stacked_and_the_topmost_wins(client: Client, tmp_path: Path) -> None:
    names = []
    for number in range(60):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(tar((f"own/{number}", b""), ("top", b"%d" % number)))
        names.insert(0, client.catalog.build(path, f"many@{number}")["name"])
    with client.create("debian", layers=names) as box:
        assert len(box.info.spec.layers) > 60
        assert box.commands.run("cat /top; ls /own | wc -l").stdout == "5960\n"
    merged = client.catalog.merge(names, "merged@1")
    with client.create("debian", layers=[merged["layer"]], workdir="/own") as box:
        assert box.commands.run("cat /top; ls | wc -l; pwd").stdout == "5960\n/own\n"


def test_whiteouts_are_kept_by_merging(client: Client, tmp_path: Path) -> None:
    for name, archive in {
        "low@1": tar(("d/a", b"1"), ("d/b", b"1"), ("etc/low", b"1")),
        "mid@1": tar(("d/.wh.a", b""), ("etc/.wh.debian_version", b"")),
        "high@1": tar(("d/c", b"1"), ("usr/share/.wh..wh..opq", b""), ("usr/share/mine", b"")),
    }.items():
        (tmp_path / "x").write_bytes(archive)
        client.catalog.build(tmp_path / "x", name)
    client.catalog.merge(["high@1", "mid@1"], "both@1")
    looks = []
    for layers in (["high@1", "mid@1", "low@1"], ["both@1", "low@1"]):
        with client.create("debian", layers=layers) as box:
            looks.append(box.commands.run("ls /d /usr/share; ls /etc | grep -e low -e debian_version").stdout)
    assert looks[0] == looks[1] == "/d:\nb\nc\n\n/usr/share:\nmine\nlow\n"


async def test_bad_input_is_refused_and_nothing_is_left(server: Server, tmp_path: Path) -> None:
    endpoint = server.endpoint()
    async with AsyncClient(endpoint.url, endpoint.api_key) as client:
        catalog, path = client.catalog, tmp_path / "a.tar"
        before = await catalog.layers()
        path.write_bytes(b"nonsense" * 1000)
        with pytest.raises(InvalidRequest, match="not a tar archive"):
            await catalog.build(path, "bad@1")
        with pytest.raises(InvalidRequest, match="not a name"):
            await catalog.build(path, "no-version")
        path.write_bytes(tar(("../evil", b"")))
        with pytest.raises(InvalidRequest, match="leads out"):
            await catalog.build(path, "bad@1")
        with pytest.raises(InvalidRequest):
            await catalog.import_archive(path, "bad")
        with pytest.raises(InvalidRequest, match="registry"):
            await catalog.import_image("no host", "bad")
        for work in (catalog.layer("bad@1"), catalog.verify("0" * 64), catalog.create_environment("bad", ["bad@1"])):
            with pytest.raises(NotFound):
                await work
        with pytest.raises(EnvironmentNotFound):
            await catalog.environment("bad")
        assert await catalog.layers() == before
    assert list((server.state / "store" / "tmp").iterdir()) == []


def test_garbage_is_collected_and_what_is_used_stays(server: Server, client: Client, tmp_path: Path) -> None:
    layers = {}
    for name in ("used@1", "garbage@1", "kept@1"):
        (tmp_path / "x").write_bytes(tar((name, os.urandom(50_000))))
        layers[name] = client.catalog.build(tmp_path / "x", name)["layer"]
    stored = Path(os.environ["DSEC_STORE"]) / "manifests"
    assert len(list((stored.parent / "leases").glob("use-*"))) == 1, "the node says what it uses"
    for lease in (stored.parent / "leases").glob("use-*"):
        lease.unlink()  # as if all of this had been long ago
    with client.create("debian", layers=["used@1"]) as box:
        for name in ("used@1", "garbage@1"):
            client.catalog.remove_layer(name)
        assert client.catalog.collect() == 0, "what is young is no garbage"
        for layer in layers.values():
            _age(server.state / "store" / "layers" / layer / "meta.json", stored / layer)
        for top in ("packs", "metadata", "placements"):
            for path in (stored.parent / top).iterdir():
                os.utime(path, (0, 0))
        assert client.catalog.collect() > 50_000
        there = {path.name for path in (server.state / "store" / "layers").iterdir()}
        for found in (there, {path.name for path in stored.iterdir()}):
            assert layers["garbage@1"] not in found
            assert {layers["used@1"], layers["kept@1"]} <= found
        assert box.commands.run("ls /used@1").stdout == "/used@1\n"
    client.catalog.verify("kept@1")
    with client.create("debian", layers=["kept@1"]) as box:
        assert box.commands.run("wc -c </kept@1").stdout == "50000\n"
    damaged = server.state / "store" / "layers" / layers["kept@1"] / "data"
    with damaged.open("r+b") as file:
        file.write(b"damage")
    with pytest.raises(LayerCorrupt):
        client.catalog.verify("kept@1")
    client.catalog.remove_layer("kept@1")


def test_garbage_younger_than_an_hour_goes_where_the_caller_says_so(
    server: Server, client: Client, tmp_path: Path
) -> None:
    layers = {}
    for name in ("stands@1", "waste@1", "named@1"):
        (tmp_path / "x").write_bytes(tar((name, os.urandom(50_000))))
        layers[name] = client.catalog.build(tmp_path / "x", name)["layer"]
    local, stored = server.state / "store" / "layers", Path(os.environ["DSEC_STORE"])
    with client.create("debian", layers=["stands@1"]) as box:
        for name in ("stands@1", "waste@1"):
            dsec(server, "layer", "rm", name)
        dsec(server, "layer", "gc", "--older-than", "600")
        assert (local / layers["waste@1"]).exists()
        for lease in (stored / "leases").glob("use-*"):
            lease.unlink()  # it is of a minute ago, when all had names
        assert json.loads(dsec(server, "layer", "gc", "--older-than", "0", "--json"))["freed_bytes"] > 50_000
        for there in (
            {path.name for path in local.iterdir()},
            {path.name for path in (stored / "manifests").iterdir()},
        ):
            assert layers["waste@1"] not in there
            assert {layers["stands@1"], layers["named@1"]} <= there
        assert box.commands.run("wc -c </stands@1").stdout == "50000\n"
    client.catalog.verify("named@1")
    client.catalog.remove_layer("named@1")
    with pytest.raises(InvalidRequest):
        client.catalog.collect(least_age_s=-1)


def _age(meta: Path, manifest: Path) -> None:
    document = json.loads(meta.read_text())
    document["created_at"] = time.time() - 7200
    meta.write_text(json.dumps(document))
    os.utime(manifest, (0, 0))


def test_a_client_that_goes_away_stops_its_import(server: Server, real: str) -> None:
    endpoint = server.endpoint()

    async def leave() -> None:
        async with AsyncClient(endpoint.url, endpoint.api_key) as client:
            busybox(tar(("f", os.urandom(30 << 20)))).push(real, "big", "1")
            work = asyncio.create_task(client.catalog.import_image(f"{real}/big:1", "big"))
            await asyncio.sleep(0.2)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    asyncio.run(leave())
    deadline = time.monotonic() + 60
    while list((server.state / "store" / "tmp").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list((server.state / "store" / "tmp").iterdir()) == []
