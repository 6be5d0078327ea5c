"""Images become layers: from a layout, an archive, a real registry; and registries that lie, stall or talk nonsense."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from aiohttp import web
from image_kit import OCI, TinyImage, digest_of, push_index, registry, tar

from dsec.errors import (
    DsecError,
    InvalidRequest,
    LayerCorrupt,
    NotFound,
    PermissionDenied,
    TooLarge,
    Unavailable,
    Unsupported,
)
from dsec.store.data import Budget
from dsec.store.format import ImageConfig
from dsec.store.image import ImageSource, Platform, parse_platform
from dsec.store.importer import Imported, Importer
from dsec.store.layers import LayerStore
from dsec.store.oci import LocalSource
from dsec.store.registry import RegistrySource, parse_reference
from dsec.store.tree import Node, directory, overlay, walk

AMD64 = Platform("linux", "amd64")
BASE = tar(("etc/", None), ("etc/os", b"base"), ("usr/", None), ("usr/bin/", None), ("usr/bin/tool", b"t" * 9000))
APP = tar(("app/", None), ("app/main", b"m" * 70_000), ("etc/.wh.os", b""), ("usr/bin/extra", b"e"))
CONFIG: dict[str, Any] = {
    "Env": ["A=1", "B=x=y"],
    "User": "1000:1000",
    "WorkingDir": "app",
    "Entrypoint": ["/app/main"],
}


def tiny(**options: Any) -> TinyImage:
    return TinyImage(BASE, APP, **(CONFIG | options))


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[LayerStore]:
    (tmp_path / "state").mkdir()
    store = LayerStore(tmp_path / "state")
    yield store
    assert list((tmp_path / "state" / "store" / "tmp").iterdir()) == [], "nothing is left of an import"


async def load(layers: LayerStore, source: ImageSource, platform: Platform = AMD64) -> Imported:
    try:
        return await Importer(layers).run(source, platform, "base")
    finally:
        await source.close()


def merged(layers: LayerStore, imported: Imported) -> dict[str, Node]:
    top = directory()
    for layer in reversed(imported.layers):
        top = overlay(top, layers.tree(layer))
    return {path.decode(): node for path, node in walk(top) if path and not node.is_whiteout}


def check(layers: LayerStore, imported: Imported) -> None:
    assert len(imported.layers) == 2
    assert layers.manifest(imported.layers[0]).config == imported.config == ImageConfig(
        env={"A": "1", "B": "x=y"}, user="1000:1000", workdir="/app", entrypoint=["/app/main"]
    )  # fmt: skip
    files = merged(layers, imported)
    assert sorted(files) == ["app", "app/main", "etc", "usr", "usr/bin", "usr/bin/extra", "usr/bin/tool"]
    assert files["usr/bin"].mode & 0o777 == 0o755
    assert files["app/main"].content.size == 70_000


@pytest.mark.parametrize("packing", ["gzip", "zstd", ""])
async def test_an_oci_layout(layers: LayerStore, tmp_path: Path, packing: str) -> None:
    tiny(packing=packing).write_layout(tmp_path / "image")
    first = await load(layers, LocalSource(tmp_path / "image", tmp_path))
    check(layers, first)
    for path in (tmp_path / "image" / "blobs" / "sha256").iterdir():
        if path.stat().st_size > 1000 or not path.read_bytes().startswith(b"{"):
            path.unlink()
    assert await load(layers, LocalSource(tmp_path / "image", tmp_path)) == first, "its layers are not read again"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
async def test_docker_save(layers: LayerStore, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    archive = tiny().write_docker_archive(tmp_path / "image.tar")
    archive.write_bytes(pack(archive.read_bytes()))
    check(layers, await load(layers, LocalSource(archive, tmp_path)))
    (tmp_path / "archive.tar").unlink(missing_ok=True)
    with pytest.raises(NotFound, match="tiny:1"):
        await load(layers, LocalSource(archive, tmp_path, "other:1"))


async def test_an_archive_of_a_layout_and_several_images(layers: LayerStore, tmp_path: Path) -> None:
    tiny().write_layout(tmp_path / "image", tag="one")
    tiny(User="2").write_layout(tmp_path / "image", tag="two")
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(tmp_path / "image", ".")
    with pytest.raises(InvalidRequest, match="one, two"):
        await load(layers, LocalSource(tmp_path / "image.tar", tmp_path))
    check(layers, await load(layers, LocalSource(tmp_path / "image.tar", tmp_path, "one")))
    assert (await load(layers, LocalSource(tmp_path / "image.tar", tmp_path, "two"))).config.user == "2"
    with pytest.raises(NotFound, match="one, two"):
        await load(layers, LocalSource(tmp_path / "image.tar", tmp_path, "three"))


async def test_what_is_no_image_says_so(layers: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no archive" * 100)
    (tmp_path / "bad.gz").write_bytes(b"\x1f\x8b nonsense")
    for name in ("empty", "text", "bad.gz"):
        with pytest.raises(InvalidRequest) as caught:
            LocalSource(tmp_path / name, tmp_path, name="the archive")
        assert str(tmp_path) not in str(caught.value), "where the server keeps it is nobody's business"
        (tmp_path / "archive.tar").unlink(missing_ok=True)
    with pytest.raises(NotFound):
        LocalSource(tmp_path / "absent", tmp_path)
    image = tiny().write_layout(tmp_path / "image")
    (image / "blobs" / "secret").symlink_to("/etc/passwd")
    source = LocalSource(image, tmp_path)
    assert source._files.find("blobs/secret") is None
    assert source._files.find("../text") is None
    (image / "index.json").write_text("[" * 100_000)
    with pytest.raises(InvalidRequest):
        await load(layers, LocalSource(image, tmp_path))


def damage(image: TinyImage, layer: int, data: bytes) -> None:
    image.blobs[image.layers[layer]["digest"]] = data


BROKEN: dict[str, tuple[Callable[[TinyImage], None], type[DsecError]]] = {
    "a layer is another": (lambda i: damage(i, 0, gzip.compress(APP, mtime=0)), LayerCorrupt),
    "a layer is cut off": (lambda i: damage(i, 1, i.blobs[i.layers[1]["digest"]][:-20]), InvalidRequest),
    "a layer has more behind it": (lambda i: damage(i, 1, i.blobs[i.layers[1]["digest"]] + b"more"), InvalidRequest),
    "a layer is no archive": (lambda i: damage(i, 0, b"nonsense" * 500), InvalidRequest),
    "an unknown layer type": (lambda i: i.layers[0].update(mediaType="application/x-rpm"), Unsupported),
    "another digest": (lambda i: i.layers[0].update(digest="sha512:" + "0" * 128), Unsupported),
    "no digest": (lambda i: i.layers[0].update(digest="../../etc/passwd"), InvalidRequest),
    "a layer too few": (lambda i: i.manifest.update(layers=i.layers[:1]), InvalidRequest),
    "layers that are none": (lambda i: i.manifest.update(layers="all"), InvalidRequest),
    "an unknown manifest type": (lambda i: i.manifest.update(mediaType="application/vnd.cncf.helm"), Unsupported),
    "a config that is gone": (lambda i: i.blobs.pop(i.config["digest"]), NotFound),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_broken_images_are_refused_and_leave_nothing(layers: LayerStore, tmp_path: Path, what: str) -> None:
    image = tiny()
    change, error = BROKEN[what]
    change(image)
    image.write_layout(tmp_path / "image")
    with pytest.raises(error):
        await load(layers, LocalSource(tmp_path / "image", tmp_path))
    assert len(layers.all()) <= 1, "at most the good layer below"


async def test_a_bomb_is_too_large(layers: LayerStore, tmp_path: Path) -> None:
    out = [tar(("zeros", {"data": bytes(20 << 20)})), tar(*[(f"f{n}", b"") for n in range(2000)])]
    small = Importer(layers, budget=lambda: Budget(data_bytes=1 << 20, file_bytes=10 << 20, entries=1000))
    for number, archive in enumerate(out):
        TinyImage(archive).write_layout(tmp_path / f"{number}")
        with pytest.raises(TooLarge):
            await small.run(LocalSource(tmp_path / f"{number}", tmp_path), AMD64, "base")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry")) as url:
        yield url


async def test_a_real_registry(layers: LayerStore, real: str) -> None:
    image, arm = tiny(), tiny(architecture="arm64", User="arm")
    image.push(real, "team/app", "1.0")
    arm.push(real, "team/app", "arm")
    digest = digest_of(push_index(real, "team/app", "multi", {"linux/amd64": image, "linux/arm64": arm}))
    for text in (f"{real}/team/app:1.0", f"{real}/team/app@{image.descriptor['digest']}", f"{real}/team/app:multi"):
        check(layers, await load(layers, RegistrySource(parse_reference(text))))
    by_digest = RegistrySource(parse_reference(f"{real}/team/app:ignored@{digest}"))
    assert (await load(layers, by_digest, parse_platform("arm64"))).config.user == "arm"
    with pytest.raises(NotFound, match="is for linux/arm64, not for linux/amd64"):
        await load(layers, RegistrySource(parse_reference(f"{real}/team/app:arm")))
    with pytest.raises(NotFound, match="linux/amd64, linux/arm64"):
        await load(layers, RegistrySource(parse_reference(f"{real}/team/app:multi")), Platform("linux", "riscv64"))
    for text in ("team/app:2.0", "team/none:1.0"):
        with pytest.raises(NotFound):
            await load(layers, RegistrySource(parse_reference(f"{real}/{text}")))


def openssl_certificate(top: Path) -> Path:
    """For a registry to check tokens with."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=t -days 2 -keyout key -out crt"
    subprocess.run(command.split(), cwd=top, check=True, capture_output=True)
    return top / "crt"


