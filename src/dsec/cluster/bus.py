"""NATS, as much of it as the cluster uses: publish, ask, subscribe, and key-value buckets with compare-and-set.

Owns the connection, which is made anew for as long as it takes. Everything that isn't an answer is `Unavailable`.
Values are msgspec structs as JSON. Invariant: a `Bucket`'s change is never repeated here; whoever gets no answer looks
again and finds out by the revision.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    Header,
    KeyValueConfig,
    StorageType,
    StreamConfig,
)
from nats.js.errors import (
    APIError,
    BucketNotFoundError,
    KeyDeletedError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NotFoundError,
)
from nats.js.kv import KV_DEL, KV_OP, KeyValue

from dsec.cluster.credentials import Credentials
from dsec.cluster.feeds import Feed, feed
from dsec.errors import InvalidRequest, Unavailable
from dsec.sockets import CLUSTER_SILENCE_S, keep_alive

T = TypeVar("T")
ASK_S = 5.0
PATIENCE_S = 30.0
"""For what a server has to have before anything works."""
MOVE_S = 10.0
"""Between two looks for a better server."""
_NO_CLUSTER = 10074
"""The server's word for: replicas, but no cluster."""
HOPS = 4
HOP_S = 5.0
PENDING_BYTES = 8 << 20
PING_S = 5
EDGE_PING_S = 20
"""An edge finds out by itself whether it is heard (`member.py`)."""
READ_S = 15.0
LOOK_S = 2.0
"""Who follows a bucket and hears nothing for so long looks whether there is anything to be heard."""
PULSE = "pulse"
"""The key of a record that is written over and over, so that who follows knows how far it has come; nobody else hears
of it."""
_WRONG_SEQUENCE = (10071, 10164)
"""What the server says where a revision isn't the last any more."""
READ_STEP = 256
"""Messages of a stream that are asked for at once."""
log = logging.getLogger("dsec.cluster")
_encode = msgspec.json.Encoder().encode


class _State(Struct):
    last_seq: int


class _Looked(Struct):
    """What is read of a server's word about a stream: the client's own reading of all of it costs many times that."""

    state: _State


_look = msgspec.json.Decoder(_Looked).decode


