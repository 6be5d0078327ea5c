"""Who gets which sandbox: get-or-create by name, idempotency keys, batches.

Owns ids and the batches in flight. Invariants: all callers that ask for one name at the same time share one creation;
a key names the same sandboxes for as long as any of them is on record, also for an edge that came up after a crash in
the middle of the batch; an id is given out once.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from dsec.edge.access import digest, new_token
from dsec.edge.charges import Charges
from dsec.edge.client import Created
from dsec.edge.config import EdgeConfig
from dsec.edge.kept import BatchItem
from dsec.edge.lives import Lives
from dsec.edge.sandbox import Sandbox, info_of
from dsec.edge.specs import check_features, differing_fields, learn, resolve
from dsec.edge.tasks import Tasks, quiet
from dsec.errors import Conflict, DsecError, InvalidRequest, SandboxLost
from dsec.journal.records import BatchRecord, Journal, Record
from dsec.journal.state_dir import StateDir
from dsec.plan.quota import account_of
from dsec.ports import Backend, Clock
from dsec.spec.causes import Cause
from dsec.spec.ids import EPOCH_MASK, SandboxId, decode_id, edge_of, encode_id
from dsec.spec.sandbox import SandboxSpec, State

_BREATH = 128
"""Items of a batch that are begun before the event loop gets a turn."""
_MAX_KEY = 200
_encode = msgspec.json.Encoder().encode
Resolved = tuple[Backend, SandboxSpec]


class Naming:
    """Turns requests into sandboxes of `Lives`."""

    def __init__(
        self,
        *,
        lives: Lives,
        backends: Mapping[str, Backend],
        journal: Journal,
        state: StateDir,
        clock: Clock,
        config: EdgeConfig,
        tasks: Tasks,
    ) -> None:
        self._lives = lives
        self._backends = backends
        self._journal = journal
        self._state = state
        self._clock = clock
        self._config = config
        self._tasks = tasks
        self._opening: dict[tuple[str, str], tuple[BatchRecord, asyncio.Future[None]]] = {}
        """Batches that are not durable yet."""
        self.charges = Charges()

    async def create(self, spec: SandboxSpec, project: str, deadline_s: float | None, key: str | None) -> Created:
        """See `EdgeClient.create`."""
        await learn([spec], project, self._backends)
        if key is None:
            return await asyncio.shield(self._request(spec, project, deadline_s, None))
        self._resolve(spec, project)  # what can't be made uses up no key
        batch, fresh = await self._open_batch([spec], project, key)
        return await asyncio.shield(self._request(spec, project, deadline_s, batch.ids[0], fresh=fresh))

    async def create_many(
        self, specs: Sequence[SandboxSpec], project: str, deadline_s: float | None, key: str | None
    ) -> AsyncGenerator[BatchItem, None]:
        """See `EdgeClient.create_many`."""
        if not 1 <= len(specs) <= self._config.max_batch:
            raise InvalidRequest(f"a batch has 1 to {self._config.max_batch} specs, this one has {len(specs)}")
        await learn(specs, project, self._backends)
        ids: Sequence[str | None] = [None] * len(specs)
        fresh = False
        if key is not None:
            batch, fresh = await self._open_batch(specs, project, key)
            ids = batch.ids
        ready: asyncio.Queue[BatchItem] = asyncio.Queue()
        self._tasks.spawn(self._feed(specs, project, deadline_s, ids, ready, fresh=fresh))
        for _ in specs:
            yield await ready.get()

    async def _feed(
        self,
        specs: Sequence[SandboxSpec],
        project: str,
        deadline_s: float | None,
        ids: Sequence[str | None],
        ready: asyncio.Queue[BatchItem],
        *,
        fresh: bool,
    ) -> None:
        def hand_out(index: int, future: asyncio.Future[Created]) -> None:
            if future.cancelled():
                return  # the edge is closing, and the reader with it
            error = future.exception()
            if error is None:
                ready.put_nowait(BatchItem(index=index, sandbox=future.result().sandbox))
            elif isinstance(error, DsecError):
                ready.put_nowait(BatchItem(index=index, error=error.body()))

        resolved: dict[int, Resolved] = {}  # many of a batch have one spec
        for index, (spec, sandbox_id) in enumerate(zip(specs, ids, strict=True)):
            try:
                known = resolved.get(id(spec)) or self._resolve(spec, project)
                resolved[id(spec)] = known
                future = self._request(spec, project, deadline_s, sandbox_id, fresh=fresh, resolved=known)
            except DsecError as error:
                ready.put_nowait(BatchItem(index=index, error=error.body()))
            else:
                future.add_done_callback(functools.partial(hand_out, index))
            if index % _BREATH == _BREATH - 1:
                await asyncio.sleep(0)
                resolved.clear()  # what a name means may have changed

    async def create_as(self, sandbox_id: str, spec: SandboxSpec, project: str) -> Created:
        """One that another node had, under the id that it has. Raises `Conflict` where this node has had it: there are
        a log and a record of it here."""
        await learn([spec], project, self._backends)
        if sandbox_id in self._lives.sandboxes or self._journal.get(sandbox_id) is not None:
            raise Conflict(f"this node has had sandbox {sandbox_id} before", remedy="Rebuild it on another node.")
        return await asyncio.shield(self._request(spec, project, None, sandbox_id, fresh=True))

    def clone(self, parent: Record, capture: str, deadline_s: float | None) -> asyncio.Future[Created]:
        """A new sandbox like `parent`, without its name and host name, that begins with captured files."""
        backend = self._backends[parent.backend]
        sandbox_id = self._new_id(backend)
        token = new_token(sandbox_id)
        record = Record(
            id=sandbox_id,
            project=parent.project,
            run=parent.run,
            backend=parent.backend,
            state=State.QUEUED,
            spec=replace(parent.spec, name=None, hostname=None),
            handle={},
            created_at=self._clock.now(),
            token=digest(token),
            network=parent.network,
            charged_to=self._charge(parent.project, parent.spec),
        )
        return self._lives.enter(record, backend, token, deadline_s, capture=capture)

    def _charge(self, project: str, spec: SandboxSpec) -> str:
        return self.charges.charge(account_of(project, spec.backend, spec.cpus, spec.memory_bytes))

    # --- one request ---

    def _request(
        self,
        spec: SandboxSpec,
        project: str,
        deadline_s: float | None,
        sandbox_id: str | None,
        *,
        fresh: bool = False,
        resolved: Resolved | None = None,
    ) -> asyncio.Future[Created]:
        """The sandbox for this request, made or found, in one synchronous step. The future may be shared: never cancel
        it.
        `sandbox_id`: the one that an idempotency key reserved; `fresh`: just now, for this request. `resolved`: what
        the spec means, where that is known."""
        backend, spec = resolved or self._resolve(spec, project)
        if sandbox_id is not None:
            found = self._by_id(sandbox_id, backend, fresh=fresh)
            if found is not None:
                return found
        if spec.name is not None:
            named = self._lives.names.get((project, spec.run or "", spec.name))
            if named is not None:
                return self._share_named(named, spec, project, deadline_s, sandbox_id)
        again = sandbox_id is not None and not fresh
        if sandbox_id is None:
            sandbox_id = self._new_id(backend)
        token = new_token(sandbox_id)
        record = Record(
            id=sandbox_id,
            project=project,
            run=spec.run or "",
            name=spec.name,
            backend=spec.backend,
            state=State.QUEUED,
            spec=spec,
            handle={},
            created_at=self._clock.now(),
            token=digest(token),
            network=spec.network,
            charged_to=self._charge(project, spec),
        )
        return self._lives.enter(record, backend, token, deadline_s, again=again)

    def _resolve(self, spec: SandboxSpec, project: str) -> Resolved:
        check_features(spec, self._config.features)
        found = resolve(spec, project, self._backends)
        self._lives.networks.check(found[1].network)
        return found

    def _by_id(self, sandbox_id: str, backend: Backend, *, fresh: bool) -> asyncio.Future[Created] | None:
        sandbox = self._lives.sandboxes.get(sandbox_id)
        if sandbox is not None:
            return _share(sandbox)
        if fresh:
            return None
        record = self._journal.get(sandbox_id)
        if record is not None:
            return _resolved(Created(info_of(record), existed=True))
        parts = decode_id(sandbox_id, self._state.key)
        if parts is None or parts.epoch != backend.epoch & EPOCH_MASK:
            raise SandboxLost(
                f"sandbox {sandbox_id} was reserved by this key in an earlier life of the node and never made",
                remedy="Use another key.",
            )
        return None

    def _share_named(
        self, named: Sandbox, spec: SandboxSpec, project: str, deadline_s: float | None, sandbox_id: str | None
    ) -> asyncio.Future[Created]:
        if named.state in (State.ENDING, State.ENDED):
            # The name is free as soon as nothing is left of the old one.
            gone = self._lives.ended(named)

            async def again() -> Created:
                await asyncio.shield(gone)
                return await asyncio.shield(self._request(spec, project, deadline_s, sandbox_id))

            later = self._tasks.spawn(again())
            quiet(later)
            return later
        fields = differing_fields(named.record.spec, spec)
        if edge_of(named.id) != self._state.edge:  # it came from another node, perhaps on top of a snapshot
            fields = [field for field in fields if field != "layers"]
        if fields:
            raise Conflict(
                f"{spec.name!r} is the name of the live sandbox {named.id}, whose spec differs in: {', '.join(fields)}",
                remedy="Use the same spec, another name, or delete that sandbox first.",
                fields=fields,
                sandbox=named.id,
            )
        return _share(named)

    def _new_id(self, backend: Backend) -> str:
        parts = SandboxId(self._state.edge, backend.epoch & EPOCH_MASK, self._state.take_sequence())
        return encode_id(parts, self._state.key)

    # --- keys ---

    def _failed(self, sandbox_id: str) -> bool:
        """Its creation failed, or an earlier edge went down over it: the key named no sandbox yet."""
        sandbox = self._lives.sandboxes.get(sandbox_id)
        record = self._journal.get(sandbox_id) if sandbox is None else sandbox.record
        return record is not None and record.cause is Cause.CREATE_FAILED

    async def _open_batch(self, specs: Sequence[SandboxSpec], project: str, key: str) -> tuple[BatchRecord, bool]:
        """The batch of this key: on record before anything of it exists. Whoever comes again with the key gets the same
        ids, but new ones in place of those that could not be made. Also: whether the batch was made for this request,
        so that nothing of it can exist yet."""
        if not 1 <= len(key) <= _MAX_KEY:
            raise InvalidRequest(f"an idempotency key has 1 to {_MAX_KEY} characters")
        wanted = _digest(specs)
        opening = self._opening.get((project, key))
        found: BatchRecord | None = None
        if opening is not None:
            batch, durable = opening
        else:
            found = self._journal.batch(project, key)
            if found is not None:
                _same(found, wanted, key)
            batch = BatchRecord(
                project=project,
                key=key,
                digest=wanted,
                ids=[
                    self._new_id(backend_for_ids(spec, self._backends))
                    if found is None or self._failed(found.ids[index])
                    else found.ids[index]
                    for index, spec in enumerate(specs)
                ],
                created_at=self._clock.now() if found is None else found.created_at,
            )
            if batch == found:
                return batch, False
            durable = self._journal.put_batch(batch) if found is None else self._journal.replace_batch(batch)
            quiet(durable)
            self._opening[project, key] = (batch, durable)
            durable.add_done_callback(lambda _: self._opening.pop((project, key), None))
        _same(batch, wanted, key)
        await asyncio.shield(durable)
        return batch, opening is None and found is None


def backend_for_ids(spec: SandboxSpec, backends: Mapping[str, Backend]) -> Backend:
    """The backend whose epoch goes into the id; where there is none the item fails later, with its own error."""
    return backends.get(spec.backend) or next(iter(backends.values()))


def _digest(specs: Sequence[SandboxSpec]) -> str:
    try:
        return hashlib.sha256(_encode(specs)).hexdigest()
    except UnicodeEncodeError:
        raise InvalidRequest("a spec holds text that isn't valid Unicode") from None


def _same(batch: BatchRecord, wanted: str, key: str) -> None:
    if batch.digest != wanted:
        raise Conflict(
            f"the key {key!r} was used for a different request", remedy="A key goes with one request; use a new one."
        )


def _share(sandbox: Sandbox) -> asyncio.Future[Created]:
    """The outcome of someone else's creation, with its token where that is still under way."""
    if sandbox.ready is None:
        return _resolved(Created(sandbox.info(), existed=True))
    shared: asyncio.Future[Created] = asyncio.get_running_loop().create_future()
    quiet(shared)

    def copy(ready: asyncio.Future[Created]) -> None:
        if shared.done():
            return
        error = ready.exception()
        if error is None:
            shared.set_result(Created(ready.result().sandbox, existed=True))
        else:
            shared.set_exception(error)

    sandbox.ready.add_done_callback(copy)
    return shared


def _resolved(created: Created) -> asyncio.Future[Created]:
    future: asyncio.Future[Created] = asyncio.get_running_loop().create_future()
    future.set_result(created)
    return future
