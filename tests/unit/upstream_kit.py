"""Servers that speak the real protocols of package indexes and repositories, made by hand: tiny packages with dates."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from aiohttp import web

OLD, MIDDLE, NEW = "2021-03-01T12:00:00.000000Z", "2022-06-01T12:00:00.000000Z", "2024-01-15T12:00:00.000000Z"


def wheel(name: str, version: str, *, requires: str = "") -> bytes:
    """A wheel with one module that says its version."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: dsec\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), text)
    return packed.getvalue()


def metadata_of(packed: bytes) -> bytes:
    """A wheel's METADATA."""
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA")))


class Index:
    """A package index, PEP 503, 658, 691 and 700; `html` for one of the old kind. `asked` are the paths of requests."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, tuple[bytes, str]]] = {}
        self.yanked: set[str] = set()
        self.asked: list[str] = []
        self.html = False
        self.json_api = True
        self.need: str | None = None
        self.url = ""

    def add(self, name: str, version: str, uploaded: str, *, requires: str = "") -> str:
        """A release; its file's name."""
        filename = f"{name}-{version}-py3-none-any.whl"
        self.files.setdefault(name, {})[filename] = (wheel(name, version, requires=requires), uploaded)
        return filename

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.need is not None and request.headers.get("Authorization") != self.need:
            return web.Response(status=401, text=f"not {request.headers.get('Authorization')}")
        match request.path.strip("/").split("/"):
            case ["simple", name] if name in self.files:
                return self._page(request, name)
            case ["pypi", name, "json"] if name in self.files and self.json_api:
                times = [
                    {"filename": file, "upload_time_iso_8601": uploaded}
                    for file, (_, uploaded) in self.files[name].items()
                ]
                return web.json_response({"releases": {"all": times}})
            case ["packages", name, file] if file.removesuffix(".metadata") in self.files.get(name, {}):
                packed = self.files[name][file.removesuffix(".metadata")][0]
                return web.Response(body=metadata_of(packed) if file.endswith(".metadata") else packed)
        return web.Response(status=404)

    def _page(self, request: web.BaseRequest, name: str) -> web.Response:
        described = []
        for file, (packed, uploaded) in self.files[name].items():
            metadata = {"sha256": hashlib.sha256(metadata_of(packed)).hexdigest()}
            described.append(
                {
                    "filename": file,
                    "url": f"{self.url}/packages/{name}/{file}",
                    "hashes": {"sha256": hashlib.sha256(packed).hexdigest()},
                    "size": len(packed),
                    "upload-time": uploaded,
                    "yanked": "bad" if file in self.yanked else False,
                    "core-metadata": metadata,
                }
            )
        if self.html:
            links = [
                f'<a href="../../packages/{name}/{each["filename"]}#sha256={each["hashes"]["sha256"]}"'  # type: ignore[index]
                f' data-dist-info-metadata="sha256={each["core-metadata"]["sha256"]}"'  # type: ignore[index]
                + (' data-yanked="bad"' if each["yanked"] else "")
                + f">{each['filename']}</a>"
                for each in described
            ]
            return web.Response(text=f"<html><body>{''.join(links)}</body></html>", content_type="text/html")
        body = json.dumps({"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": described}).encode()
        tag = f'"{hashlib.sha256(body).hexdigest()}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304)
        response = web.Response(body=body, headers={"ETag": tag}, content_type="application/vnd.pypi.simple.v1+json")
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        return response


class Registry:
    """An npm registry."""

    def __init__(self) -> None:
        self.packages: dict[str, dict[str, Any]] = {}
        self.tarballs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = ""

    def add(self, name: str, version: str, published: str, *, requires: dict[str, str] | None = None) -> None:
        """A version; the newest added is `latest`."""
        manifest = {"name": name, "version": version, "main": "index.js", "dependencies": requires or {}}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for path, text in {
                "package.json": json.dumps(manifest),
                "index.js": f"module.exports = '{version}'\n",
            }.items():
                entry = tarfile.TarInfo(f"package/{path}")
                entry.size, entry.mode = len(text), 0o644
                archive.addfile(entry, io.BytesIO(text.encode()))
        path = f"/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
        self.tarballs[path] = packed.getvalue()
        digest = base64.b64encode(hashlib.sha512(packed.getvalue()).digest()).decode()
        package = self.packages.setdefault(name, {"name": name, "versions": {}, "time": {}, "dist-tags": {}})
        package["versions"][version] = {
            **manifest,
            "_id": f"{name}@{version}",
            "dist": {"tarball": f"{self.url}{path}", "integrity": f"sha512-{digest}"},
        }
        package["time"] |= {version: published, "modified": published}
        package["time"].setdefault("created", published)
        package["dist-tags"]["latest"] = version

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        if request.path in self.tarballs:
            return web.Response(body=self.tarballs[request.path])
        package = self.packages.get(request.path[1:])  # `path` is decoded: %2f of a scope is a slash
        if package is None or request.method != "GET":
            return web.json_response({"error": "Not found"}, status=404)
        if "application/vnd.npm.install-v1+json" in request.headers.get("Accept", ""):
            package = {key: value for key, value in package.items() if key != "time"}
        return web.json_response(package)


