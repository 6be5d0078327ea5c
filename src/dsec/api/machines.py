"""The routes of full machines: screen, keys, mouse, console, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from litestar import Response, delete, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.types import Scope
from msgspec import Meta, Struct

from dsec.api.exchange import Exchange
from dsec.edge.client import EdgeClient
from dsec.spec.sandbox import SandboxInfo
from dsec.spec.screen import Checkpoint, ConsolePiece, Input


class InputRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Keys and clicks, in this order."""

    inputs: Annotated[list[Input], Meta(min_length=1, max_length=256)]


class ConsoleRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """What is typed on the serial console."""

    data: Annotated[bytes, Meta(max_length=65536)]


class CheckpointRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a new checkpoint."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$(?!\n)")]


class Checkpoints(Struct, frozen=True):
    """A machine's checkpoints, in the order in which they were made."""

    checkpoints: list[Checkpoint]


def handlers(edge: EdgeClient, exchange: Callable[[Scope], Exchange]) -> list[Any]:
    """The route handlers for one edge. `exchange`: what was made of a request."""

    @get(
        "/v1/sandboxes/{sandbox_id:str}/screen",
        summary="A full machine's screen as a PNG",
        responses={200: ResponseSpec(bytes, media_type="image/png", description="The picture.")},
    )
    async def screenshot(sandbox_id: FromPath[str]) -> Response[bytes]:
        return Response(await edge.screenshot(sandbox_id), media_type="image/png")

    @post("/v1/sandboxes/{sandbox_id:str}/input", status_code=204, summary="Keys and clicks for a full machine")
    async def send_input(sandbox_id: FromPath[str], data: JSONBody[InputRequest]) -> None:
        await edge.send_input(sandbox_id, data.inputs)

    @get("/v1/sandboxes/{sandbox_id:str}/console", summary="What a full machine printed on its serial console")
    async def read_console(
        sandbox_id: FromPath[str],
        after: Annotated[int, QueryParameter(ge=-1, description="offset; -1: all that is kept")] = -1,
        wait_s: Annotated[float, QueryParameter(ge=0, le=60, description="wait so long for a first byte")] = 0.0,
    ) -> ConsolePiece:
        return await edge.read_console(sandbox_id, after, wait_s)

    @post("/v1/sandboxes/{sandbox_id:str}/console", status_code=204, summary="Type on a machine's serial console")
    async def write_console(sandbox_id: FromPath[str], data: JSONBody[ConsoleRequest]) -> None:
        await edge.write_console(sandbox_id, data.data)

    @get("/v1/sandboxes/{sandbox_id:str}/checkpoints", summary="A full machine's checkpoints")
    async def checkpoints(sandbox_id: FromPath[str]) -> Checkpoints:
        return Checkpoints(edge.checkpoints(sandbox_id))

    @post("/v1/sandboxes/{sandbox_id:str}/checkpoints", status_code=201, summary="Keep a full machine as it is now")
    async def checkpoint(scope: Scope, sandbox_id: FromPath[str], data: JSONBody[CheckpointRequest]) -> Checkpoint:
        exchange(scope).project()
        return await edge.checkpoint(sandbox_id, data.name)

    @delete("/v1/sandboxes/{sandbox_id:str}/checkpoints/{name:str}", status_code=204, summary="Drop a checkpoint")
    async def drop_checkpoint(scope: Scope, sandbox_id: FromPath[str], name: FromPath[str]) -> None:
        exchange(scope).project()
        edge.drop_checkpoint(sandbox_id, name)

    @post(
        "/v1/sandboxes/{sandbox_id:str}/checkpoints/{name:str}/revert",
        status_code=200,
        summary="Have a full machine go back to a checkpoint",
    )
    async def revert(scope: Scope, sandbox_id: FromPath[str], name: FromPath[str]) -> SandboxInfo:
        exchange(scope).project()
        await edge.revert(sandbox_id, name)
        return edge.get(sandbox_id)

    return [
        screenshot,
        send_input,
        read_console,
        write_console,
        checkpoints,
        checkpoint,
        drop_checkpoint,
        revert,
    ]