# `user:secret`, hashed by bcrypt
PASSWORD = "user:$2y$05$g2F/9uDW1CJtWe/LmISc0.uz/EXzcnJM/ZP4yJ0EgurQCf8TW6NVS"


async def test_a_real_registry_that_wants_a_password(layers: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    with registry(tmp_path / "open") as url:
        tiny().push(url, "app", "1")
    (tmp_path / "users").write_text(PASSWORD)
    with registry(tmp_path / "open", f"auth: {{htpasswd: {{realm: here, path: {tmp_path}/users}}}}\n") as url:
        reference = parse_reference(f"{url}/app:1")
        check(layers, await load(layers, RegistrySource(reference, "user:secret")))
        for credentials in (None, "user:wrong"):
            with pytest.raises(PermissionDenied):
                await load(layers, RegistrySource(reference, credentials))


async def test_a_real_registry_that_wants_tokens(layers: LayerStore, tmp_path: Path) -> None:
    """It sends us to a service, and refuses a token that isn't that one's."""
    asked: list[Any] = []

    async def token(request: web.Request) -> web.Response:
        asked.append((dict(request.query), request.headers.get("Authorization")))
        return web.json_response({"token": "not.signed.by-us"})

    certificate = openssl_certificate(tmp_path)
    async with serving({"/token": token}) as service:
        kind = f"realm: '{service}/token', service: reg, issuer: t, rootcertbundle: {certificate}"
        with registry(tmp_path, f"auth: {{token: {{{kind}}}}}\n") as url:
            for credentials in (None, "user:secret"):
                with pytest.raises(PermissionDenied):
                    await load(layers, RegistrySource(parse_reference(f"{url}/app:1"), credentials))
    basic = f"Basic {base64.b64encode(b'user:secret').decode()}"
    query = {"service": "reg", "scope": "repository:app:pull"}
    assert asked == [(query, None), (query, basic)]


# --- registries that misbehave ---

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(routes: dict[str, Handler]) -> AsyncIterator[str]:
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Liar:
    """A registry of one image, whose answers `spoil` may replace."""

    def __init__(
        self, image: TinyImage, spoil: Callable[[web.Request, int], Any] = lambda request, count: None
    ) -> None:
        self.image = image
        self.spoil = spoil
        self.requests: list[tuple[str, str]] = []
        self.routes: dict[str, Handler] = {"/v2/{path:.*}": self.answer, "/token": self.answer}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, request.headers.get("Range", "")))
        spoiled = self.spoil(request, sum(1 for path, _ in self.requests if path == request.path))
        if spoiled is not None:
            return await spoiled if asyncio.iscoroutine(spoiled) else spoiled
        return self.good(request)

    def good(self, request: web.Request) -> web.Response:
        kind, _, name = request.path.removeprefix("/v2/app/").partition("/")
        data = self.image.manifest_data if kind == "manifests" else self.image.blobs.get(name)
        if data is None:
            return web.Response(status=404)
        begin = request.http_range.start or 0
        headers = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        media = f"{OCI}.manifest.v1+json" if kind == "manifests" else "application/octet-stream"
        return web.Response(body=data[begin:], status=206 if begin else 200, content_type=media, headers=headers)


