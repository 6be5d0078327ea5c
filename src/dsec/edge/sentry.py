"""The thread that reads the tripwires' events of all sandboxes of a node; it runs while one has any.

Invariants: the event loop never waits for it, and it never holds a sandbox up. Nobody waits for more than `PAUSE_S` to
be noticed, except writers of a sandbox that does nothing but write: beyond `BUDGET` wide events a second the rest stays
in the kernel's queue, which says when it overflows.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable

from dsec.edge.post import Post
from dsec.edge.tasks import log
from dsec.kernel.fanotify import Group

PAUSE_S = 0.005
"""Between two looks at what was written: meanwhile the kernel merges what is alike."""
BUDGET = 5000


class _Rest:
    """How much of its second a post has used."""

    __slots__ = ("since", "used")

    def __init__(self) -> None:
        self.since = 0.0
        self.used = 0

    def spent(self, now: float) -> bool:
        if now - self.since >= 1.0:
            self.since, self.used = now, 0
        return self.used >= BUDGET


class Sentry:
    """Made and used by the event loop."""

    def __init__(self) -> None:
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._orders: list[Callable[[], None]] = []
        self._exact: dict[int, tuple[Post, Group]] = {}
        self._wide: dict[int, tuple[Post, Group, _Rest]] = {}
        self._starting: set[Post] = set()
        """With starts that are to be looked at again."""
        self._poll: select.epoll | None = None
        self._slow: select.epoll | None = None
        self._over = False

    def add(self, post: Post) -> None:
        """Watch for its events from now on."""
        if self._thread is None:
            self._start()
        self._order(lambda: self._add(post))

    def remove(self, post: Post) -> None:
        """Take in what is waiting, then close it."""
        self._order(lambda: self._remove(post))

    def close(self) -> None:
        """Close all posts and end the thread. Idempotent."""
        if self._thread is None:
            return

        def stop() -> None:
            self._over = True

        self._order(stop)
        self._thread.join()
        self._thread = None

    def _start(self) -> None:
        self._over = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll, self._slow = select.epoll(), select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="dsec-sentry", daemon=True)
        self._thread.start()

    def _order(self, order: Callable[[], None]) -> None:
        if self._thread is None:
            return
        self._orders.append(order)
        os.eventfd_write(self._wake, 1)

    # --- in the thread ---

    def _run(self) -> None:
        poll, slow = self._poll, self._slow
        assert poll is not None and slow is not None  # noqa: PT018
        while not self._over:
            for fd, _ in poll.poll(PAUSE_S if self._wide or self._starting else None):
                if fd == self._wake:
                    os.eventfd_read(fd)
                    self._obey()
                elif (found := self._exact.get(fd)) is not None:
                    self._drain(*found)
            now = time.monotonic()
            for fd, _ in slow.poll(0) if self._wide else ():
                if (entry := self._wide.get(fd)) is None or entry[2].spent(now):
                    continue
                post, group, rest = entry
                self._drain(post, post.exact)  # who a process is, is known before what it did
                rest.used += self._drain(post, group)
            for post in list(self._starting):
                post.look_again(now)
                if not post.starting:
                    self._starting.discard(post)
        for post, _ in list(self._exact.values()):
            post.close()
        self._exact.clear()
        self._wide.clear()
        self._starting.clear()
        poll.close()
        slow.close()
        os.close(self._wake)

    def _obey(self) -> None:
        orders, self._orders = self._orders, []
        for order in orders:
            order()

    def _add(self, post: Post) -> None:
        assert self._poll is not None and self._slow is not None  # noqa: PT018
        for group in (post.exact, post.names):
            if group is not None:
                self._exact[group.fd] = (post, group)
                self._poll.register(group.fd, select.EPOLLIN)
        if post.wide is not None:
            self._wide[post.wide.fd] = (post, post.wide, _Rest())
            self._slow.register(post.wide.fd, select.EPOLLIN)

    def _remove(self, post: Post) -> None:
        for group in (post.exact, post.names, post.wide):
            if group is not None and group.fd >= 0:
                self._drain(post, group)
                self._exact.pop(group.fd, None)
                self._wide.pop(group.fd, None)
        post.look_again(math.inf)
        self._starting.discard(post)
        post.close()

    def _drain(self, post: Post, group: Group) -> int:
        try:
            return post.drain(group)
        except OSError as error:  # its sandbox goes away under its hands
            log.debug("a tripwire's events could not be read: %s", error)
            return 0
        finally:
            if post.starting:
                self._starting.add(post)
