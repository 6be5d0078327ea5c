"""The server's side of lazy layers: keeps holder and filler running, and says where a layer's files are.

On the host, below the run directory:

    lazy/          the cache directory bound a second time, and marked: data is mounted from here; without events the
                   filler's own file system instead (`fuse.py`), and there is no holder
    holder.sock    the holder's socket
    fill.sock      the filler's control socket

Both programs outlive the server, since sandboxes do. While it runs, this object holds what lets a successor of the
holder take over, so that readers only wait when one of the three dies. Where both server and holder are gone, what is
still mounted of incomplete layers can't be trusted any more: `open` says so. Without events the filler's end alone
makes what is mounted unreadable: `on_lost` is told, so that it is mounted anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from dsec.errors import DsecError, ErrorBody, Unavailable, from_body
from dsec.kernel import lasting, loop, mounts, syscalls
from dsec.store.format import is_layer
from dsec.store.lazy import holder

log = logging.getLogger(__name__)

DEADLINE_S = 60.0
"""A read that could not be served for so long fails with EIO."""
_START_S = 20.0
_AGAIN_S = 0.2
_ATTEMPTS = 3
_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "16777216", "MALLOC_TRIM_THRESHOLD_": "67108864"}
"""For a filler: what requests bring goes into memory that was used before. Mapped anew each time it takes a tenth more
CPU."""
Way = Literal["", "events", "fuse"]


class LazyFiles(NamedTuple):
    """What the kernel mounts of a layer."""

    image: Path
    data: Path | None
    complete: bool
    events: bool
    """Reads of the data may raise events, which don't reach through a loop device."""


