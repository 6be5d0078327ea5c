"""An edge's side of moves: what apiservers ask of it about sandboxes that come, stay and leave (`/v1/moves`).

Invariant: an order to make a sandbox anew is refused for good once somebody was told that the sandbox isn't here, so
that what an apiserver gave up is never made by an order that was long under way.
"""

from __future__ import annotations

import asyncio
import logging
import re

import msgspec
from msgspec import Struct

from dsec.api.exchange import Exchange
from dsec.cluster.logs import digests_in, kept_body
from dsec.cluster.shipping import Shipper
from dsec.cluster.wire import REFUSED
from dsec.edge.client import Principal
from dsec.edge.moving import Moving, Resident
from dsec.errors import Conflict, DsecError, InvalidRequest, NotFound, QuotaExceeded, Unavailable, Unsupported
from dsec.ports import BlobStore
from dsec.spec.cluster import Natural
from dsec.spec.trajectory import Broken, RebuildRequest, Rebuilt, parse

PATH = "/v1/moves"
MAX_LOG_BYTES = 256 << 20
MAX_BODIES_BYTES = 512 << 20
WIDTH = 4
"""Sandboxes that are made anew here at the same time; others wait."""
_ID = re.compile(r"[0-9a-v]{24}")
log = logging.getLogger("dsec.cluster")


class Order(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line of an order to make a sandbox anew; its log follows."""

    request: RebuildRequest
    generation: Natural
    key: str = ""
    """Of the bodies in the shared store."""


class Question(Struct, frozen=True, kw_only=True):
    """Whether a sandbox is here; if it isn't, orders up to this generation are refused from now on."""

    request: RebuildRequest
    generation: Natural


class Standing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer."""

    standing: str
    """`here`, `coming` or `gone`."""
    rebuilt: Rebuilt | None = None
    """It came here by this very request."""


class Residents(Struct, frozen=True):
    """What a node has, for who drains it."""

    residents: list[Resident]


_order = msgspec.json.Decoder(Order).decode
_question = msgspec.json.Decoder(Question)


class Handing:
    """For the event loop."""

    def __init__(self, moving: Moving, shipper: Shipper, store: BlobStore | None) -> None:
        """`store`: the shared one."""
        self._moving = moving
        self._shipper = shipper
        self._store = store
        self._refused: dict[str, int] = {}
        """By sandbox: up to which generation."""
        self._room = asyncio.Semaphore(WIDTH)

    def absent(self, sandbox_id: str) -> bool:
        """Whether another node may have it."""
        return self._moving.standing(sandbox_id) == "gone"

    def check(self, sandbox_id: str) -> None:
        """Raises `Unavailable` while it is made anew here."""
        if self._moving.coming(sandbox_id):
            raise Unavailable(f"sandbox {sandbox_id} is being made anew on this node", remedy="Try again in a moment.")

    async def __call__(self, x: Exchange, raw: str, principal: Principal) -> None:
        """Answer one request of an apiserver's. Raises `DsecError`."""
        rest = raw[len(PATH) :].strip("/")
        method = x.scope["method"]
        if not rest and method == "GET":
            await x.answer(200, Residents(self._moving.residents()))
            return
        x.only("POST", "GET") if not rest else x.only("POST")
        if not rest:
            await self._take_in(x, principal)
            return
        sandbox_id, _, verb = rest.partition("/")
        if not _ID.fullmatch(sandbox_id):
            raise NotFound("no such path")
        if verb == "standing":
            question = x.decode(_question, await x.body())
            await x.answer(200, self._answer(sandbox_id, question))
        elif verb == "leave":
            await x.drain()
            if self._store is None and not self.absent(sandbox_id):
                raise Unsupported("without a shared store (`DSEC_STORE`) its files can't leave this node")
            await self._moving.hand_over(sandbox_id, self._shipper)
            await x.answer(200, {})
        else:
            raise NotFound("no such path")

    def _answer(self, sandbox_id: str, question: Question) -> Standing:
        standing = self._moving.standing(sandbox_id)
        if standing == "gone":
            self._refused[sandbox_id] = max(question.generation, self._refused.get(sandbox_id, -1))
        return Standing(standing=standing, rebuilt=self._moving.came(question.request) if standing == "here" else None)

    async def _take_in(self, x: Exchange, principal: Principal) -> None:
        head, _, rest = (await x.body(MAX_LOG_BYTES)).partition(b"\n")
        try:
            order = _order(head)
            lines = rest.splitlines(keepends=True)
            times: dict[str, float] = {}
            for entry in map(parse, lines):
                for digest in digests_in(entry.data):
                    times.setdefault(digest, entry.time)  # it was written once, with the first entry that names it
        except (msgspec.MsgspecError, Broken) as error:
            raise InvalidRequest(f"this order can't be read: {error}") from None
        sandbox_id = order.request.sandbox
        try:
            async with self._room:
                if order.generation <= self._refused.get(sandbox_id, -1):
                    raise Conflict("this order was given up")
                bodies = await self._bodies(sandbox_id, order.key, times)
                rebuilt = await asyncio.shield(
                    self._moving.take_in(order.request, principal, lines, bodies, order.generation, self._shipper)
                )
        except DsecError as error:
            log.warning("sandbox %s can't be made anew here: %s", sandbox_id, error)
            self._refused[sandbox_id] = max(order.generation, self._refused.get(sandbox_id, -1))
            await x.answer(error.http_status, error.body(), (REFUSED.encode(), b"1"))
            return
        await x.answer(200, rebuilt)

    async def _bodies(self, sandbox_id: str, key: str, times: dict[str, float]) -> dict[str, bytes]:
        """What can be had of them. Raises `Unavailable`, `QuotaExceeded`."""
        found: dict[str, bytes] = {}
        size = 0
        if self._store is None or not key:
            return found
        for digest, at in times.items():
            data = await kept_body(self._store, at, sandbox_id, digest, bytes.fromhex(key))
            if data is not None:
                size += len(data)
                if size > MAX_BODIES_BYTES:
                    raise QuotaExceeded(f"the log names over {MAX_BODIES_BYTES >> 20} MiB of outputs and contents")
                found[digest] = data
        return found