class Bus:
    """A connection to the cluster's servers."""

    def __init__(self, client: Client, urls: list[str]) -> None:
        """Use `open_bus`."""
        self.urls = urls
        self.client = client
        self._stream: JetStreamContext = client.jetstream(timeout=ASK_S)
        self.reconnected: Callable[[], None] = lambda: None
        self._moved_at = time.monotonic()

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    async def elsewhere(self) -> None:
        """The server that we have may have lost the others: go to another one. Not too often."""
        if not self.connected or time.monotonic() - self._moved_at < MOVE_S:
            return
        self._moved_at = time.monotonic()
        log.warning("bus: no majority answers through this server, trying another")
        before = self.client.connected_url
        for _ in range(HOPS):  # the client chooses by chance, the same one too
            with contextlib.suppress(NatsError, OSError):
                await self.client.force_reconnect()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOP_S):
                    while not self.connected:  # noqa: ASYNC110 (nothing tells)
                        await asyncio.sleep(0.05)
            if not self.connected or self.client.connected_url != before:
                return

    async def publish(self, subject: str, value: object) -> None:
        """To whoever listens, or nobody. Dropped where the servers can't be reached: what is published is a state that
        is published again."""
        if self.connected:
            with contextlib.suppress(NatsError):
                await self.client.publish(subject, _encode(value))

    async def ask(self, subject: str, value: object, timeout_s: float = ASK_S) -> bytes:
        """The answer of one who listens. Raises `Unavailable`."""
        try:
            answer: Msg = await self.client.request(subject, _encode(value), timeout=timeout_s)
        except (NatsError, TimeoutError, OSError) as error:
            raise Unavailable(f"nobody answered at {subject}: {error or type(error).__name__}") from error
        return answer.data

    async def append(self, subject: str, data: bytes) -> None:
        """Into the stream that takes this subject; returns when a majority of the servers has it. Raises `Unavailable`:
        it may be there all the same."""
        try:
            await self._stream.publish(subject, data, timeout=ASK_S)
        except (NatsError, TimeoutError, OSError) as error:
            if isinstance(error, TimeoutError):
                await self.elsewhere()
            raise Unavailable(f"nothing took {subject}: {error or type(error).__name__}") from error

    async def stream(self, name: str, subjects: str, *, replicas: int, keep_s: float, most_bytes: int) -> None:
        """A stream, made where it isn't there; a full one takes nothing more, until it is given more room. Raises
        `Unavailable`."""
        config = StreamConfig(
            name=name,
            subjects=[subjects],
            num_replicas=replicas,
            max_age=keep_s,
            max_bytes=most_bytes,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
        )

        async def look_or_make() -> object:
            try:
                found = await self._stream.stream_info(name)
            except NotFoundError:
                return await self._stream.add_stream(config)
            if found.config.max_bytes == most_bytes:
                return found
            return await self._stream.update_stream(config)

        await _patiently(name, look_or_make)

    async def read(self, stream: str, subject: str) -> list[bytes]:
        """All that a stream has of a subject now, in its order. Raises `Unavailable`."""
        return await _patiently(stream, lambda: self._read(stream, subject), READ_S)

    async def _read(self, stream: str, subject: str) -> list[bytes]:
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            deliver_policy=DeliverPolicy.ALL,
            filter_subject=subject,
            inactive_threshold=30.0,
            num_replicas=1,
            mem_storage=True,
        )
        found: list[bytes] = []
        info = await self._stream.add_consumer(stream, config)
        left = int(info.num_pending or 0)
        reading = await self._stream.pull_subscribe_bind(info.name, stream=stream)
        try:
            while left > 0:
                some = await reading.fetch(min(left, READ_STEP), timeout=ASK_S)
                found += [message.data for message in some]
                left -= len(some)
        finally:
            with contextlib.suppress(NatsError, TimeoutError):
                await reading.unsubscribe()
                await self._stream.delete_consumer(stream, info.name)
        return found

    async def has(self, stream: str, subject: str) -> bool:
        """Whether a stream has anything of a subject, which may be a pattern. Raises `Unavailable`."""
        try:
            info = await self._stream.stream_info(stream, subjects_filter=subject)
        except (NatsError, TimeoutError, OSError) as error:
            raise _unavailable(error) from error
        return bool(info.state.subjects)

    async def listen(self, subject: str, heard: Callable[[Msg], Awaitable[None]], *, group: str = "") -> None:
        """Call `heard` for what comes; of a `group` one hears each. It must not raise."""
        await self.client.subscribe(subject, queue=group, cb=heard)

    async def bucket(self, name: str, kind: type[T], *, replicas: int, ttl_s: float | None = None) -> Bucket[T]:
        """A key-value bucket, made where it isn't there. Raises `Unavailable`."""
        config = KeyValueConfig(bucket=name, history=1, ttl=ttl_s, replicas=replicas, storage=StorageType.FILE)

        async def open_or_make() -> KeyValue:
            try:
                return await self._stream.key_value(name)
            except BucketNotFoundError:
                return await self._stream.create_key_value(config)

        return Bucket(await _patiently(name, open_or_make), kind, self._stream, name, self)

    async def log(
        self, name: str, subject: str, *, replicas: int, kept_s: float, kept_bytes: int, kept_each: int
    ) -> Log:
        """A stream that is only added to, made where it isn't there; the oldest goes first. `kept_each`: most entries
        of one topic. Raises `Unavailable`."""
        config = StreamConfig(
            name=name,
            subjects=[subject, f"{subject}.>"],
            max_age=kept_s,
            max_bytes=kept_bytes,
            max_msgs_per_subject=kept_each,
            num_replicas=replicas,
            storage=StorageType.FILE,
            allow_direct=True,
        )

        async def look_or_make() -> object:
            try:
                found = await self._stream.stream_info(name)
            except NotFoundError:
                return await self._stream.add_stream(config)
            if found.config.max_msgs_per_subject == kept_each:
                return found
            return await self._stream.update_stream(config)

        await _patiently(name, look_or_make)
        return Log(self._stream, name, subject)

    async def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(NatsError, TimeoutError):
            await self.client.close()


