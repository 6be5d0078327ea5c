"""Templates: a base and a flat list of steps, each COPY with an archive of its own, as E2B's client sends them.

Commands run in a login shell, as commands in such a sandbox do. Variables are replaced in every step but RUN. The user
called `user`, which E2B's images have, is made where the image hasn't got it. What is started when
a sandbox is made of it is kept in labels of the image's settings, so that it goes where the layers go.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from dsec.builder.copying import PASSWD_BYTES, Copy, Owner, Source, find_sources, owner_of, text_source
from dsec.builder.files import Files, load_archive
from dsec.builder.workshop import Stage, Workshop, joined
from dsec.errors import DsecError, InvalidRequest, Unsupported
from dsec.recipe import words
from dsec.store.format import ImageConfig
from dsec.store.tree import directory

USER = "user"
START, READY = "dsec.template.start", "dsec.template.ready"
CPUS, MEMORY_MB, DISK_MB = "dsec.template.cpus", "dsec.template.memory_mb", "dsec.template.disk_mb"
MAX_STEPS = 2000
BASE, FINALIZE = "base", "finalize"


class Step(Struct, frozen=True, kw_only=True):
    """One step."""

    type: str
    args: Sequence[str] = ()
    archive: Path | None = None
    """Of a COPY: its files."""
    fresh: bool = False


class StepFailed(Exception):
    """Which step it was; the cause says why."""

    def __init__(self, step: str, cause: DsecError) -> None:
        super().__init__(str(cause))
        self.step = step
        self.cause = cause


async def build(
    workshop: Workshop,
    base: str,
    steps: Sequence[Step],
    scratch: Path,
    *,
    labels: Mapping[str, str],
    credentials: str | None = None,
    began: Callable[[str], None] = lambda step: None,
) -> Stage:
    """Carry the steps out. `began` hears which step comes. Raises `StepFailed`."""
    name = BASE
    with ExitStack() as files:
        try:
            began(name)
            workshop.say(f"FROM {base}")
            stage = await workshop.base(base, None, credentials)
            config = stage.config
            kept = {key: value for key, value in config.labels.items() if not key.startswith("dsec.template.")}
            stage.config = replace(config, labels=kept | dict(labels))
            await _ensure_user(workshop, stage)
            for number, step in enumerate(steps, 1):
                name = str(number)
                began(name)
                workshop.say(f"{step.type} {' '.join(step.args)}"[:300])
                data = files.enter_context((scratch / f"copy{number}").open("x+b")) if step.type == "COPY" else None
                await _step(workshop, stage, step, data)
            name = FINALIZE
            began(name)
        except DsecError as error:
            raise StepFailed(name, error) from error
    return stage


async def _step(workshop: Workshop, stage: Stage, step: Step, data: object) -> None:
    args = list(step.args)
    match step.type, args:
        case "RUN", [command]:
            await _run(workshop, stage, command, None, fresh=step.fresh)
        case "RUN", [command, user]:
            await _run(workshop, stage, command, _expanded(stage, user) or None, fresh=step.fresh)
        case "COPY", [source, dest, *more]:
            user, mode = (*more, "", "")[:2]
            await _copy(workshop, stage, step, data, (source, dest, user, mode))
        case "ENV", [*pairs] if pairs and len(pairs) % 2 == 0:
            env = {key: _expanded(stage, value) for key, value in zip(pairs[::2], pairs[1::2], strict=True)}
            if not all(key and "=" not in key and "\0" not in key + value for key, value in env.items()):
                raise InvalidRequest("a variable's name is empty or holds '='")
            stage.config = replace(stage.config, env=stage.config.env | env)
        case "WORKDIR", [path]:
            path = joined(stage.config.workdir, _expanded(stage, path))
            image = (await workshop.view(stage)).files
            await workshop.directory(stage, path, _owner(stage.config.user or "root", image))
            stage.config = replace(stage.config, workdir=path)
        case "USER", [user]:
            stage.config = replace(stage.config, user=_expanded(stage, user) or None)
        case (("RUN" | "COPY" | "ENV" | "WORKDIR" | "USER"), _):
            raise InvalidRequest(f"{step.type} with {len(args)} arguments")
        case _:
            raise Unsupported(f"a step of the kind {step.type[:50]!r} is not supported")


async def _run(workshop: Workshop, stage: Stage, command: str, user: str | None, *, fresh: bool) -> None:
    view = await workshop.view(stage)
    has_bash = any(_exists(view.files, path) for path in (b"bin/bash", b"usr/bin/bash"))
    argv = ["/bin/bash", "-l", "-c", command] if has_bash else ["/bin/sh", "-c", command]
    await workshop.run(stage, argv, f"RUN {command}"[:300], user=user, fresh=fresh)


async def _copy(
    workshop: Workshop, stage: Stage, step: Step, data: object, arguments: tuple[str, str, str, str]
) -> None:
    source, dest, user, mode = (_expanded(stage, text) for text in arguments)
    if step.archive is None:
        raise InvalidRequest(f"the files of COPY {source[:100]!r} were never sent")
    owner_name = user or stage.config.user or "root"
    files = await asyncio.to_thread(load_archive, step.archive, data)  # type: ignore[arg-type]
    view = await workshop.view(stage)
    try:
        sources = await asyncio.to_thread(find_sources, files, [source])
        bits = int(mode, 8) if mode else None
    except ValueError as error:
        raise InvalidRequest(f"COPY: {error}") from None
    if bits is not None and not 0 <= bits <= 0o7777:
        raise InvalidRequest(f"COPY: {mode[:50]!r} is no mode")
    owner = _owner(owner_name, view.files)
    target = joined(stage.config.workdir, dest).encode(errors="surrogateescape")
    into = dest.endswith("/") or dest in ("", ".") or dest.endswith("/.")
    copy = Copy(files, sources, target, into, owner, bits)
    await workshop.copy(stage, [copy], f"COPY {source} {dest}"[:300], fresh=step.fresh)


def _owner(name: str, image: Files) -> Owner:
    try:
        return owner_of(name, image)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _exists(files: Files, path: bytes) -> bool:
    try:
        return files.find(path) is not None
    except ValueError:
        return False


def _expanded(stage: Stage, text: str) -> str:
    try:
        return words.expand_text(text, stage.variables)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


async def _ensure_user(workshop: Workshop, stage: Stage) -> None:
    """Make E2B's own user where the image has none of the name."""
    files = (await workshop.view(stage)).files
    passwd, group, shadow = (_lines(files, path) for path in (b"etc/passwd", b"etc/group", b"etc/shadow"))
    if any(line.startswith(f"{USER}:") for line in passwd):
        return
    passwd, group = passwd or ["root:x:0:0:root:/root:/bin/sh"], group or ["root:x:0:"]
    taken = {line.split(":")[2] for line in (*passwd, *group) if line.count(":") >= 2}
    number = next(each for each in range(1000, 60_000) if str(each) not in taken)
    copies = [
        _text(files, b"etc/passwd", [*passwd, f"{USER}:x:{number}:{number}::/home/{USER}:/bin/bash"]),
        _text(files, b"etc/group", [*group, f"{USER}:x:{number}:"]),
    ]
    if shadow:
        copies.append(_text(files, b"etc/shadow", [*shadow, f"{USER}:*:19000:0:99999:7:::"]))
    home = Files(directory(), lambda _: None)
    copies.append(Copy(home, [Source(b"", home.top)], f"/home/{USER}".encode(), into=True, owner=Owner(number, number)))
    await workshop.copy(stage, copies, f"the user {USER}")


def _lines(files: Files, path: bytes) -> list[str]:
    node = files.find(path)
    if node is None or not node.is_file:
        return []
    return files.content(node, PASSWD_BYTES).decode(errors="surrogateescape").splitlines()


def _text(files: Files, path: bytes, lines: Sequence[str]) -> Copy:
    """A file with these lines, as it is but for that."""
    made, source = text_source(path.rpartition(b"/")[2].decode(), "".join(f"{line}\n" for line in lines))
    old = files.find(path)
    owner = Owner(0, 0) if old is None else Owner(old.uid, old.gid)
    return Copy(made, [source], b"/" + path, into=False, owner=owner, mode=stat.S_IMODE(old.mode) if old else None)


def labels_of(
    *, start: str | None, ready: str | None, cpus: int | None, memory_mb: int | None, disk_mb: int | None
) -> dict[str, str]:
    """What a sandbox of a template is given, as labels."""
    said = {START: start, READY: ready, CPUS: cpus, MEMORY_MB: memory_mb, DISK_MB: disk_mb}
    return {name: str(value) for name, value in said.items() if value}


def number_of(config: ImageConfig, label: str) -> int | None:
    """A label that is a number, or None."""
    text = config.labels.get(label, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
