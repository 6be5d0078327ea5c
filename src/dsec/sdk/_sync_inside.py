"""The sync client. Generated from the async one by tools/generate_sync.py: change that one and run the
tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from dsec.sdk._command import AsyncCommand, OnOutput, Scope
from dsec.sdk._commands import AsyncCommands
from dsec.sdk._files import AsyncFiles, Content, Path
from dsec.sdk._portal import Wrapper, call, iterate
from dsec.sdk._results import CommandResult, Output
from dsec.sdk._streams import AsyncPorts, AsyncPortStream, AsyncWatch
from dsec.spec.sandbox import FileEvent, FileInfo, PortAccess, ProcessInfo, PtySize


class Watch(Wrapper):
    """Events of a directory; made by `files.watch`. Iterate over it: it ends when the directory is removed or moved
    away, with a `remove` event of the path "". Close it when done early, or use `with`.

    The iteration raises `QuotaExceeded` where the tree got more directories than a watch can follow, `Unavailable`
    where the connection broke: look at the directory, and watch again.
    """

    _async: AsyncWatch

    def __init__(self, inner: AsyncWatch) -> None:
        """Not for callers."""
        self._async = inner

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return call(self._async.__aexit__(kind, error, trace))

    def __iter__(self) -> Iterator[FileEvent]:
        return iterate(aiter(self._async))

    def close(self) -> None:
        """Stop watching. Idempotent."""
        return call(self._async.close())


class Ports(Wrapper):
    """Connections to what listens in one sandbox; `sandbox.ports`."""

    _async: AsyncPorts

    def __init__(self, inner: AsyncPorts) -> None:
        """Not for callers."""
        self._async = inner

    def access(self, *, request_timeout_s: float | None = None) -> PortAccess:
        """How they are reached by host name: the domain, and the token that admits to those that aren't public."""
        return call(self._async.access(request_timeout_s=request_timeout_s))

    def get_host(self, port: int) -> str:
        """The host name at which the server serves a port inside, for HTTP and WebSockets."""
        return call(self._async.get_host(port))

    def url(self, port: int, *, token: bool = False) -> str:
        """The URL of a port inside, by the scheme at which the server itself is reached. `token`: with the sandbox's
        traffic token, for a browser, which gets a cookie for it; whoever has it reaches all ports of the sandbox."""
        return call(self._async.url(port, token=token))

    def connect(self, port: int, *, request_timeout_s: float | None = None) -> PortStream:
        """Connect to a TCP port on the loopback inside. Raises `PortClosed` where nothing listens there,
        `InvalidRequest`, `SandboxNotFound`, `SandboxEnded`, `QuotaExceeded`, `Unavailable`, `RequestTimeout`."""
        return PortStream(call(self._async.connect(port, request_timeout_s=request_timeout_s)))


class PortStream(Wrapper):
    """A connection to a port inside; made by `ports.connect`. Close it in the end, or use `with`."""

    _async: AsyncPortStream

    def __init__(self, inner: AsyncPortStream) -> None:
        """Not for callers."""
        self._async = inner

    def __enter__(self) -> PortStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return call(self._async.__aexit__(kind, error, trace))

    def read(self) -> bytes:
        """Some bytes; b"" when the other side has ended its direction. Raises `PortClosed` where the connection inside
        was cut, `Unavailable` where ours was."""
        return call(self._async.read())

    def write(self, data: bytes) -> None:
        """Send, waiting while the other side doesn't read. Dropped where it doesn't take any more. Raises `Unavailable`
        where the connection to the server is gone."""
        return call(self._async.write(data))

    def close_write(self) -> None:
        """End our direction; reading goes on. Idempotent."""
        return call(self._async.close_write())

    def close(self) -> None:
        """End both directions. Idempotent."""
        return call(self._async.close())