def repository(top: Path, suite: str, packages: dict[str, str]) -> None:
    """A Debian repository below `top/debian`: packages by name and version, made and indexed by dpkg's own tools."""
    pool, dists = top / "debian/pool", top / f"debian/dists/{suite}"
    binary = dists / "main/binary-amd64"
    for directory in (pool, binary):
        directory.mkdir(parents=True, exist_ok=True)
    for name, version in packages.items():
        tree = top / f"build-{name}"
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: nobody <nobody@example.com>\n"
            f"Description: a test\n"
        )
        (tree / "usr/share").mkdir(parents=True)
        (tree / f"usr/share/{name}.txt").write_text(version)
        command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(pool / f"{name}_{version}_all.deb")]
        subprocess.run(command, check=True, capture_output=True)
        shutil.rmtree(tree)
    scanned = subprocess.run(
        ["dpkg-scanpackages", "-m", "pool"], cwd=top / "debian", check=True, capture_output=True
    ).stdout
    (binary / "Packages").write_bytes(scanned)
    digest = hashlib.sha256(scanned).hexdigest()
    (dists / "Release").write_text(
        f"Origin: test\nSuite: {suite}\nCodename: {suite}\nArchitectures: amd64\nComponents: main\n"
        f"Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n {digest} {len(scanned)} main/binary-amd64/Packages\n"
    )


class Files:
    """A directory by HTTP."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.asked: list[str] = []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request.path)
        path = self.top / request.path.lstrip("/")
        if path.is_file():
            return web.FileResponse(path)
        return web.Response(status=404)


class GitServer:
    """The repositories below `top`, served by git's own http-backend. `need`: the Authorization that it asks for."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.need: str | None = None
        self.asked: list[str] = []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.rel_url}")
        if self.need is not None and request.headers.get("Authorization") != self.need:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="git"'})
        body = await request.content.read()
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.top),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "http.receivepack",
            "GIT_CONFIG_VALUE_0": "true",
            "REQUEST_METHOD": request.method,
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query_string,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            "REMOTE_USER": "test",
            "REMOTE_ADDR": "127.0.0.1",
        }
        process = await asyncio.create_subprocess_exec(
            "git", "http-backend",
            env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        output, _ = await process.communicate(body)
        head, _, rest = output.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
        status = int(headers.pop("Status", "200").split()[0])
        return web.Response(status=status, headers=headers, body=rest)


def commit(repository: Path, name: str, text: str, date: str) -> str:
    """A commit in a bare repository's working clone; its id."""
    who = {
        "PATH": os.environ["PATH"], "HOME": str(repository.parent),
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.com", "GIT_AUTHOR_DATE": date,
        "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.com", "GIT_COMMITTER_DATE": date,
    }  # fmt: skip

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=repository, env=who, check=True, capture_output=True)
        return done.stdout.decode().strip()

    (repository / name).write_text(text)
    git("add", name)
    git("commit", "-qm", name)
    return git("rev-parse", "HEAD")


def bare(top: Path, name: str) -> tuple[Path, Path]:
    """An empty bare repository `name` below `top` and a working clone of it."""
    origin, clone = top / name, top.parent / f"clone-{name.replace('/', '-')}"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(origin)], check=True)
    subprocess.run(["git", "clone", "-q", str(origin), str(clone)], check=True, capture_output=True)
    subprocess.run(["git", "checkout", "-q", "-B", "main"], cwd=clone, check=True)
    return origin, clone


def push(clone: Path, *refs: str) -> None:
    """To the bare repository."""
    subprocess.run(["git", "push", "-q", "origin", *(refs or ("main",))], cwd=clone, check=True, capture_output=True)
