"""The two stores: a directory on any file system that all nodes see, and an S3-compatible bucket.

A directory needs no lock and no server: an object is written under a name of its writer's alone in `.tmp/`, brought to
disk, and appears by a rename, or, where it must not replace one, by a hard link. Readers that have an object open keep
it when it is replaced or deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import S3Store

from dsec.errors import InvalidRequest, NotFound, Unavailable
from dsec.ports import BlobInfo, BlobStore
from dsec.store.threads import started_pool

T = TypeVar("T")

THREADS = 16
"""Calls of a directory store that run at the same time."""
STALE_TMP_S = 86400.0
_KEY = re.compile(r"[A-Za-z0-9_+=%@-][A-Za-z0-9._+=%@-]*(/[A-Za-z0-9_+=%@-][A-Za-z0-9._+=%@-]*)*")
_STATUS = re.compile(r"status code: ([0-9]{3})")
"""In an error of obstore's."""
_LIST_STEP = 1000
_PIECE_BYTES = 1 << 20


def _untold(done: int) -> None:
    """Nobody wants to know how far it is."""


def _pieces(path: Path, told: Callable[[int], None]) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
            told(file.tell())


def open_store(url: str) -> BlobStore:
    """The store at a URL: `/a/directory`, `file:///a/directory`, or `s3://bucket/prefix?endpoint=http://host:port&region=...`.
    A bucket's credentials come from the environment (`AWS_ACCESS_KEY_ID` and so on), the endpoint may, too.

    Raises `InvalidRequest` for another kind of URL, `Unavailable` where a directory can't be made.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return DirectoryStore(Path(parts.path or url))
    if parts.scheme == "s3" and parts.netloc:
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        endpoint, region = options.pop("endpoint", None), options.pop("region", None)
        if not options:
            return BucketStore(parts.netloc, parts.path.strip("/"), endpoint=endpoint, region=region)
    raise InvalidRequest(
        f"not a store: {url[:200]!r}", remedy="It is a directory, or s3://BUCKET/PREFIX?endpoint=URL&region=NAME."
    )


def _checked(key: str) -> str:
    if len(key) > 900 or not _KEY.fullmatch(key):
        raise InvalidRequest(f"not a key of a store: {key[:200]!r}")
    return key


async def get_apart(store: BlobStore, keys: Sequence[str], most: int) -> list[bytes | None]:
    """`get_each` by a call for each, at the same time."""

    async def one(key: str) -> bytes | None:
        try:
            return await store.get(key, 0, most)
        except NotFound:
            return None

    return list(await asyncio.gather(*map(one, keys)))


class DirectoryStore:
    """`ports.BlobStore` in a directory."""

    def __init__(self, root: Path) -> None:
        """Makes the directory where it is missing. Raises `Unavailable`."""
        self.root = root
        self._tmp = root / ".tmp"
        self._pool = started_pool(THREADS, "dsec-store")
        self._alone = started_pool(1, "dsec-store-each")
        try:
            self._tmp.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"the store at {root} can't be used: {error.strerror}") from error

    async def put(self, key: str, data: bytes | Path) -> None:
        await self._run(partial(self._put, _checked(key), data))

    async def put_if_absent(self, key: str, data: bytes | Path, told: Callable[[int], None] = _untold) -> bool:
        return await self._run(partial(self._put_if_absent, _checked(key), data, told))

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        return await self._run(partial(self._get, _checked(key), offset, size))

    async def get_each(self, keys: Sequence[str], most: int) -> list[bytes | None]:
        def each() -> list[bytes | None]:
            found: list[bytes | None] = []
            for key in keys:
                try:
                    found.append(self._get(key, 0, most))
                except FileNotFoundError:
                    self._check_there()
                    found.append(None)
            return found

        for key in keys:
            _checked(key)
        # Of several threads that wait for work two wake up for each piece, and pass the interpreter's lock around.
        return await self._run(each, self._alone)

    def file(self, key: str) -> Path | None:
        return self.root / _checked(key)

    async def size(self, key: str) -> int | None:
        def look() -> int | None:
            try:
                return (self.root / key).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                self._check_there()
                return None

        _checked(key)
        return await self._run(look)

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        _checked(prefix.rstrip("/"))
        walk = self._walk(self.root / prefix)

        def step() -> list[BlobInfo]:
            return [info for info, _ in zip(walk, range(_LIST_STEP), strict=False)]

        while found := await self._run(step):
            for info in found:
                yield info

    async def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound):
            await self._run((self.root / _checked(key)).unlink)

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)
        await asyncio.to_thread(self._alone.shutdown)

    def remove_stale(self) -> int:
        """Remove what writers that died left half-written. Returns how many files."""
        count = 0
        for entry in os.scandir(self._tmp):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < time.time() - STALE_TMP_S:
                    os.unlink(entry.path)
                    count += 1
        return count

    async def _run(self, call: Callable[[], T], pool: Executor | None = None) -> T:
        def checked() -> T:
            try:
                return call()
            except FileNotFoundError:
                self._check_there()
                raise

        try:
            return await asyncio.get_running_loop().run_in_executor(pool or self._pool, checked)
        except FileNotFoundError:
            raise NotFound("the store has no such object") from None
        except OSError as error:
            raise Unavailable(f"the store at {self.root} failed: {error.strerror or error}") from error

    def _check_there(self) -> None:
        """Something wasn't found: in a store that is gone (unmounted, say) nothing is, which says nothing of it. Raises
        OSError."""
        if not self._tmp.exists():
            raise OSError(errno.ENODEV, "it is not there any more")

    def _not_listed(self, error: OSError) -> None:
        """A directory that can't be read isn't an empty one: garbage would be what somebody uses."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error
        self._check_there()

    def _put(self, key: str, data: bytes | Path) -> None:
        with self._written(key, data, _untold) as fresh:
            fresh.rename(self.root / key)

    def _put_if_absent(self, key: str, data: bytes | Path, told: Callable[[int], None]) -> bool:
        target = self.root / key
        if target.exists():
            return False
        with self._written(key, data, told) as fresh:
            try:
                os.link(fresh, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise
                if target.exists():
                    return False
                fresh.rename(target)  # no hard links here; keys named by digests hold the same, whoever is last
        return True

    @contextlib.contextmanager
    def _written(self, key: str, data: bytes | Path, told: Callable[[int], None]) -> Iterator[Path]:
        """The content in a temporary file, on disk; then the directory of `key` is brought to disk too."""
        target = self.root / key
        fresh = self._tmp / f"{os.getpid()}-{os.urandom(12).hex()}"
        try:
            with open(fresh, "xb") as file:
                if isinstance(data, Path):
                    for piece in _pieces(data, told):
                        file.write(piece)
                else:
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            target.parent.mkdir(parents=True, exist_ok=True)
            yield fresh
            fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            fresh.unlink(missing_ok=True)

    def _get(self, key: str, offset: int, size: int | None) -> bytes:
        with open(self.root / key, "rb", buffering=0) as file:
            left = os.fstat(file.fileno()).st_size - offset
            left = left if size is None else min(left, size)
            parts = []
            while left > 0 and (data := os.pread(file.fileno(), min(left, 1 << 30), offset)):
                parts.append(data)
                offset += len(data)
                left -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _walk(self, top: Path) -> Iterator[BlobInfo]:
        for folder, _, names in os.walk(top, onerror=self._not_listed):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    at = path.stat()
                    yield BlobInfo(str(path.relative_to(self.root)), at.st_size, at.st_mtime)


class BucketStore:
    """`ports.BlobStore` in an S3-compatible bucket, which has to know conditional writes (`If-None-Match`)."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        retry_s: float = 30.0,
    ) -> None:
        """Connects at the first call. `retry_s`: for how long a call is tried again."""
        self._name = f"s3://{bucket}/{prefix}"
        options = {"endpoint": endpoint, "region": region}
        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            config={name: value for name, value in options.items() if value},  # type: ignore[arg-type]
            client_options={
                "allow_http": endpoint is None or endpoint.startswith("http:"),
                "connect_timeout": timedelta(seconds=min(5.0, retry_s)),
                "timeout": timedelta(seconds=max(retry_s, 1.0)),
            },
            retry_config={"retry_timeout": timedelta(seconds=retry_s), "max_retries": 8},
        )

    async def put(self, key: str, data: bytes | Path) -> None:
        with self._translated(key):
            await obstore.put_async(self._store, _checked(key), data)

    async def put_if_absent(self, key: str, data: bytes | Path, told: Callable[[int], None] = _untold) -> bool:
        if await self.size(key) is not None:
            return False
        if isinstance(data, Path) and os.stat(data).st_size > _ONE_PUT_BYTES:  # in parts, which know no condition
            with self._translated(key):
                await obstore.put_async(self._store, _checked(key), _pieces(data, told))
            return True
        try:
            with self._translated(key):
                await obstore.put_async(self._store, _checked(key), data, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        _checked(key)
        with self._translated(key):
            if size == 0:
                return b""
            if offset == 0 and size is None:
                return bytes(await (await obstore.get_async(self._store, key)).bytes_async())
            whole = (await obstore.head_async(self._store, key))["size"] if size is None else offset + size
            if whole <= offset:
                return b""
            return bytes(await obstore.get_range_async(self._store, key, start=offset, end=whole))

    async def get_each(self, keys: Sequence[str], most: int) -> list[bytes | None]:
        return await get_apart(self, keys, most)

    def file(self, key: str) -> Path | None:
        return None

    async def size(self, key: str) -> int | None:
        try:
            with self._translated(key):
                return (await obstore.head_async(self._store, _checked(key)))["size"]
        except NotFound:
            return None

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        _checked(prefix.rstrip("/"))
        with self._translated(prefix):
            async for found in obstore.list(self._store, prefix, chunk_size=_LIST_STEP):
                for each in found:
                    yield BlobInfo(each["path"], each["size"], each["last_modified"].timestamp())

    async def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound), self._translated(key):
            await obstore.delete_async(self._store, _checked(key))

    async def close(self) -> None:
        """Nothing to let go of: connections are the library's."""

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (NotFoundError, FileNotFoundError):
            raise NotFound(f"the store has no object {key!r}") from None
        except (AlreadyExistsError, PreconditionError) as error:
            raise FileExistsError(key) from error
        except BaseError as error:
            status = _STATUS.search(str(error))  # the first: keys and addresses have no spaces
            if status and status[1] == "416":  # beyond the end
                raise NotFound(f"object {key!r} ends before that range") from None
            raise Unavailable(f"the store {self._name} failed: {str(error).splitlines()[0][:300]}") from error


_ONE_PUT_BYTES = 64 << 20
"""A larger file is uploaded in parts."""