async def test_downloads_side_by_side_are_told_as_one(layers: LayerStore) -> None:
    """So that what is left can be said."""
    image = TinyImage(*[tar((f"f{n}", os.urandom(2_000_000))) for n in range(5)])
    total = sum(each["size"] for each in image.layers)
    told: list[tuple[int, int]] = []

    def progress(step: str, done: int = 0, total: int = 0) -> None:
        if step == "downloading":
            told.append((done, total))

    async with serving(Liar(image).routes) as url:
        source = RegistrySource(parse_reference(f"{url}/app:1"))
        await Importer(layers).run(source, AMD64, "base", progress)
        await source.close()
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {each for _, each in told} == {total}
    assert told[-1][0] == total


async def ask(layers: LayerStore, liar: Liar, credentials: str | None = None) -> Imported:
    async with serving(liar.routes) as url:
        return await load(layers, RegistrySource(parse_reference(f"{url}/app:1"), credentials, pause_s=0.01))


async def test_busy_answers_are_asked_for_again(layers: LayerStore) -> None:
    def busy(request: web.Request, count: int) -> Any:
        return web.Response(status=(429, 503)[count - 1], headers={"Retry-After": "0"}) if count < 3 else None

    liar = Liar(tiny(), busy)
    check(layers, await ask(layers, liar))
    assert len(liar.requests) == 3 * 4


