"""Trajectories on disk: `trajectory/` in the state directory, apart from the records, because they grow.

```
trajectory/boot                     which boot of the machine wrote last
trajectory/sync.N                   lines of all sandboxes, `ID OFFSET LINE`: what their own files may lack
trajectory/reserve                  space that is given up for results once the disk is full
trajectory/BEGIN/ID/log             one sandbox's entries, a JSON line each (`dsec.spec.trajectory`)
trajectory/BEGIN/ID/DIGEST          outputs and contents that are too long for an entry, by SHA-256
```

BEGIN is what ids of sandboxes that were made near each other have in common (4,096 of them), so that their files are
near each other on disk too.

Invariants: an entry is in the page cache, by one write(2) to the sync file, when `append` returns, so that it survives
every process; it is on disk within `SYNC_S`, or when `synced` says so, by one fdatasync for all sandboxes. The
sandbox's own file gets its lines some at a time: when its memory for them is full, at its end, before a sync file goes.
A sync file goes once all that it names has been written and synced by itself. A write that fails leaves nothing behind.
After a crash the sync files fill in what the others lack: a process that was killed has left only whole logs with a
short end, which is filled in by offset; after a power loss every line is looked at, and a torn tail is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dsec.errors import Unavailable
from dsec.journal.trajectory_files import (
    Chain,
    finish,
    journal_lines,
    load,
    older,
    open_to_write,
    refused,
    remove,
    remove_file,
    sync_files,
    sync_paths,
    write_all,
    written,
)
from dsec.spec.trajectory import Broken, EntryType, check, parse, root_of, seal

SYNC_S = 0.05
SPARE_S = 0.02
"""What a sync is begun earlier than that: it takes its time."""
ROTATE_BYTES = 64 << 20
RESERVE_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
SYNC_STEP = 64
"""Files that are synced in one go of the thread."""
HELD_BYTES = 32 << 10
"""Of one sandbox's lines, that its own file doesn't have yet."""
HELD_MOST = 8 << 20
"""The same of all sandboxes."""
_HELD_STEP = 2
"""Own files that one `append` may write for others, where all hold too much."""

_BEGIN = 12

log = logging.getLogger("dsec.edge")


class TrajectoryStore:
    """For the event loop. Every call is short but `open`; `close` last."""

    def __init__(self, root: Path, *, boot: str | None = None, sync_s: float = SYNC_S) -> None:
        """Open or make it; what a power loss took is filled in. `boot`: names this boot of the machine (None: asks the
        kernel). Raises `Unavailable` where the disk refuses."""
        self._root = str(root)
        self._sync_s = sync_s
        self._chains: dict[str, Chain] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._holding: dict[str, Chain] = {}
        """Those with lines that their own file lacks, who has them for longest first."""
        self._held = 0
        """Bytes of those lines."""
        self._dirty: set[str] = set()
        """Sandboxes with a line in the current sync file."""
        self._blobs: list[str] = []
        """Written since the last sync."""
        self._timer: asyncio.TimerHandle | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._retiring: asyncio.Task[None] | None = None
        self._unsynced = False
        self._closed = False
        self.sync_failed = False
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            boot = boot or Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            former = self._recover(root, boot)
            self._number = max((int(path.suffix[1:]) for path in root.glob("sync.*")), default=0) + 1
            self._fd, self._size = self._begin(), 0
            self._reserve()
        except OSError as error:
            raise refused(error) from error
        if former:
            self._retiring = asyncio.get_running_loop().create_task(self._retire_former(former))

    # --- writing ---

    def chain(self, sandbox_id: str) -> Chain | None:
        """Where a sandbox's log stands, read from disk where this edge hasn't yet; None: it has none."""
        found = self._chains.get(sandbox_id)
        if found is None:
            place = self._place(sandbox_id)
            if not os.path.exists(f"{place}/log"):  # noqa: PTH110
                return None
            found = load(place, sandbox_id)
            if found.last != EntryType.END:
                self._chains[sandbox_id] = found
        return found

    def begin(self, sandbox_id: str, *, again: bool = False) -> None:
        """A new sandbox's log. `again`: its making may have been tried before (an idempotency key reserved the id);
        then what is there goes on."""
        found = self.chain(sandbox_id) if again else None
        self._chains[sandbox_id] = found or Chain(self._place(sandbox_id), root_of(sandbox_id))

    def append(self, sandbox_id: str, time: float, kind: str, data: dict[str, Any], *, last_room: bool = False) -> int:
        """Add an entry; its `seq`. `last_room`: for what has happened already, the reserve may be used for it. Raises
        `Unavailable`, with nothing written, and `UnicodeEncodeError`."""
        chain = self._chains.get(sandbox_id) or self.chain(sandbox_id)
        if chain is None:
            raise Unavailable(f"sandbox {sandbox_id} has no trajectory to write to")
        line, digest = seal(chain.seq + 1, time, kind, data, chain.hash)
        copy = b"%s %d %s" % (sandbox_id.encode(), chain.size, line)
        try:
            self._size = write_all(self._fd, copy, self._size)
        except OSError as error:
            if not last_room or error.errno not in _FULL or not self._give_up_reserve():
                raise refused(error) from error
            try:
                self._size = write_all(self._fd, copy, self._size)
            except OSError as again:
                raise refused(again) from again
        chain.seq += 1
        chain.hash = digest
        chain.size += len(line)
        chain.last = kind
        self._dirty.add(sandbox_id)
        self._hold(sandbox_id, chain, line)
        self._soon()
        return chain.seq

    def check_room(self) -> None:
        """Before something is done whose entry comes after it. Raises `Unavailable` where that may find no room."""
        if not self._reserved and not self._reserve():
            raise refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def put_blob(self, sandbox_id: str, data: bytes) -> str:
        """Keep bytes beside a log; their digest. Raises `Unavailable`."""
        digest = hashlib.sha256(data).hexdigest()
        path = f"{self._place(sandbox_id)}/{digest}"
        try:
            fd = open_to_write(path, os.O_EXCL)
        except FileExistsError:
            return digest
        except OSError as error:
            raise refused(error) from error
        try:
            write_all(fd, data, 0)
        except OSError as error:
            os.unlink(path)  # noqa: PTH108
            raise refused(error) from error
        finally:
            os.close(fd)
        self._blobs.append(path)
        return digest

    def forget(self, sandbox_id: str) -> None:
        """It has ended: keep nothing of it in memory, unless the disk has no room for it."""
        chain = self._chains.get(sandbox_id)
        if chain is not None and self._let_go(sandbox_id, chain):
            del self._chains[sandbox_id]

    def _hold(self, sandbox_id: str, chain: Chain, line: bytes) -> None:
        chain.held.append(line)
        self._held += len(line)
        self._holding.setdefault(sandbox_id, chain)
        if chain.size - chain.written > HELD_BYTES:
            self._let_go(sandbox_id, chain)
        if self._held > HELD_MOST:
            for other in list(islice(self._holding, _HELD_STEP)):
                self._let_go(other, self._holding[other])

    def _let_go(self, sandbox_id: str, chain: Chain) -> bool:
        """Write to its own file what that lacks. False where it can't be: the lines stay here and in the sync file."""
        if chain.held:
            try:
                chain.write_held()
            except OSError as error:
                log.warning("the trajectory of sandbox %s stays in the sync file: %s", sandbox_id, error)
                return False
            self._drop_held(sandbox_id, chain)
        return True

    def _drop_held(self, sandbox_id: str, chain: Chain) -> None:
        if self._holding.pop(sandbox_id, None) is not None:
            self._held -= sum(map(len, chain.held))
            chain.held = []

    # --- reading ---

    def lines(self, sandbox_id: str, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """Lines with where they end, from `offset` (a line's begin) on, those that are there now, without a torn tail.
        Raises `Unavailable`."""
        chain = self.chain(sandbox_id)
        if chain is None:
            return
        at, written, held = offset, chain.written, list(chain.held)
        if at < written:
            try:
                log_file = open(f"{chain.place}/log", "rb")  # noqa: SIM115
            except OSError as error:
                raise Unavailable(f"the trajectory log can't be read: {error.strerror}", log="trajectory") from error
            with log_file as file:
                file.seek(at)
                while at < written and (line := file.readline()):
                    at += len(line)
                    yield at, line
        at = written
        for line in held:
            at += len(line)
            if at > offset:
                yield at, line

    def blob(self, sandbox_id: str, digest: str) -> bytes | None:
        """Bytes that were kept; None where they aren't, or aren't what they were."""
        try:
            data = Path(self._place(sandbox_id), digest).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def recent(self, since: float) -> list[str]:
        """Sandboxes whose logs were written after a time (seconds since the epoch)."""
        return [place.name for place, at in written(self._root) if at >= since]

    # --- syncing ---

    def synced(self) -> asyncio.Future[None]:
        """Resolves when all that was written so far is on disk; fails with `Unavailable`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self._start_sync()
        return future

    def _soon(self) -> None:
        self._unsynced = True
        if self._timer is None and self._syncing is None:
            self._timer = asyncio.get_running_loop().call_later(self._sync_s - SPARE_S, self._start_sync)

    def _start_sync(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._syncing is None:
            self._syncing = asyncio.get_running_loop().create_task(self._sync())

    async def _sync(self) -> None:
        waiters, self._waiters = self._waiters, []
        blobs, self._blobs = self._blobs, []
        self._unsynced = False
        failure: Unavailable | None = None
        try:
            await asyncio.to_thread(sync_files, self._fd, blobs)
            self.sync_failed = False
        except OSError as error:
            failure = refused(error)
            if not self.sync_failed:
                log.error("trajectories can't be synced: %s", error)
            self.sync_failed = True
            self._blobs += blobs
        finally:
            self._syncing = None
        for waiter in waiters:
            if waiter.done():
                continue
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)
        if self._size >= ROTATE_BYTES and self._retiring is None and not self._closed and failure is None:
            self._rotate()
        if self._closed:
            return
        if self._waiters:
            self._start_sync()
        elif self._unsynced:
            self._soon()

    def _rotate(self) -> None:
        """Begin another sync file, and be rid of the former once the sandboxes' own files are on disk."""
        try:
            self._number += 1
            fd = self._begin()
        except OSError as error:
            log.warning("no new sync file for trajectories: %s", error)
            self._number -= 1
            return
        old, self._fd, self._size = self._fd, fd, 0
        dirty, self._dirty = sorted(self._dirty), set()
        self._retiring = asyncio.get_running_loop().create_task(self._retire(old, self._number - 1, dirty))

    async def _retire(self, fd: int, number: int, dirty: list[str]) -> None:
        try:
            for at in range(0, len(dirty), SYNC_STEP):
                some = dirty[at : at + SYNC_STEP]
                for sandbox_id in some:
                    if (chain := self._holding.get(sandbox_id)) is not None:
                        chain.write_held()
                        self._drop_held(sandbox_id, chain)
                await asyncio.to_thread(sync_paths, [f"{self._place(name)}/log" for name in some])
            await asyncio.to_thread(remove_file, f"{self._root}/sync.{number}")
        except OSError as error:
            log.warning("trajectories can't be synced, sync.%d stays: %s", number, error)
        finally:
            os.close(fd)
            self._retiring = None

    async def _retire_former(self, files: list[Path]) -> None:
        try:
            for path in files:
                await asyncio.to_thread(self._sync_named, path)
                await asyncio.to_thread(remove_file, str(path))
        except OSError as error:
            log.warning("trajectories can't be synced, earlier sync files stay: %s", error)
        finally:
            self._retiring = None

    def _sync_named(self, path: Path) -> None:
        sync_paths([f"{self._place(name)}/log" for name in {name for name, _, _ in journal_lines(path)}])

    def _begin(self) -> int:
        return os.open(f"{self._root}/sync.{self._number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    # --- the reserve ---

    def _reserve(self) -> bool:
        self._reserved = False
        try:
            fd = os.open(f"{self._root}/reserve", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
            self._reserved = True
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)
        return self._reserved

    def _give_up_reserve(self) -> bool:
        """Whether there was one."""
        had, self._reserved = self._reserved, False
        if had:
            log.error("the disk of the state directory is full: results are written into the reserve")
            with contextlib.suppress(OSError):
                os.truncate(f"{self._root}/reserve", 0)
        return had

    # --- upkeep ---

    async def prune(self, before: float, keep: Callable[[str], bool], most: int = 2000) -> int:
        """Drop the logs that were last written before a time (seconds since the epoch) unless `keep` wants them; how
        many went."""
        old = await asyncio.to_thread(older, self._root, before)
        gone = [path for path in old if not keep(path.name)][:most]
        for path in gone:
            if (chain := self._chains.pop(path.name, None)) is not None:
                self._drop_held(path.name, chain)
        for at in range(0, len(gone), SYNC_STEP):
            await asyncio.to_thread(remove, gone[at : at + SYNC_STEP])
        for parent in {path.parent for path in gone}:  # not in a thread: a sandbox may just begin in it
            with contextlib.suppress(OSError):
                parent.rmdir()
        return len(gone)

    async def close(self) -> None:
        """Sync what there is. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._syncing, self._retiring):
            if task is not None:
                await task
        for sandbox_id, chain in list(self._holding.items()):
            self._let_go(sandbox_id, chain)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(sync_files, self._fd, self._blobs)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        os.close(self._fd)

    def _place(self, sandbox_id: str) -> str:
        if not (sandbox_id.isascii() and sandbox_id.isalnum() and len(sandbox_id) <= 64):
            raise ValueError(f"no id of a sandbox: {sandbox_id[:64]!r}")
        return f"{self._root}/{sandbox_id[:_BEGIN]}/{sandbox_id}"

    # --- recovery ---

    def _recover(self, root: Path, boot: str) -> list[Path]:
        """Returns the sync files of earlier servers that may still be needed."""
        marker = root / "boot"
        before = marker.read_text(encoding="ascii").strip() if marker.exists() else boot
        files = sorted(root.glob("sync.*"), key=lambda path: int(path.suffix[1:]))
        if before != boot:
            found = sum(self._fill_in(path) for path in files)
            log.warning("the machine went down: %d entries of trajectories were put back", found)
            sync_paths([f"{chain.place}/log" for chain in self._chains.values()])
        else:
            finish(files, self._place)
        if before != boot or not marker.exists():
            draft = root / "boot.new"
            draft.write_text(boot, encoding="ascii")
            sync_paths([str(draft)])
            draft.replace(marker)
            sync_paths([str(root)])
        if before == boot:
            return files
        for path in files:
            path.unlink()
        return []

    def _fill_in(self, path: Path) -> int:
        found = 0
        for name, _, line in journal_lines(path):
            try:
                place = self._place(name)
                entry = parse(line)
            except ValueError:
                return found  # torn here: nothing after it was promised
            chain = self._chains.get(name)
            if chain is None:
                Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
                chain = self._chains[name] = load(place, name, after_loss=True)
            if entry.seq != chain.seq + 1:
                continue
            try:
                check(entry, chain.seq + 1, chain.hash)
            except Broken:
                return found
            fd = os.open(f"{place}/log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                chain.size = write_all(fd, line, chain.size)
            finally:
                os.close(fd)
            chain.seq, chain.hash, chain.last = entry.seq, entry.hash, entry.type
            chain.written = chain.size
            found += 1
        return found