class Command(Wrapper):
    """A command that was started: iterate over its output, write to its stdin, end it, wait for it.

    `for output in command` gives `Output` pieces as they come. `wait` gives the result with the output that was
    not iterated over. The command goes on when this handle, or the process that holds it, goes away; `with` ends
    it whole instead.
    """

    _async: AsyncCommand

    def __init__(self, inner: AsyncCommand) -> None:
        """Not for callers."""
        self._async = inner

    @property
    def key(self) -> str:
        """Names it in `commands.attach`, also from another process."""
        return self._async.key

    @property
    def pid(self) -> int | None:
        """Inside the sandbox; None where it could not be started."""
        return self._async.pid

    def __iter__(self) -> Iterator[Output]:
        return iterate(aiter(self._async))

    def wait(self, *, request_timeout_s: float | None = None) -> CommandResult:
        """Wait for the end. The result holds the output that was not iterated over before. Again: the same result.

        `request_timeout_s` limits the wait, not the command. Raises as `commands.run` does.
        """
        return call(self._async.wait(request_timeout_s=request_timeout_s))

    def write_stdin(self, data: bytes | memoryview | str, *, request_timeout_s: float | None = None) -> None:
        """Send to its stdin; returns when the command, or the pipe to it, has taken it. Data is sent once even if the
        connection breaks. Data for a command that ended or closed its stdin is dropped."""
        return call(self._async.write_stdin(data, request_timeout_s=request_timeout_s))

    def close_stdin(self, *, request_timeout_s: float | None = None) -> None:
        """End its stdin. Idempotent."""
        return call(self._async.close_stdin(request_timeout_s=request_timeout_s))

    def resize(self, cols: int, rows: int, *, request_timeout_s: float | None = None) -> None:
        """The size of its terminal. Raises `InvalidRequest` where it has none; no error where it has ended."""
        return call(self._async.resize(cols, rows, request_timeout_s=request_timeout_s))

    def kill(self, scope: Scope = "all", *, signal: int | None = None, request_timeout_s: float | None = None) -> None:
        """End it. `scope` "all": everything that it started, double forks included, by SIGKILL; "group": its process
        group, "leader": it alone, both by `signal` (default 15). No error where it has ended already."""
        return call(self._async.kill(scope, signal=signal, request_timeout_s=request_timeout_s))

    def release(self, *, request_timeout_s: float | None = None) -> None:
        """Let the server forget it, its output and its result; a running one is ended whole. Idempotent."""
        return call(self._async.release(request_timeout_s=request_timeout_s))

    def detach(self) -> None:
        """Close the connection; the command goes on. `commands.attach(key)` finds it again."""
        return call(self._async.detach())

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return call(self._async.__aexit__(kind, error, trace))


class Commands(Wrapper):
    """Runs commands in one sandbox; `sandbox.commands`."""

    _async: AsyncCommands

    def __init__(self, inner: AsyncCommands) -> None:
        """Not for callers."""
        self._async = inner

    def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        command_timeout_s: float | None = None,
        output_bytes: int | None = None,
        merge_stderr: bool = False,
        kill_leftovers: bool = False,
        key: str | None = None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        request_timeout_s: float | None = None,
    ) -> CommandResult:
        """Run a command to its end and return its result, whatever the exit code.

        `command`: argv, run as it is; a str is run by `["/bin/sh", "-c", command]`. `env` is laid over the sandbox's.
        `stdin`: its whole input (none: /dev/null). `command_timeout_s`: its wall time, then it is ended whole (cause
        `command_timeout`; None: the sandbox's default). `output_bytes`: cap of its output, likewise. `merge_stderr`:
        stderr goes into stdout. `kill_leftovers`: end the background processes that it leaves. `key`: idempotency key;
        the same key again returns the same result and runs nothing. `on_stdout`, `on_stderr`: called with each piece
        (bytes) as it comes, in the client's own thread; the result holds all output all the same.

        `request_timeout_s` limits this call, not the command: after `RequestTimeout` it goes on (its key is in the
        error's `details`), as it does when this call is cancelled. Raises `SandboxNotFound`, `SandboxEnded`,
        `OutcomeUnknown` (the sandbox died under it), `InvalidRequest`, `Conflict` (the key was used for another
        command), `Unavailable`.
        """
        return call(
            self._async.run(
                command,
                env=env,
                cwd=cwd,
                user=user,
                stdin=stdin,
                command_timeout_s=command_timeout_s,
                output_bytes=output_bytes,
                merge_stderr=merge_stderr,
                kill_leftovers=kill_leftovers,
                key=key,
                on_stdout=on_stdout,
                on_stderr=on_stderr,
                request_timeout_s=request_timeout_s,
            )
        )

    def start(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        command_timeout_s: float | None = None,
        output_bytes: int | None = None,
        merge_stderr: bool = False,
        kill_leftovers: bool = False,
        pty: PtySize | None = None,
        key: str | None = None,
        request_timeout_s: float | None = None,
    ) -> Command:
        """Start a command and return a handle once it runs (or failed to start: the result says so).

        `stdin`: keep it open for `write_stdin`. `pty`: run it on a terminal of this size (`resize` changes it): what is
        written to its stdin is typed, all output is stdout. The rest: see `run`; `request_timeout_s` limits the start.
        """
        return Command(
            call(
                self._async.start(
                    command,
                    env=env,
                    cwd=cwd,
                    user=user,
                    stdin=stdin,
                    command_timeout_s=command_timeout_s,
                    output_bytes=output_bytes,
                    merge_stderr=merge_stderr,
                    kill_leftovers=kill_leftovers,
                    pty=pty,
                    key=key,
                    request_timeout_s=request_timeout_s,
                )
            )
        )

    def attach(
        self,
        key: str,
        *,
        stdout_from: int = 0,
        stderr_from: int = 0,
        interactive: bool = False,
        request_timeout_s: float | None = None,
    ) -> Command:
        """The handle of a command that was started under `key`, by this process or another. Its output comes from the
        given byte offsets on. `interactive`: somebody types to it, output is not held back to be sent together. Raises
        `NotFound`."""
        return Command(
            call(
                self._async.attach(
                    key,
                    stdout_from=stdout_from,
                    stderr_from=stderr_from,
                    interactive=interactive,
                    request_timeout_s=request_timeout_s,
                )
            )
        )

    def list(self, *, request_timeout_s: float | None = None) -> list[ProcessInfo]:
        """The running commands, oldest first, whoever started them."""
        return call(self._async.list(request_timeout_s=request_timeout_s))