class LazyLayers:
    """The lazy layers of one node. `open` first, `close` last."""

    def __init__(
        self, *, cache: Path, run: Path, filler: Sequence[str | Path], way: Way = "", deadline_s: float = DEADLINE_S
    ) -> None:
        """`filler`: the command that runs a filler for these directories; it gets `--copier PROGRAM`, without events
        `--fuse`. `way`: how reads get to it; empty: by events where this kernel has them."""
        self._cache = cache
        self._marked = run / "lazy"
        self._holder_path = run / "holder.sock"
        self._control_path = run / "fill.sock"
        self._filler = filler
        self.way: Way = way
        self._deadline_s = deadline_s
        self._program: Path | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._kept: tuple[int, int] | None = None
        self._mounted: set[str] = set()
        self._attached: set[str] = set()
        """Layers that may be mounted."""
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        self._calls = itertools.count(1)
        self._watch: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._adopted = asyncio.Event()
        self.fresh = False
        """Nobody answered reads when this was opened."""
        self.failures: Counter[str] = Counter()
        """Reads that failed, by layer."""
        self.on_failed: Callable[[str, str], None] = lambda layer, message: None
        """Told of a layer and why."""
        self.lost: Counter[str] = Counter()
        """How often what was mounted of a layer became unreadable."""
        self.on_lost: Callable[[str], None] = lambda layer: None
        """Told of a layer; blocks."""

    async def open(self, program: Path) -> bool:
        """Serve. `program`: the compiled holder, beside which the copier lies. False where readers may have seen zeros:
        the holder was gone, with layers mounted.

        Raises `Unavailable`, TimeoutError where the filler isn't there in time, KernelError where this kernel has no
        such events; then nothing runs that isn't needed for what is mounted.
        """
        self._program = program
        self._cache.mkdir(parents=True, exist_ok=True)
        self._marked.mkdir(exist_ok=True)
        self._mounted = {self._layer_of(mount) for mount in mounts.mounted()} - {""}
        if self.way != "fuse":
            self.fresh = await self._open_events()
        if self.way == "fuse":
            self.fresh = not await self._filler_lives()
        self._attached = set(self._mounted)
        self._watch = asyncio.create_task(self._keep_running(), name="lazy layers")
        try:
            await asyncio.wait_for(self._ready.wait(), _START_S)
        except BaseException:  # whoever gets this has nothing to close
            await self.close(keep=bool(self._mounted))
            raise
        return not (self.fresh and self._mounted)

    @property
    def hears(self) -> bool:
        """Whether it is told of reads that fail."""
        return self._ready.is_set()

    def adopted(self) -> None:
        """Whoever had opened layers before has attached them: of the others nothing is open."""
        self._adopted.set()

    async def _open_events(self) -> bool:
        """Whether there was no holder."""
        if mounts.find_mount(self._marked) is None:
            syscalls.mount(self._cache, self._marked, None, syscalls.MS_BIND)
        try:
            await asyncio.to_thread(self._keep)
        except Unavailable:
            try:
                await asyncio.to_thread(self._start_holder)
            except Unavailable as error:
                if self.way:
                    raise
                log.warning("layers are filled through FUSE, which is slower: %s", error)
                self.way = "fuse"
            return True
        return False

    async def _filler_lives(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(self._control_path)
        except OSError:
            return False
        writer.close()
        return True

    def mounted(self) -> set[str]:
        """The layers that were mounted from here when it was opened."""
        return self._mounted

    def _layer_of(self, mount: mounts.MountInfo) -> str:
        """The kernel shows where an image lies, not its device."""
        if mount.fstype != "erofs":
            return ""
        image = loop.backing_file(mount.source) or Path(mount.source)
        return image.parent.name if image.parent.parent in (self._cache, self._cache.resolve()) else ""

    async def close(self, *, keep: bool) -> None:
        """`keep`: holder and filler go on for the sandboxes that do; else both end. Nothing may be mounted then."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._writer is not None:
            self._writer.close()
        if not keep:
            await asyncio.to_thread(self._end)
        for descriptor in self._kept or ():
            os.close(descriptor)
        self._kept = None

    async def attach(self, layer: str) -> LazyFiles:
        """A layer's metadata is here, and its data may be mounted. Raises `NotFound`, `LayerCorrupt`,
        `Unavailable`."""
        self._attached.add(layer)  # before: see `_release_rest`
        try:
            answer = await self._call("attach", layer)
        except DsecError:
            self._attached.discard(layer)
            raise
        root, complete, events = self._cache / layer, answer["complete"], self.way != "fuse"
        data = self._marked / layer
        if events:  # complete ones too: they may have to ask again
            data /= "data"
        elif complete:
            data = root / "data"
        return LazyFiles(root / "meta.erofs", data if answer["data_bytes"] else None, complete, events)

    async def release(self, layer: str) -> None:
        """Nothing is mounted of it any more."""
        self._attached.discard(layer)
        await self._call("release", layer)

    def attached(self) -> set[str]:
        """The layers that may be mounted."""
        return set(self._attached)

    async def _release_rest(self) -> None:
        """What a filler finds in the cache it takes for mounted. An attach that is under way is in `_attached`, or
        comes after this on the channel."""
        await self._adopted.wait()
        for layer in filter(is_layer, await asyncio.to_thread(os.listdir, self._cache)):
            if layer not in self._attached:
                with contextlib.suppress(DsecError):
                    await self._call("release", layer)

    async def complete(self, layer: str) -> None:
        """Return when all of an attached layer is here. Raises `NotFound`, `LayerCorrupt`, `Unavailable`."""
        await self._call("complete", layer)

    async def status(self) -> dict[str, Any]:
        """`{"holder": {...}, "layers": {...}}`, as the filler counts."""
        return await self._call("status", "")

    # --- calls ---

    async def _call(self, name: str, layer: str) -> dict[str, Any]:
        for _ in range(_ATTEMPTS):
            await self._until_ready()
            assert self._writer is not None
            number = next(self._calls)
            self._waiting[number] = asyncio.get_running_loop().create_future()
            self._writer.write(json.dumps({"id": number, "call": name, "layer": layer}).encode() + b"\n")
            try:
                answer = await self._waiting[number]
            finally:
                del self._waiting[number]
            if answer is None:  # the filler is gone; the next one knows nothing of this
                continue
            if "error" in answer:
                raise from_body(msgspec.convert(answer["error"], ErrorBody))
            ok: dict[str, Any] = answer["ok"]
            return ok
        raise Unavailable("the filler of lazy layers ends again and again")

    async def _until_ready(self) -> None:
        """There is a filler, at the moment at which this returns: what is asked of one that is gone nobody answers.
        Raises `Unavailable`."""
        try:
            async with asyncio.timeout(_START_S):
                while not self._ready.is_set():
                    await self._ready.wait()
        except TimeoutError:
            raise Unavailable("there is no filler of lazy layers") from None

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                message = json.loads(line)
                if "failed" in message:
                    self.failures[message["failed"]] += 1
                    self.on_failed(message["failed"], message["message"])
                elif (waiting := self._waiting.get(message["id"])) is not None and not waiting.done():
                    waiting.set_result(message)  # else whoever called was cancelled just now

    # --- keeping both running ---

    async def _keep_running(self) -> None:
        """Connect to the filler, again and again; before each, look after the holder: a filler can't begin without
        one, whichever of them died first. It goes on after bugs too: without it no read on this node is answered."""
        while True:
            try:
                if self.way != "fuse" and not await asyncio.to_thread(self._holder_lives):
                    await asyncio.to_thread(self._start_holder)
                await self._converse(*await self._connect())
                log.warning("the filler of lazy layers is gone; starting another")
            except Exception as error:
                if isinstance(error, DsecError | OSError):
                    log.error("lazy layers can't be filled: %s", error)
                else:
                    log.exception("a bug in keeping lazy layers filled")
                await asyncio.sleep(_AGAIN_S)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until that filler is gone."""
        self._writer = writer
        self._ready.set()
        releasing = asyncio.create_task(self._release_rest(), name="release lazy layers")
        try:
            await self._listen(reader)
        finally:
            self._ready.clear()
            writer.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(None)
            releasing.cancel()
            await asyncio.wait([releasing])
        for process in [p for p in self._processes if p.poll() is not None]:
            self._processes.remove(process)
        if self.way == "fuse":
            await asyncio.to_thread(self._lose)

    def _lose(self) -> None:
        """The file system went with its filler."""
        for layer in self.attached():
            self.lost[layer] += 1
            try:
                self.on_lost(layer)
            except (DsecError, OSError) as error:  # the others are told
                log.error("layer %s stays mounted and can't be read: %s", layer, error)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        with contextlib.suppress(OSError):
            return await asyncio.open_unix_connection(self._control_path, limit=1 << 26)
        words = [*map(str, self._filler), *(["--fuse"] if self.way == "fuse" else [])]
        if self._program is not None:
            words += ["--copier", str(self._program.with_name("copier"))]
        process = await asyncio.to_thread(
            subprocess.Popen,
            lasting.outliving(words, unit=f"dsec-filler-{self._marked.parent.name}", static=False),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **_MEMORY},
        )
        self._processes.append(process)
        for _ in range(int(_START_S / 0.02)):
            with contextlib.suppress(OSError):
                return await asyncio.open_unix_connection(self._control_path, limit=1 << 26)
            if process.poll() is not None:
                raise Unavailable(f"the filler of lazy layers ended with code {process.returncode}")
            await asyncio.sleep(0.02)
        raise Unavailable("the filler of lazy layers doesn't listen")

    def _holder_lives(self) -> bool:
        try:
            client = holder.HolderClient(self._holder_path)
        except Unavailable:
            return False
        client.close()
        return True

    def _start_holder(self) -> None:
        assert self._program is not None
        process = holder.start_holder(
            self._program, self._holder_path, self._marked, deadline_s=self._deadline_s, inherited=self._kept
        )
        self._processes.append(process)
        self._keep()

    def _keep(self) -> None:
        """Take what lets a successor of the holder take over, and let go of what was kept before."""
        client = holder.HolderClient(self._holder_path)
        try:
            kept = client.take()
        finally:
            client.close()
        for descriptor in self._kept or ():
            os.close(descriptor)
        self._kept = kept

    def _end(self) -> None:
        """The holder's end is the filler's; without one it is told itself."""
        if self.way == "fuse":
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as channel:
                channel.connect(str(self._control_path))
                channel.sendall(b'{"id":0,"call":"stop"}\n')
            for process in self._processes:
                process.terminate()  # one that doesn't listen yet
        with contextlib.suppress(Unavailable):
            client = holder.HolderClient(self._holder_path)
            client.stop()
            client.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_START_S)
        self._processes.clear()
        for path in (self._holder_path, self._control_path):
            path.unlink(missing_ok=True)
        mounts.unmount_under(self._marked)
        with contextlib.suppress(OSError):
            self._marked.rmdir()
