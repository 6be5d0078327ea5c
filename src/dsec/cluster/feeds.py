"""The feed of a bucket: what is in it, then what changes, as a server pushes it.

Invariant: nothing is left out without a word. A server counts what it pushes; where a number is missing, the feed ends
with `Gap`, and whoever needs it opens another. There are no heartbeats and no timers: `bus.py` looks now and then
whether there is anything that should have come (an idle server and an idle client cost by how often they wake up).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.kv import KV_DEL, KV_OP, KV_PURGE

INACTIVE_S = 300.0
"""A server forgets a feed that nobody has listened to for so long."""


class Gap(TimeoutError):
    """Something of a feed is missing."""


class Entry(Struct, frozen=True):
    """A record of the bucket."""

    key: str
    value: bytes | None
    """None: it is gone."""
    revision: int


class Feed:
    """Use `feed`."""

    def __init__(self, subscription: Subscription, before: int, complete: bool) -> None:
        self.complete = complete
        """Whether all that was there at first has come."""
        self._subscription = subscription
        self._before = before
        """Letters of a subject before the key."""
        self._count = 0

    async def next(self, timeout_s: float) -> Entry:
        """Raises `Gap`, and NATS's timeout where nothing comes."""
        message = await self._subscription.next_msg(timeout_s)
        place = message.metadata
        self._count += 1
        if place.sequence.consumer != self._count:
            raise Gap("some of what was written hasn't come")
        self.complete = self.complete or not place.num_pending
        gone = (message.headers or {}).get(KV_OP) in (KV_DEL, KV_PURGE)
        return Entry(message.subject[self._before :], None if gone else message.data, place.sequence.stream)


@asynccontextmanager
async def feed(client: Client, streams: JetStreamContext, bucket: str) -> AsyncIterator[Feed]:
    """Of this bucket, from what is there now on. Raises `NatsError`, TimeoutError."""
    stream, prefix = f"KV_{bucket}", f"$KV.{bucket}."
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    try:
        made = await streams.add_consumer(
            stream,
            ConsumerConfig(
                ack_policy=AckPolicy.NONE,
                deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                deliver_subject=inbox,
                filter_subject=f"{prefix}>",
                inactive_threshold=INACTIVE_S,
                max_deliver=1,
                num_replicas=1,
                mem_storage=True,
            ),
        )
        nothing = not made.num_pending and (made.delivered is None or not made.delivered.consumer_seq)
        yield Feed(subscription, len(prefix), nothing)
    finally:
        with contextlib.suppress(NatsError, TimeoutError):
            await subscription.unsubscribe()
