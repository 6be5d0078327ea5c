"""What E2B's own client does asynchronously, where that differs; and several things at once."""

from __future__ import annotations

import asyncio
import io
import time

from case_kit import PATIENCE_S, raises_async, run, until_async

from e2b import (
    AsyncSandbox,
    AsyncTemplate,
    CommandExitException,
    FileNotFoundException,
    NotFoundException,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    TimeoutException,
)


async def case_lifecycle(_):
    async with await AsyncSandbox.create(timeout=60, metadata={"async": "yes"}) as box:
        assert await box.is_running()
        assert (await box.get_info()).metadata == {"async": "yes"}
        await box.set_timeout(600)
        other = await AsyncSandbox.connect(box.sandbox_id)
        assert (await other.commands.run("echo hi")).stdout == "hi\n"
        pages = AsyncSandbox.list(query=SandboxQuery(metadata={"async": "yes"}))
        assert box.sandbox_id in [item.sandbox_id for item in await pages.next_items()]
        assert not pages.has_next
        assert len(await box.get_metrics()) == 1
    assert not await box.is_running()
    assert await box.kill() is False
    await raises_async(SandboxNotFoundException, box.get_info())
    assert await AsyncTemplate.exists("base")


async def case_what_is_not_there_yet_says_so(box):
    assert await box.is_running()
    await raises_async(SandboxException, AsyncSandbox.create(allow_internet_access=True), "internet")


async def case_commands(box):
    result = await box.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    error = await raises_async(CommandExitException, box.commands.run("exit 9"))
    assert error.exit_code == 9
    seen = []
    await box.commands.run("echo a; sleep 0.2; echo b >&2", on_stdout=seen.append, on_stderr=seen.append)
    assert seen == ["a\n", "b\n"]
    await raises_async(TimeoutException, box.commands.run("sleep 1000", timeout=1))


async def case_background_and_stdin(box):
    seen = []
    handle = await box.commands.run("cat; echo end", background=True, stdin=True, on_stdout=seen.append)
    await box.commands.send_stdin(handle.pid, "text\n")
    await until_async(lambda: "text\n" in seen, "what was sent")
    await box.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "text\nend\n"
    assert handle.exit_code == 0


async def case_input_handle(box):
    if not hasattr(box.commands, "stream_input"):
        return
    handle = await box.commands.run("head -n3", background=True, stdin=True)
    async with await _opened(box.commands.stream_input(handle.pid)) as stdin:
        for line in ("one\n", b"two\n", "three\n"):
            await stdin.send(line)
    assert (await handle.wait()).stdout == "one\ntwo\nthree\n"


async def _opened(made):
    return await made if asyncio.iscoroutine(made) else made


async def case_kill_list_connect(box):
    handle = await box.commands.run("sleep 1000", background=True)
    assert handle.pid in [process.pid for process in await box.commands.list()]
    await handle.disconnect()
    again = await box.commands.connect(handle.pid)
    assert await again.kill() is True
    assert (await raises_async(CommandExitException, again.wait())).exit_code == 137
    assert await box.commands.kill(handle.pid) is False
    await raises_async(NotFoundException, box.commands.connect(handle.pid))


async def case_cancelled_commands_go_on(box):
    work = "touch /tmp/began; until test -e /tmp/go; do sleep 0.1; done; touch /tmp/went-on"
    task = asyncio.create_task(box.commands.run(work))
    await _appears(box, "/tmp/began")
    task.cancel()
    await asyncio.wait([task])
    await box.files.write("/tmp/go", "")
    await _appears(box, "/tmp/went-on")


async def _appears(box, path):
    deadline = time.monotonic() + PATIENCE_S
    while not await box.files.exists(path):
        assert time.monotonic() < deadline, path
        await asyncio.sleep(0.05)


async def case_many_at_once(box):
    results = await asyncio.gather(*(box.commands.run(f"sleep 0.2; echo {n}") for n in range(40)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(40)]
    await asyncio.gather(*(box.files.write(f"/tmp/many/{n}", f"content {n}") for n in range(40)))
    contents = await asyncio.gather(*(box.files.read(f"/tmp/many/{n}") for n in range(40)))
    assert contents == [f"content {n}" for n in range(40)]


async def case_many_sandboxes(_):
    boxes = await asyncio.gather(*(AsyncSandbox.create(metadata={"n": str(n)}) for n in range(8)))
    try:
        outputs = await asyncio.gather(*(box.commands.run(f"echo {n}") for n, box in enumerate(boxes)))
        assert [output.stdout for output in outputs] == [f"{n}\n" for n in range(8)]
    finally:
        assert all(await asyncio.gather(*(box.kill() for box in boxes)))


async def case_files(box):
    await box.files.write("/tmp/d/a", "héllo")
    assert await box.files.read("/tmp/d/a") == "héllo"
    assert await box.files.read("/tmp/d/a", format="bytes") == "héllo".encode()
    stream = await box.files.read("/tmp/d/a", format="stream")
    assert b"".join([chunk async for chunk in stream]) == "héllo".encode()
    await box.files.write("/tmp/d/b", io.BytesIO(b"x" * 2_000_000))
    await box.files.write("/tmp/d/c", b"y" * 2_000_000, gzip=True)
    infos = await box.files.write_files([{"path": "/tmp/d/e", "data": "1"}, {"path": "/tmp/d/f", "data": b"2"}])
    assert [info.path for info in infos] == ["/tmp/d/e", "/tmp/d/f"]
    assert [entry.size for entry in await box.files.list("/tmp/d")] == [6, 2_000_000, 2_000_000, 1, 1]
    assert await box.files.make_dir("/tmp/d/g") is True
    assert await box.files.make_dir("/tmp/d/g") is False
    assert (await box.files.rename("/tmp/d/a", "/tmp/d/g/a")).path == "/tmp/d/g/a"
    assert not await box.files.exists("/tmp/d/a")
    assert (await box.files.get_info("/tmp/d/g/a")).size == 6
    await box.files.remove("/tmp/d")
    await raises_async(FileNotFoundException, box.files.read("/tmp/d/b"))


if __name__ == "__main__":
    run(globals())
