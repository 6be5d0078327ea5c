"""Layers and environments: made, looked at, removed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from dsec.errors import ErrorBody, Unavailable, from_body
from dsec.sdk._answers import cut_errors, decoded
from dsec.sdk._context import pack_context
from dsec.sdk._transport import Transport
from dsec.spec.network import Network

_JSON = {"Content-Type": "application/json"}
_TAR = {"Content-Type": "application/x-tar"}
_READ = 1 << 20

OnStep = Callable[[str, int, int], None]
"""Told about long work: what is being done, bytes done, bytes in all (0: unknown)."""
OnLog = Callable[[str], None]
"""Told what a build says, a line each."""
Info = dict[str, Any]
"""As the HTTP API answers; docs/ARCHITECTURE.md says what is in it."""


class _Step(Struct, frozen=True):
    step: str = ""
    done: int = 0
    total: int = 0
    log: str | None = None
    result: dict[str, Any] | None = None
    error: ErrorBody | None = None


class AsyncCatalog:
    """The layers and environments that the project may read.

    A layer is named `NAME@VERSION` or by its digest. Calls that take long tell `on_step` how far they are; they are not
    repeated when the connection breaks (`Unavailable`): what was finished by then is found again quickly.
    """

    def __init__(self, transport: Transport) -> None:
        """Not for callers: `client.catalog`."""
        self._transport = transport

    async def layers(self) -> list[Info]:
        """All of them, oldest first."""
        answer = await self._get("/v1/layers")
        found: list[Info] = answer["layers"]
        return found

    async def layer(self, reference: str) -> Info:
        """Everything about one. Raises `NotFound`."""
        return await self._get(f"/v1/layers/{quote(reference, safe='')}")

    async def environment(self, name: str) -> Info:
        """`environment` and its `layers`, top first. Raises `EnvironmentNotFound`."""
        return await self._get(f"/v1/environments/{quote(name, safe='')}")

    async def create_environment(
        self,
        name: str,
        layers: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        description: str = "",
        readers: Sequence[str] = (),
    ) -> Info:
        """Make or replace an environment of layers, top first; `env:NAME` stands for all layers of an environment.
        `readers`: projects that may use it too (`*`: all). Raises `NotFound`, `InvalidRequest`."""
        body = {"name": name, "layers": list(layers), "env": dict(env or {}), "user": user, "workdir": workdir}
        body |= {"description": description, "readers": list(readers)}
        url = self._transport.url("/v1/environments")
        return await self._transport.call("POST", url, Info, body=msgspec.json.encode(body), headers=_JSON)

    async def remove_environment(self, name: str) -> None:
        """Forget one; sandboxes of it go on. Raises `EnvironmentNotFound`."""
        url = self._transport.url(f"/v1/environments/{quote(name, safe='')}")
        await self._transport.call("DELETE", url, type(None))

    async def remove_layer(self, name: str) -> None:
        """Forget a layer's name; its data goes with `collect`, once nothing needs it. Raises `NotFound`."""
        url = self._transport.url(f"/v1/layers/{quote(name, safe='')}")
        await self._transport.call("DELETE", url, type(None))

    async def import_image(
        self,
        image: str,
        environment: str,
        *,
        platform: str | None = None,
        credentials: str | None = None,
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make an environment of a registry's image, `HOST[:PORT]/NAME[:TAG][@DIGEST]`. `credentials`:
        `user:password`. Raises `NotFound`, `InvalidRequest`, `Unsupported`, `TooLarge`, `LayerCorrupt`, `Unavailable`,
        `PermissionDenied`."""
        body: dict[str, Any] = {"image": image, "environment": environment, "readers": list(readers)}
        body |= {"platform": platform, "credentials": credentials}
        return await self._long("/v1/layers:import", msgspec.json.encode(body), _JSON, on_step)

    async def import_archive(
        self,
        path: str | Path,
        environment: str,
        *,
        tag: str | None = None,
        platform: str | None = None,
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make an environment of an image in an archive of this machine's (`docker save`, an OCI layout). Raises as
        `import_image`."""
        arguments = {"form": "image", "name": environment, "tag": tag, "platform": platform, "reader": list(readers)}
        return await self._upload(path, arguments, on_step)

    async def build(
        self,
        path: str | Path,
        name: str,
        *,
        at: str = "/",
        kind: str = "workspace",
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make a layer of a tar archive (also compressed) of this machine's, placed at the path `at`. `readers`: as of
        `create_environment`. Raises `InvalidRequest`, `Unsupported`, `TooLarge`, `Conflict`."""
        arguments = {"form": "tree", "name": name, "at": at, "kind": kind, "reader": list(readers)}
        return await self._upload(path, arguments, on_step)

    async def build_packages(
        self,
        packages: Sequence[str],
        name: str,
        *,
        on: str | None = None,
        suite: str | None = None,
        mirror: str | None = None,
        kind: str | None = None,
        fresh: bool = False,
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make a layer of Debian packages and what they need: a whole base, or (`on`) what they add to an environment.

        `suite`: like `bookworm`; None: the environment's, or the node's own. `mirror`: in place of the node's own, with
        a key of the project `default`. `kind`: None: `base`, or `toolkit` with `on`. `fresh`: install again what was
        installed before. Raises `InvalidRequest` for what
        the suite hasn't got, `EnvironmentNotFound`, `BuildFailed` with dpkg's last output, `Unavailable` where no
        mirror answers, `Unsupported`, `PermissionDenied`, `Conflict`."""
        body: dict[str, Any] = {"packages": list(packages), "name": name, "on": on, "suite": suite}
        body |= {"mirror": mirror, "kind": kind, "fresh": fresh, "readers": list(readers)}
        return await self._long("/v1/layers:packages", msgspec.json.encode(body), _JSON, on_step)

    async def build_dockerfile(
        self,
        context: str | Path,
        name: str,
        *,
        dockerfile: str | Path | None = None,
        target: str | None = None,
        args: Mapping[str, str] | None = None,
        network: Network | None = None,
        fresh: bool = False,
        platform: str | None = None,
        readers: Sequence[str] = (),
        on_log: OnLog | None = None,
    ) -> Info:
        """Make the environment `name` of a Dockerfile (None: the one in `context`, a directory of this machine).

        `target`: the stage that counts. `args`: for its ARG. `network`: what its RUN may reach, by named permission.
        `fresh`: do every step again. Raises `InvalidRequest` and `Unsupported`, which name the line, `BuildFailed`
        (`details` has `line`, `exit_code` and the last `output`), `PermissionDenied`, `TooLarge`, and what importing an
        image raises.
        """
        top = Path(context)
        with tempfile.TemporaryFile() as file:
            where = await asyncio.to_thread(pack_context, top, Path(dockerfile or top / "Dockerfile"), file)

            async def chunks() -> AsyncIterator[bytes]:
                file.seek(0)
                while piece := await asyncio.to_thread(file.read, _READ):
                    yield piece

            options: dict[str, Any] = {
                "name": name,
                "dockerfile": where,
                "target": target,
                "args": dict(args or {}),
                "fresh": fresh,
            }
            options |= {"network": network or {}, "platform": platform, "readers": list(readers)}
            encoded = msgspec.json.encode(options).decode()
            return await self._long("/v1/builds", chunks, _TAR, None, on_log=on_log, arguments={"options": encoded})

    async def merge(
        self,
        layers: Sequence[str],
        name: str,
        *,
        kind: str = "workspace",
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make one layer of several, top first. `readers`: as of `create_environment`. Raises `NotFound`,
        `Conflict`."""
        body = {"layers": list(layers), "name": name, "kind": kind, "readers": list(readers)}
        return await self._long("/v1/layers:merge", msgspec.json.encode(body), _JSON, on_step)

    async def verify(self, reference: str, *, on_step: OnStep | None = None) -> Info:
        """Read all of a layer and compare it with its digests. Raises `NotFound`, `LayerCorrupt`."""
        return await self._long(f"/v1/layers/{quote(reference, safe='')}/verify", b"", _JSON, on_step)

    async def collect(self, *, least_age_s: float | None = None, on_step: OnStep | None = None) -> int:
        """Delete what nothing needs any more and is that old (None: an hour). Returns the bytes that were freed. Raises
        `Unavailable`."""
        body = b"" if least_age_s is None else msgspec.json.encode({"least_age_s": least_age_s})
        answer = await self._long("/v1/layers:gc", body, _JSON, on_step)
        freed: int = answer["freed_bytes"]
        return freed

    async def export(self, reference: str, path: str | Path, *, on_step: OnStep | None = None) -> int:
        """Write a layer to a file, as an archive of the kind that OCI images hold. Returns its size. Raises
        `NotFound`, `Unavailable`; then there is no file."""
        url = self._transport.url(f"/v1/layers/{quote(reference, safe='')}/export")
        response = await self._transport.open("GET", url)
        size = 0
        try:
            with open(path, "wb") as file:  # noqa: ASYNC230 (its I/O is the page cache's)
                async for piece in response.content.iter_chunked(_READ):
                    file.write(piece)
                    size += len(piece)
                    if on_step is not None:
                        on_step("exporting", size, 0)
        except cut_errors() as error:
            await asyncio.to_thread(_remove, Path(path))
            raise Unavailable("the answer was cut", remedy="Try again.") from error
        finally:
            response.release()
        return size

    async def _get(self, path: str) -> Info:
        return await self._transport.call("GET", self._transport.url(path), Info)

    async def _upload(self, path: str | Path, arguments: Mapping[str, object], on_step: OnStep | None) -> Info:
        total = await asyncio.to_thread(lambda: Path(path).stat().st_size)

        async def chunks() -> AsyncIterator[bytes]:
            done = 0
            with open(path, "rb") as file:  # noqa: ASYNC230
                while piece := await asyncio.to_thread(file.read, _READ):
                    yield piece
                    done += len(piece)
                    if on_step is not None:
                        on_step("sending", done, total)

        return await self._long("/v1/layers:upload", chunks, _TAR, on_step, arguments=arguments)

    async def _long(
        self,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        on_step: OnStep | None,
        *,
        on_log: OnLog | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> Info:
        url = self._transport.url(path, **(arguments or {}))
        response = await self._transport.open("POST", url, body=body, headers=headers)
        try:
            async for line in response.content:
                step = decoded(line, _Step)
                if step.error is not None:
                    raise from_body(step.error)
                if step.result is not None:
                    return step.result
                if step.log is not None and on_log is not None:
                    on_log(step.log)
                elif on_step is not None:
                    on_step(step.step, step.done, step.total)
        except cut_errors() as error:
            raise Unavailable("the answer was cut", remedy="Try again: what was finished isn't done twice.") from error
        finally:
            response.release()
        raise Unavailable("the answer was cut", remedy="Try again: what was finished isn't done twice.")


def _remove(path: Path) -> None:
    """What isn't whole; never a device or pipe."""
    if path.is_file():
        path.unlink()