class Log:
    """A stream of entries."""

    def __init__(self, stream: JetStreamContext, name: str, subject: str) -> None:
        self._stream = stream
        self._name = name
        self._subject = subject

    async def append(self, value: object, topic: str) -> int:
        """Its number, when a majority of the servers has it. Raises `Unavailable`: it may be there."""
        try:
            return int((await self._stream.publish(f"{self._subject}.{topic}", _encode(value))).seq)
        except (NatsError, TimeoutError) as error:
            raise _unavailable(error) from error

    async def read(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Entries after a number, oldest first; fewer than `limit` at the end. Raises `Unavailable`."""
        found: list[tuple[int, bytes]] = []
        try:
            while len(found) < limit:
                message = await self._stream.get_msg(self._name, seq=after + 1, next=True, subject=">")
                after = int(message.seq or 0)
                found.append((after, message.data or b""))
        except NotFoundError:
            pass
        except (NatsError, TimeoutError) as error:
            raise _unavailable(error) from error
        return found


class Bucket(Generic[T]):
    """Records of one kind by key."""

    def __init__(self, store: KeyValue, kind: type[T], streams: JetStreamContext, name: str, bus: Bus) -> None:
        """Use `Bus.bucket`."""
        self.heard = 0
        """The last revision that `follow` has come to."""
        self._store = store
        self._streams = streams
        self._name = name
        self._bus = bus
        self._decode = msgspec.json.Decoder(kind).decode

    async def get(self, key: str) -> tuple[int, T | None]:
        """Its revision and value; None where there is none (the revision then is what `put_if` takes). A moment old at
        worst. Raises `Unavailable`."""
        try:
            entry = await self._store.get(key)
        except KeyDeletedError as error:
            return int(error.entry.revision or 0), None
        except KeyNotFoundError:
            return 0, None
        except (NatsError, TimeoutError) as error:
            raise _unavailable(error) from error
        return int(entry.revision or 0), self._decode(entry.value or b"")

    async def put_if(self, key: str, revision: int, value: T) -> int | None:
        """Replace it if it is still of this revision (0: if it was never there); its new revision, or None where it
        isn't. Raises `Unavailable`: it may have happened."""
        try:
            return int(await self._store.update(key, _encode(value), last=revision))
        except KeyWrongLastSequenceError:
            return None
        except (NatsError, TimeoutError) as error:
            raise _unavailable(error) from error

    async def put(self, key: str, value: T) -> int:
        """Make or replace it, whatever is there. Raises `Unavailable`."""
        try:
            return int(await self._store.put(key, _encode(value)))
        except (NatsError, TimeoutError) as error:
            raise _unavailable(error) from error

    async def delete(self, key: str) -> None:
        """Idempotent. Raises `Unavailable`."""
        try:
            await self._store.delete(key)
        except (NatsError, TimeoutError) as error:
            raise _unavailable(error) from error

    async def delete_if(self, key: str, revision: int) -> int | None:
        """Delete it if it is still of this revision; the revision of what says so to those who follow, or None where it
        isn't. Raises `Unavailable`: it may have happened."""
        headers = {KV_OP: KV_DEL, Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
        try:
            return int((await self._streams.publish(f"$KV.{self._name}.{key}", headers=headers)).seq)
        except APIError as error:
            if error.err_code in _WRONG_SEQUENCE:
                return None
            raise _unavailable(error) from error
        except (NatsError, TimeoutError) as error:
            raise _unavailable(error) from error

    async def clear(self, key: str, revision: int) -> None:
        """Leave nothing of a key up to a revision, without a word to those who follow. Raises `Unavailable`."""
        try:
            await self._streams.purge_stream(f"KV_{self._name}", seq=revision + 1, subject=f"$KV.{self._name}.{key}")
        except (NatsError, TimeoutError) as error:
            raise _unavailable(error) from error

    async def follow(self, changed: Callable[[str, T | None, int], None], caught_up: Callable[[], None]) -> None:
        """Call `changed` (key, value or None where it is gone, revision) for all that is there, then `caught_up`, then
        `changed` for what changes. Ends when it is cancelled; after a gap all that is there comes again."""
        while True:
            try:
                there = await self._last()
                async with feed(self._bus.client, self._streams, self._name) as entries:
                    await self._follow(entries, there, changed, caught_up)
            except (NatsError, TimeoutError, OSError, Unavailable) as error:
                log.warning("following a bucket: %s", error or type(error).__name__)
            await asyncio.sleep(0.5)

    async def _follow(
        self, entries: Feed, there: int, changed: Callable[[str, T | None, int], None], caught_up: Callable[[], None]
    ) -> None:
        """Raises TimeoutError where what is written comes here no more: the server that kept our place in the bucket is
        gone, which nobody tells."""
        late = told = False
        while True:
            if entries.complete and not told:
                told = True
                self.heard = max(self.heard, there)  # what of it is gone again is never told
                caught_up()
            try:
                entry = await entries.next(LOOK_S)
            except NatsTimeoutError:
                before = late
                with contextlib.suppress(Unavailable):
                    late = await self._last() > max(self.heard, there)
                if before and late:
                    raise TimeoutError("what was written a while ago hasn't come") from None
                continue
            late = False
            if entry.key != PULSE:
                changed(entry.key, None if entry.value is None else self._decode(entry.value), entry.revision)
            self.heard = max(self.heard, entry.revision)

    async def _last(self) -> int:
        """The last revision that the servers have. Raises `Unavailable`."""
        try:
            return _look(await self._bus.ask(f"$JS.API.STREAM.INFO.KV_{self._name}", None)).state.last_seq
        except msgspec.MsgspecError as error:  # it says why not
            raise _unavailable(error) from error


async def open_bus(urls: list[str], credentials: Credentials) -> Bus:
    """Connect; waits for the first server for a few seconds, for later ones forever. Raises `Unavailable`."""
    tls = ssl.create_default_context(cafile=credentials.ca_file or None) if urls[0].startswith("tls://") else None

    async def on_error(error: Exception) -> None:
        log.warning("bus: %s", error or type(error).__name__)

    made: list[Bus] = []

    async def on_reconnect() -> None:
        log.info("bus: connected again")
        _keep_alive(client)
        for bus in made:
            bus.reconnected()

    client = Client()
    try:
        await client.connect(
            servers=urls,
            name=credentials.user,
            nkeys_seed_str=credentials.seed,
            inbox_prefix=f"_INBOX.{credentials.user}",
            error_cb=on_error,
            reconnected_cb=on_reconnect,
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            connect_timeout=3,
            ping_interval=PING_S if credentials.edge is None else EDGE_PING_S,
            max_outstanding_pings=2,
            pending_size=PENDING_BYTES,
            tls=tls,
        )
    except (NatsError, OSError, TimeoutError) as error:
        await client.close()
        raise Unavailable(
            f"no server of the cluster can be reached at {', '.join(urls)}: {error or type(error).__name__}",
            remedy="Look whether nats-server runs, and whether its configuration has these credentials.",
        ) from error
    _keep_alive(client)
    bus = Bus(client, urls)
    made.append(bus)
    return bus


def _keep_alive(client: Client) -> None:
    """Where a server vanished the client waits until what is on its way there is taken, before it goes to another one:
    as long as the kernel tries."""
    writer = getattr(client._transport, "_io_writer", None)  # of TCP, and of TLS over it
    if writer is not None:
        keep_alive(writer.get_extra_info("socket"), CLUSTER_SILENCE_S)


async def _patiently(name: str, make: Callable[[], Awaitable[T]], for_s: float = PATIENCE_S) -> T:
    """Several times: the servers may just be choosing who leads, or somebody else be making the same. Raises
    `Unavailable`; `InvalidRequest` where more copies are asked for than the only server can keep."""
    deadline = time.monotonic() + for_s
    while True:
        try:
            return await make()
        except (NatsError, TimeoutError, OSError) as error:
            if isinstance(error, APIError) and error.err_code == _NO_CLUSTER:
                raise InvalidRequest(
                    "the NATS server that was joined is alone, and keeps no second copy of the cluster's records",
                    remedy="Start the apiserver with `--replicas 1`, or that server as one of three.",
                ) from None
            if time.monotonic() > deadline:
                raise Unavailable(f"{name!r} isn't there: {error or type(error).__name__}") from error
        await asyncio.sleep(0.5)


def _unavailable(error: Exception) -> Unavailable:
    return Unavailable(f"the cluster's store doesn't answer: {error or type(error).__name__}")