class Files(Wrapper):
    """Reads and writes files of one sandbox; `sandbox.files`.

    All calls raise `FileMissing`, `FileError` (errno and path in `details`), `PermissionDenied`, `SandboxNotFound`,
    `SandboxEnded`, `Unavailable`, and `RequestTimeout` after `request_timeout_s`.
    """

    _async: AsyncFiles

    def __init__(self, inner: AsyncFiles) -> None:
        """Not for callers."""
        self._async = inner

    def read(
        self, path: Path, *, encoding: str = "utf-8", user: str | None = None, request_timeout_s: float | None = None
    ) -> str:
        """A file's text; what isn't of this encoding becomes U+FFFD."""
        return call(self._async.read(path, encoding=encoding, user=user, request_timeout_s=request_timeout_s))

    def read_bytes(
        self,
        path: Path,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> bytes:
        """A file's bytes, `length` of them (None: to the end) from `offset` on."""
        return call(
            self._async.read_bytes(path, offset=offset, length=length, user=user, request_timeout_s=request_timeout_s)
        )

    def read_stream(
        self, path: Path, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> Iterator[bytes]:
        """A file's bytes in pieces as they come, with bounded memory. Raises `Unavailable` where the connection breaks
        in the middle: go on with `offset`."""
        return iterate(self._async.read_stream(path, offset=offset, length=length, user=user))

    def write(
        self,
        path: Path,
        data: Content,
        *,
        mode: int | None = None,
        parents: bool = False,
        append: bool = False,
        exclusive: bool = False,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> int:
        """Write a file, atomically unless `append`: after any failure it is as it was. Returns the bytes written.

        `data`: str (as UTF-8), bytes, an open binary file (from its position on), or an iterator of bytes,
        asynchronous or not; files and iterators are streamed. `mode`: permission bits of a new file (None: 0644).
        `parents`: make missing directories. `exclusive`: fail where it exists. Raises `OutcomeUnknown` where the
        connection broke and the write may not be repeated (`append`, `exclusive`, an iterator).
        """
        return call(
            self._async.write(
                path,
                data,
                mode=mode,
                parents=parents,
                append=append,
                exclusive=exclusive,
                user=user,
                request_timeout_s=request_timeout_s,
            )
        )

    def stat(
        self, path: Path, *, follow: bool = False, user: str | None = None, request_timeout_s: float | None = None
    ) -> FileInfo:
        """About a file; `follow`: about what a symbolic link points to."""
        return call(self._async.stat(path, follow=follow, user=user, request_timeout_s=request_timeout_s))

    def exists(self, path: Path, *, user: str | None = None, request_timeout_s: float | None = None) -> bool:
        """Whether there is such a file, of whatever type; a dangling symbolic link counts."""
        return call(self._async.exists(path, user=user, request_timeout_s=request_timeout_s))

    def list(
        self, path: Path, *, depth: int = 1, user: str | None = None, request_timeout_s: float | None = None
    ) -> list[FileInfo]:
        """Entries below a directory, `depth` levels of them; names are relative to it."""
        return call(self._async.list(path, depth=depth, user=user, request_timeout_s=request_timeout_s))

    def watch(
        self, path: Path, *, recursive: bool = False, user: str | None = None, request_timeout_s: float | None = None
    ) -> Watch:
        """Watch a directory, `recursive`: with all below it. Returns when nothing that happens from now on is missed;
        `request_timeout_s` limits that. Raises `QuotaExceeded` where there are more directories than a watch can
        follow."""
        return Watch(call(self._async.watch(path, recursive=recursive, user=user, request_timeout_s=request_timeout_s)))

    def move(
        self,
        path: Path,
        to: Path,
        *,
        exclusive: bool = False,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> None:
        """Rename; replaces `to` unless `exclusive`. Raises `OutcomeUnknown` where the connection broke under it."""
        return call(self._async.move(path, to, exclusive=exclusive, user=user, request_timeout_s=request_timeout_s))

    def mkdir(
        self,
        path: Path,
        *,
        mode: int | None = None,
        parents: bool = False,
        user: str | None = None,
        request_timeout_s: float | None = None,
    ) -> None:
        """Make a directory. `parents`: missing ones too, and an existing one is no error. Raises `OutcomeUnknown`
        where the connection broke under it and `parents` isn't set."""
        return call(self._async.mkdir(path, mode=mode, parents=parents, user=user, request_timeout_s=request_timeout_s))

    def remove(
        self, path: Path, *, recursive: bool = False, user: str | None = None, request_timeout_s: float | None = None
    ) -> None:
        """Remove a file or an empty directory; `recursive`: with all that is in it. Raises `OutcomeUnknown` where the
        connection broke under it."""
        return call(self._async.remove(path, recursive=recursive, user=user, request_timeout_s=request_timeout_s))
