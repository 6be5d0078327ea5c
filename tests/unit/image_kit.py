"""Tiny images, made by hand, and a real registry to hold them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import socket
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zstandard

from free_port import free_port

OCI = "application/vnd.oci.image"


def tar(*entries: tuple[str, Any], everywhere: dict[str, str] | None = None, **defaults: Any) -> bytes:
    """An archive. Of each entry: its name, and bytes (a file), None (a directory), a string (a symbolic link), or a
    dictionary of TarInfo's fields, with `data`. `everywhere`: its global header."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=everywhere) as archive:
        for name, what in entries:
            info = tarfile.TarInfo(name)
            info.mode, info.mtime = 0o644, 1_600_000_000
            fields: dict[str, Any] = dict(defaults)
            data = b""
            if what is None:
                fields |= {"type": tarfile.DIRTYPE, "mode": 0o755}
            elif isinstance(what, str):
                fields |= {"type": tarfile.SYMTYPE, "linkname": what}
            elif isinstance(what, bytes):
                data = what
            else:
                fields |= what
                data = fields.pop("data", b"")
            for field, value in fields.items():
                setattr(info, field, value)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class TinyImage:
    """An image of archives, bottom first."""

    def __init__(self, *archives: bytes, packing: str = "gzip", architecture: str = "amd64", **config: Any) -> None:
        pack = {"gzip": lambda d: gzip.compress(d, mtime=0), "zstd": zstandard.compress, "": lambda d: d}[packing]
        self.blobs: dict[str, bytes] = {}
        suffix = f"+{packing}" if packing else ""
        self.layers = [self._add(pack(each), f"{OCI}.layer.v1.tar{suffix}") for each in archives]
        self.diff_ids = [digest_of(each) for each in archives]
        self.archives = archives
        document = {
            "os": "linux", "architecture": architecture, "config": config,
            "rootfs": {"type": "layers", "diff_ids": self.diff_ids},
        }  # fmt: skip
        self.config_data = json.dumps(document).encode()
        self.config = self._add(self.config_data, f"{OCI}.config.v1+json")
        self.manifest = {
            "schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json", "config": self.config, "layers": self.layers,
        }  # fmt: skip

    def _add(self, data: bytes, media_type: str) -> dict[str, Any]:
        self.blobs[digest_of(data)] = data
        return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

    @property
    def manifest_data(self) -> bytes:
        return json.dumps(self.manifest).encode()

    @property
    def descriptor(self) -> dict[str, Any]:
        data = self.manifest_data
        return {"mediaType": f"{OCI}.manifest.v1+json", "digest": digest_of(data), "size": len(data)}

    def write_layout(self, top: Path, *, tag: str | None = None) -> Path:
        """As an OCI layout directory."""
        blobs = top / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        for digest, data in (self.blobs | {digest_of(self.manifest_data): self.manifest_data}).items():
            (blobs / digest.removeprefix("sha256:")).write_bytes(data)
        (top / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        entry = self.descriptor | ({"annotations": {"org.opencontainers.image.ref.name": tag}} if tag else {})
        before = json.loads((top / "index.json").read_text())["manifests"] if (top / "index.json").exists() else []
        (top / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [*before, entry]}))
        return top

    def write_docker_archive(self, path: Path, tag: str = "tiny:1") -> Path:
        """As `docker save` did it before it wrote OCI layouts."""
        names = [f"{hashlib.sha256(each).hexdigest()}/layer.tar" for each in self.archives]
        listed = [{"Config": "config.json", "RepoTags": [tag], "Layers": names}]
        layers: list[tuple[str, Any]] = list(zip(names, self.archives, strict=True))
        path.write_bytes(
            tar(("config.json", self.config_data), *layers, ("manifest.json", json.dumps(listed).encode()))
        )
        return path

    def push(self, url: str, name: str, tag: str) -> None:
        """Into a registry."""
        for digest, data in self.blobs.items():
            started = _call("POST", f"{url}/v2/{name}/blobs/uploads/")
            where = started.headers["Location"]
            where += ("&" if "?" in where else "?") + f"digest={digest}"
            _call("PUT", where, data, "application/octet-stream")
        _call("PUT", f"{url}/v2/{name}/manifests/{tag}", self.manifest_data, f"{OCI}.manifest.v1+json")


def push_index(url: str, name: str, tag: str, images: dict[str, TinyImage]) -> bytes:
    """An index of images that were pushed, by `os/architecture`. Returns it."""
    entries = []
    for platform, image in images.items():
        system, architecture = platform.split("/")
        entries.append(image.descriptor | {"platform": {"os": system, "architecture": architecture}})
    index = json.dumps({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": entries}).encode()
    _call("PUT", f"{url}/v2/{name}/manifests/{tag}", index, f"{OCI}.index.v1+json")
    return index


def _call(method: str, url: str, data: bytes | None = None, kind: str = "") -> Any:
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": kind} if kind else {})
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
        return answer


@contextmanager
def registry(top: Path, extra: str = "") -> Iterator[str]:
    """Debian's docker-registry in a process of its own. `extra`: more of its configuration. Yields its URL."""
    port = free_port()
    config = top / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {top}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n{extra}"
    )
    process = subprocess.Popen(
        ["docker-registry", "serve", config],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"},
    )
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the registry did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
