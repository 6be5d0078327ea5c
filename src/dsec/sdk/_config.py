"""Where a client finds its server: the one place that reads the client's environment variables and files.

Order: arguments, then `DSEC_URL` and `DSEC_API_KEY`, then the first `client.json` that exists of `$DSEC_STATE/`,
`~/.config/dsec/` and `/var/lib/dsec/`. `dsec serve` writes that file (mode 0600) into its state directory.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.errors import InvalidRequest

DEFAULT_PORT = 7070
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
FILE_NAME = "client.json"
_STATE = Path("/var/lib/dsec")


class Endpoint(Struct, frozen=True):
    """A server and the key for it; also the content of `client.json`."""

    url: str
    api_key: str = ""


def find_endpoint(url: str | None = None, api_key: str | None = None) -> Endpoint:
    """The server to talk to. Raises `InvalidRequest` for a URL that is none, or a file that can't be read as one."""
    url = url or os.environ.get("DSEC_URL") or None
    api_key = api_key or os.environ.get("DSEC_API_KEY") or None
    if url is None or api_key is None:
        local = _local()[1]
        if local is not None and url in (None, local.url):
            url = local.url
            api_key = api_key or local.api_key
    url = (url or DEFAULT_URL).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} is not a URL", remedy=f"a server's URL is like {DEFAULT_URL}")
    return Endpoint(url, api_key or "")


def renewed_key(endpoint: Endpoint) -> str | None:
    """Another key for the same server than the one in `endpoint`, where a `client.json` has one by now: a server that
    starts again may write a new one. Raises `InvalidRequest` for a damaged file."""
    local = _local()[1]
    if local is None or local.url != endpoint.url or local.api_key == endpoint.api_key:
        return None
    return local.api_key


def named_by(endpoint: Endpoint) -> str:
    """Where a server's address comes from, for people who don't expect it; "": from them."""
    path, local = _local()
    return f" (as {path} says)" if local is not None and local.url == endpoint.url else ""


def write_endpoint(directory: Path, endpoint: Endpoint) -> Path:
    """Write `client.json` into `directory`, readable by its owner only. Atomic."""
    path = directory / FILE_NAME
    temporary = directory / f".{FILE_NAME}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(endpoint) + b"\n")
    temporary.replace(path)
    return path


def _local() -> tuple[Path | None, Endpoint | None]:
    state = os.environ.get("DSEC_STATE")
    places = [Path(state)] if state else []
    with contextlib.suppress(RuntimeError):  # no home directory
        places.append(Path.home() / ".config" / "dsec")
    places.append(_STATE)
    for place in places:
        path = place / FILE_NAME
        try:
            return path, msgspec.json.decode(path.read_bytes(), type=Endpoint)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{path} is damaged: {error}", remedy="`dsec serve` writes it again") from None
    return None, None
