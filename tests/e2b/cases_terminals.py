"""Watching and terminals, by E2B's client."""

from __future__ import annotations

import contextlib
import threading

from case_kit import PATIENCE_S, raises, raises_async, run, until, until_async

from e2b import (
    CommandExitException,
    FileNotFoundException,
    FilesystemEventType,
    InvalidArgumentException,
    PtySize,
    SandboxException,
)


def case_watch(box):
    box.files.make_dir("/tmp/w")
    watch = box.files.watch_dir("/tmp/w")
    box.files.write("/tmp/w/a", "x")
    seen = []

    def has(kind, name):
        seen.extend(watch.get_new_events())
        return any(event.type == kind and event.name == name for event in seen)

    until(lambda: has(FilesystemEventType.CREATE, "a") or has(FilesystemEventType.WRITE, "a"), "a new file")
    box.commands.run("echo more >> /tmp/w/a")
    until(lambda: has(FilesystemEventType.WRITE, "a"), "a write")
    box.commands.run("chmod 600 /tmp/w/a")
    until(lambda: has(FilesystemEventType.CHMOD, "a"), "a change of mode")
    box.files.rename("/tmp/w/a", "/tmp/w/b")
    until(lambda: has(FilesystemEventType.RENAME, "a") and has(FilesystemEventType.CREATE, "b"), "a rename")
    box.files.remove("/tmp/w/b")
    until(lambda: has(FilesystemEventType.REMOVE, "b"), "a removal")
    watch.stop()
    raises(SandboxException, watch.get_new_events)


def case_watch_recursive(box):
    box.files.make_dir("/tmp/w/below")
    watch = box.files.watch_dir("/tmp/w", recursive=True, include_entry=True)
    box.files.write("/tmp/w/below/deep", "12345")
    seen = []

    def entry():
        seen.extend(watch.get_new_events())
        return [e.entry for e in seen if e.name == "below/deep" and e.entry is not None]

    until(entry, "an event with its entry")
    assert entry()[0].path == "/tmp/w/below/deep"
    raises(FileNotFoundException, lambda: box.files.watch_dir("/tmp/none"))
    raises(InvalidArgumentException, lambda: box.files.watch_dir("/etc/passwd"))


def case_watch_what_goes_away(box):
    box.files.make_dir("/tmp/w/below")
    watch = box.files.watch_dir("/tmp/w", recursive=True)
    box.commands.run("touch $'/tmp/w/\\xff'")
    seen = []

    def has(name):
        seen.extend(watch.get_new_events())
        return any(event.name == name for event in seen)

    until(lambda: has("\ufffd"), "a name that is not text")
    box.files.remove("/tmp/w")
    until(lambda: has("below"), "the removal")
    until(lambda: has(""), "its own removal, the last event")
    assert watch.get_new_events() == []
    watch.stop()


def case_many_watchers(box):
    watchers = []
    error = None
    for n in range(1000):
        box.files.make_dir(f"/tmp/many/{n}")
        try:
            watchers.append(box.files.watch_dir(f"/tmp/many/{n}"))
        except SandboxException as refused:
            error = refused
            break
    assert len(watchers) >= 32
    assert len(watchers) == 1000 or "watch" in str(error), error
    box.files.write(f"/tmp/many/{len(watchers) - 1}/a", "x")
    until(watchers[-1].get_new_events, "an event for the last watcher")
    for watcher in watchers:
        watcher.stop()
    box.files.watch_dir("/tmp/many/0").stop()


def case_pty(box):
    seen = bytearray()
    terminal = box.pty.create(PtySize(rows=30, cols=100), envs={"HUE": "green"}, cwd="/tmp")
    reader = threading.Thread(target=lambda: terminal.wait(on_pty=seen.extend))
    reader.start()
    box.pty.send_stdin(terminal.pid, b"stty size; echo $HUE $PWD $TERM\n")
    until(lambda: b"30 100" in seen and b"green /tmp xterm" in seen, "size and environment")
    box.pty.resize(terminal.pid, PtySize(rows=40, cols=120))
    box.pty.send_stdin(terminal.pid, b"stty size\n")
    until(lambda: b"40 120" in seen, "the new size")
    box.pty.send_stdin(terminal.pid, b"sh -c 'echo run\"\"ning; exec sleep 1000'\n")
    until(lambda: b"running" in seen, "a program in the foreground")
    box.pty.send_stdin(terminal.pid, b"\x03")
    box.pty.send_stdin(terminal.pid, b"echo interr''upted\n")
    until(lambda: b"interrupted" in seen, "an interrupt")
    box.pty.send_stdin(terminal.pid, b"exit\n")
    reader.join(PATIENCE_S)
    assert not reader.is_alive()


def case_pty_kill_and_connect(box):
    terminal = box.pty.create(PtySize(rows=24, cols=80))
    terminal.disconnect()
    again = box.pty.connect(terminal.pid)
    seen = bytearray()

    def read():
        with contextlib.suppress(CommandExitException):
            again.wait(on_pty=seen.extend)

    reader = threading.Thread(target=read)
    reader.start()
    box.pty.send_stdin(again.pid, b"echo con''nected\n")
    until(lambda: b"connected" in seen, "the terminal after a reconnect")
    assert box.pty.kill(again.pid) is True
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    assert box.pty.kill(again.pid) is False


async def case_async_watch(box):
    seen = []
    await box.files.make_dir("/tmp/w/below")
    watch = await box.files.watch_dir("/tmp/w", on_event=seen.append, recursive=True, timeout=0)
    await box.files.write("/tmp/w/below/a", "x")
    await until_async(lambda: any(event.name == "below/a" for event in seen), "a new file")
    await box.files.remove("/tmp/w/below/a")
    await until_async(
        lambda: any(event.name == "below/a" and event.type == FilesystemEventType.REMOVE for event in seen), "a removal"
    )
    await watch.stop()


async def case_async_pty(box):
    seen = bytearray()
    terminal = await box.pty.create(PtySize(rows=30, cols=100), on_data=seen.extend)
    await box.pty.send_stdin(terminal.pid, b"stty size\n")
    await until_async(lambda: b"30 100" in seen, "the size")
    await box.pty.resize(terminal.pid, PtySize(rows=40, cols=120))
    await box.pty.send_stdin(terminal.pid, b"stty size; exit 4\n")
    assert (await raises_async(CommandExitException, terminal.wait())).exit_code == 4
    assert b"40 120" in seen


async def case_async_pty_loses_nothing_at_its_end(box):
    seen = bytearray()
    terminal = await box.pty.create(PtySize(rows=24, cols=80), on_data=seen.extend)
    await box.pty.send_stdin(terminal.pid, b"seq 20000; echo la''st; exit\n")
    await terminal.wait()
    assert b"\r\n19999\r\n20000\r\nlast\r\n" in seen


if __name__ == "__main__":
    run(globals())
