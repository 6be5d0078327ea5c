"""How an operator sets the gateways: `gateways.toml` in the state directory; docs/GATEWAYS.md has the format. What it
leaves out is taken from the node's own tools (pip, npm, apt, Go), so that no registry's address is in this project.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from yarl import URL

from dsec.errors import InvalidRequest

FILE_NAME = "gateways.toml"
ASK_S = 30.0


class Upstream(Struct, frozen=True, forbid_unknown_fields=True):
    """A server outside."""

    url: str
    headers: Mapping[str, str] = {}
    """Added to each request, at this server only; a value may name secrets (`Bearer secret:NAME`)."""
    hosts: tuple[str, ...] = ()
    """Further hosts to which it may redirect, and at which its index may place files, whatever their addresses."""

    def __post_init__(self) -> None:
        url = URL(self.url)
        if url.scheme not in {"http", "https"} or not url.host or url.query_string or url.fragment or url.user:
            raise ValueError(f"{self.url!r} is not the base URL of an HTTP server")


class Repository(Upstream, frozen=True, forbid_unknown_fields=True):
    """A Debian repository."""

    inside: str = ""
    """Its address in a `sources.list` inside, where that isn't `url` itself: a mirror that stands for another host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inside:
            Upstream(self.inside)

    @property
    def address(self) -> URL:
        """As programs inside know it."""
        return URL(self.inside or self.url)


class Endpoint(Upstream, frozen=True, forbid_unknown_fields=True):
    """A model endpoint that speaks OpenAI's protocol; `url` ends where the paths below begin (`.../v1`)."""

    paths: tuple[str, ...] = (
        "chat/completions",
        "completions",
        "responses",
        "embeddings",
        "models",
        "messages",
        "messages/count_tokens",
    )
    models: tuple[str, ...] = ()
    """What may be asked for; empty: any."""


class GatewaysConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    cache_bytes: int = 10 << 30
    object_bytes: int = 4 << 30
    """The largest file that is passed on."""
    index_bytes: int = 128 << 20
    """The largest index page that is read."""
    index_ttl_s: float = 60.0
    """How long an index page is served without asking again."""
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    """Between two reads."""
    pypi: Upstream | None = None
    npm: Upstream | None = None
    go: Upstream | None = None
    go_checksums: bool = True
    """Whether that proxy serves the checksum database too; else sandboxes do without."""
    apt: tuple[Repository, ...] | None = None
    git: Mapping[str, Upstream] = {}
    """By host, as in `git:HOST/...`: where it is really, what is added."""
    http: Mapping[str, Upstream] = {}
    """The same for `http:HOST/...`."""
    inference: Mapping[str, Endpoint] = {}
    """By name, as in `inference:NAME`."""

    def trusted(self) -> frozenset[str]:
        """Hosts that are named here."""
        named = [*(self.apt or ()), *self.git.values(), *self.http.values(), *self.inference.values()]
        named += [each for each in (self.pypi, self.npm, self.go) if each is not None]
        return frozenset(host for each in named for host in (URL(each.url).authority, *each.hosts))


def read_config(state: Path) -> GatewaysConfig:
    """What the operator set. Raises `InvalidRequest`."""
    path = state / FILE_NAME
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), GatewaysConfig)
    except FileNotFoundError:
        return GatewaysConfig()
    except (msgspec.ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: {error}", remedy="docs/GATEWAYS.md says what it may hold.") from error


# --- what the node's own tools say ---

_PIP = """
from pip._internal.cli.main_parser import create_main_parser
from pip._internal.configuration import Configuration
from pip._internal.models.index import PyPI
set_up = Configuration(isolated=False)
set_up.load()
found = dict(set_up.items())
for section in (":env:", "install", "download", "global"):
    if url := found.get(section + ".index-url"):
        break
print(url or PyPI.simple_url)
"""


async def default_pypi() -> Upstream | None:
    """The index that this node's pip uses; None where no Python here has pip."""
    for python in dict.fromkeys((sys.executable, shutil.which("python3") or sys.executable)):
        if url := await _ask(python, "-c", _PIP):
            return Upstream(url)
    return None


async def default_npm() -> Upstream | None:
    """The registry that this node's npm uses; None where there is no npm."""
    npm = shutil.which("npm")
    url = await _ask(npm, "config", "get", "registry") if npm else ""
    return Upstream(url) if url else None


async def default_go() -> Upstream | None:
    """The module proxy that this node's Go uses; None where there is none, or none but direct access."""
    go = shutil.which("go")
    text = await _ask(go, "env", "-json", "GOPROXY") if go else ""
    proxies = str(json.loads(text)["GOPROXY"]) if text else os.environ.get("GOPROXY", "")
    url = next((each for each in re.split(r"[,|]", proxies) if each.startswith("http")), None)
    return Upstream(url) if url else None


def default_apt(root: Path = Path("/etc/apt")) -> tuple[Repository, ...]:
    """The repositories that this node's apt uses, by plain HTTP: the environments' `sources.list` is the node's."""
    files = [root / "sources.list", *sorted((root / "sources.list.d").glob("*.list"))]
    files += sorted((root / "sources.list.d").glob("*.sources"))
    found: dict[str, None] = {}
    for path in files:
        if path.is_file():
            text = re.sub(r"(?m)#.*$", "", path.read_text(errors="replace"))
            for url in re.findall(r"https?://[^\s\]]+", text):
                found[url.rstrip("/")] = None
    return tuple(Repository(url) for url in found)


async def _ask(program: str, *arguments: str) -> str:
    """What a tool prints; nothing where it fails."""
    process = await asyncio.create_subprocess_exec(
        program, *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), ASK_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return ""
    return output.decode(errors="replace").strip() if process.returncode == 0 else ""