async def test_a_busy_registry_is_given_up_on(layers: LayerStore) -> None:
    for status in (429, 500):
        liar = Liar(tiny(), lambda request, count, status=status: web.Response(status=status))
        with pytest.raises(Unavailable, match=str(status)):
            await ask(layers, liar)
        assert len(liar.requests) == 6


async def broken_off(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.close()
    return response


async def test_half_a_body_is_gone_on_with(layers: LayerStore) -> None:
    image = tiny()
    big = next(each for each in image.layers if each["size"] > 200)
    whole = image.blobs[big["digest"]]

    async def half(request: web.Request) -> web.StreamResponse:
        begin = request.http_range.start or 0
        response = web.StreamResponse(status=206 if begin else 200)
        if begin:
            response.headers["Content-Range"] = f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
        response.content_length = len(whole) - begin
        await response.prepare(request)
        await response.write(whole[begin : begin + len(whole) // 4])
        return await broken_off(request, response)

    liar = Liar(image, lambda request, count: half(request) if big["digest"] in request.path and count < 4 else None)
    check(layers, await ask(layers, liar))
    ranges = [each for path, each in liar.requests if big["digest"] in path]
    assert ranges[0] == ""
    assert all(each.startswith("bytes=") for each in ranges[1:])


async def test_all_of_a_body_may_come_without_its_end(layers: LayerStore) -> None:
    image = tiny()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(image.blobs[request.path.rpartition("/")[2]])
        return await broken_off(request, response)

    wanted = {each["digest"] for each in image.layers}
    liar = Liar(image, lambda request, _: endless(request) if request.path.rpartition("/")[2] in wanted else None)
    check(layers, await ask(layers, liar))


async def test_layers_are_fetched_side_by_side(layers: LayerStore) -> None:
    image = tiny()
    wanted = {each["digest"] for each in image.layers}
    asked: set[str] = set()
    together = asyncio.Event()
    liar = Liar(image)

    async def when_both_are(request: web.Request, digest: str) -> web.Response:
        asked.add(digest)
        if asked == wanted:
            together.set()
        await asyncio.wait_for(together.wait(), 60)
        return liar.good(request)

    def spoil(request: web.Request, count: int) -> Any:
        digest = request.path.rpartition("/")[2]
        return when_both_are(request, digest) if digest in wanted else None

    liar.spoil = spoil
    check(layers, await ask(layers, liar))


def always(**answers: Any) -> Callable[[web.Request, int], Any]:
    """Replace what is asked for below `manifests` or `blobs`."""
    return lambda request, count: next((make() for part, make in answers.items() if part in request.path), None)


def index_of(*digests: str) -> bytes:
    kind = f"{OCI}.index.v1+json"
    entries = [{"mediaType": kind, "digest": digest, "size": 0} for digest in digests]
    return json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": entries}).encode()


LIES: dict[str, tuple[Callable[[web.Request, int], Any], type[DsecError]]] = {
    "wrong blobs": (
        lambda request, count: web.Response(body=b"x" * 5000) if "blobs" in request.path else None,
        LayerCorrupt,
    ),
    "endless 401": (
        lambda request, count: (
            web.Response(status=401, headers={"WWW-Authenticate": f'Bearer realm="http://{request.host}/token"'})
            if request.path != "/token"
            else web.json_response({"token": "t"})
        ),
        PermissionDenied,
    ),
    "401 without a word": (always(manifests=lambda: web.Response(status=401)), PermissionDenied),
    "401 for a stranger": (
        always(manifests=lambda: web.Response(status=401, headers={"WWW-Authenticate": 'Bearer realm="file:///x"'})),
        PermissionDenied,
    ),
    "401 that leads nowhere": (
        always(manifests=lambda: web.Response(status=401, headers={"WWW-Authenticate": 'Bearer realm="http://[::1"'})),
        Unavailable,
    ),
    "busy for no time that is one": (
        always(manifests=lambda: web.Response(status=429, headers={"Retry-After": "\u00b2"})),
        Unavailable,
    ),
    "documents without an end": (always(manifests=lambda: web.Response(body=b'{"a":' * 100_000)), InvalidRequest),
    "text that is none": (always(manifests=lambda: web.Response(body=b'{"mediaType":"\xff"}')), InvalidRequest),
    "a token that is none": (
        lambda request, count: (
            web.Response(status=401, headers={"WWW-Authenticate": f'Bearer realm="http://{request.host}/token"'})
            if request.path != "/token"
            else web.Response(body=b"<html>")
        ),
        PermissionDenied,
    ),
    "html": (always(manifests=lambda: web.Response(text="<html>", content_type="text/html")), InvalidRequest),
    "no manifest": (always(manifests=lambda: web.json_response({})), Unsupported),
    "an old manifest": (always(manifests=lambda: web.json_response({"schemaVersion": 1, "fsLayers": []})), Unsupported),
    "too much": (always(manifests=lambda: web.Response(body=bytes(9 << 20))), TooLarge),
    "redirects in a circle": (
        lambda request, count: web.Response(status=302, headers={"Location": request.path}),
        Unavailable,
    ),
    "a teapot": (always(manifests=lambda: web.Response(status=418)), InvalidRequest),
    "index that is no such digest": (
        always(
            manifests=lambda: web.Response(body=index_of("sha256:" + "0" * 64), content_type=f"{OCI}.index.v1+json")
        ),
        LayerCorrupt,
    ),
    "nothing": (always(manifests=lambda: web.Response(status=404)), NotFound),
}


@pytest.mark.parametrize("what", LIES)
async def test_a_registry_that_lies(layers: LayerStore, what: str) -> None:
    lie, error = LIES[what]
    liar = Liar(tiny(), lie)
    with pytest.raises(error):
        await ask(layers, liar, "user:secret")
    assert layers.all() == []
    assert len(liar.requests) < 40


async def test_indexes_that_lead_to_indexes(layers: LayerStore) -> None:
    chain = [index_of("sha256:" + "0" * 64)]
    for _ in range(6):
        chain.append(index_of(digest_of(chain[-1])))
    known = {digest_of(each): each for each in chain} | {"1": chain[-1]}

    def answer(request: web.Request, count: int) -> Any:
        return web.Response(body=known[request.path.rpartition("/")[2]], content_type=f"{OCI}.index.v1+json")

    with pytest.raises(InvalidRequest, match="indexes"):
        await ask(layers, Liar(tiny(), answer))


async def test_a_registry_that_is_not_there(layers: LayerStore) -> None:
    with pytest.raises(Unavailable, match="reached"):
        await load(layers, RegistrySource(parse_reference("http://127.0.0.1:9/app"), pause_s=0.01))
