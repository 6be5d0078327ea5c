"""A Dockerfile, carried out: stage by stage, only those that the target needs.

Variables are replaced where Docker replaces them: in every instruction but RUN, CMD and ENTRYPOINT, whose shells do
that themselves. ARG lasts to the end of its stage, ENV for ever; ENV wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from dsec.builder.copying import ROOT, Copy, Owner, Source, find_sources, owner_of, text_source
from dsec.builder.fetching import checksum_of
from dsec.builder.files import Files
from dsec.builder.mounting import Mounted
from dsec.builder.workshop import DEFAULT_SHELL, Stage, Workshop, joined
from dsec.errors import BuildFailed, DsecError, InvalidRequest, TooLarge, Unsupported
from dsec.recipe import words
from dsec.recipe.dockerfile import (
    NOTED,
    Dockerfile,
    Heredoc,
    Instruction,
    assignments,
    heredoc_mark,
    refuse,
)
from dsec.recipe.dockerfile import Stage as Written
from dsec.recipe.mounts import parse_mount
from dsec.store.image import Platform

MAX_ENV_BYTES = 128 << 10
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.IGNORECASE)
_MODE = re.compile(r"[0-7]{1,4}")
_MADE_EVERYWHERE = frozenset(["HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY", "SOURCE_DATE_EPOCH"])


class Interpreter:
    """One run of a Dockerfile."""

    def __init__(
        self,
        workshop: Workshop,
        dockerfile: Dockerfile,
        context: Files,
        *,
        platform: Platform,
        arguments: Mapping[str, str] | None = None,
        target: str | None = None,
    ) -> None:
        """`arguments`: the build's own, for ARG. `target`: a stage's name or number; None: the last."""
        self._workshop = workshop
        self._dockerfile = dockerfile
        self._context = context
        self._given = dict(arguments or {})
        self._target = self._index(target) if target is not None else len(dockerfile.stages) - 1
        self._done: dict[int, Stage] = {}
        self._globals: dict[str, str] = {
            "TARGETPLATFORM": str(platform),
            "TARGETOS": platform.os,
            "TARGETARCH": platform.architecture,
            "TARGETVARIANT": platform.variant,
        }
        self._declared: set[str] = set()

    async def run(self) -> Stage:
        """Returns the target. Raises `InvalidRequest`, `Unsupported`, `BuildFailed`, and what steps raise."""
        for each in self._dockerfile.arguments:
            self._argument(each, self._globals, self._globals)
        needed = self._needed()
        for number, stage in enumerate(self._dockerfile.stages):
            if number in needed:
                self._done[number] = await self._stage(stage)
        for name in sorted(self._given.keys() - self._declared - _MADE_EVERYWHERE):
            self._workshop.say(f"note: no ARG is called {name}")
        return self._done[self._target]

    # --- stages ---

    def _index(self, name: str) -> int:
        stages = self._dockerfile.stages
        for number, stage in enumerate(stages):
            if stage.name == name.lower():
                return number
        if name.isdigit() and int(name) < len(stages):
            return int(name)
        raise InvalidRequest(f"the Dockerfile has no stage {name[:100]!r}", field="target")

    def _earlier(self, name: str, before: int) -> int | None:
        """The stage before number `before` that goes by this name."""
        for number, stage in enumerate(self._dockerfile.stages[:before]):
            if stage.name == name.lower():
                return number
        return None

    def _needed(self) -> set[int]:
        found: set[int] = set()
        todo = [self._target]
        while todo:
            number = todo.pop()
            if number in found:
                continue
            found.add(number)
            stage = self._dockerfile.stages[number]
            names = [self._expanded(stage.line, stage.base, self._globals)]
            names += [each.flags["from"][0] for each in stage.instructions if "from" in each.flags]
            mounts = [(text, each.line) for each in stage.instructions for text in each.flags.get("mount", [])]
            names += filter(None, (parse_mount(text, line).origin for text, line in mounts))
            for position, name in enumerate(names):
                earlier = self._earlier(name, number)
                if earlier is None and position and name.isdigit() and int(name) < number:
                    earlier = int(name)
                if earlier is not None:
                    todo.append(earlier)
        return found

    async def _stage(self, written: Written) -> Stage:
        number = self._dockerfile.stages.index(written)
        base = self._expanded(written.line, written.base, self._globals)
        if not base:
            raise refuse(written.line, f"FROM {written.base[:100]} names nothing", "Its ARG has no value.")
        self._workshop.say(f"FROM {base}" + (f" AS {written.name}" if written.name else ""))
        earlier = self._earlier(base, number)
        if earlier is not None:
            done = self._done[earlier]
            stage = Stage(done.layers, done.config, done.said)
            stage.shell = done.shell
        else:
            platform = self._expanded(written.line, written.platform, self._globals) if written.platform else None
            with _on_line(written.line):
                stage = await self._workshop.base(base, platform)
        own_cmd = False
        for each in written.instructions:
            self._workshop.say(f"{each.name} {each.text}"[:300])
            handler = self._HANDLERS.get(each.name)
            if each.name in NOTED:
                self._workshop.say(f"  note: {each.name} means nothing here")
            elif handler is not None:
                with _on_line(each.line, f"{each.name}: "):
                    await handler(self, stage, each)
            elif each.name == "ENTRYPOINT":
                config = stage.config
                stage.config = replace(config, entrypoint=_argv(stage, each), cmd=config.cmd if own_cmd else None)
            else:
                own_cmd = True
                stage.config = replace(stage.config, cmd=_argv(stage, each))
        return stage

    # --- instructions ---

    async def _arg(self, stage: Stage, each: Instruction) -> None:
        self._argument(each, stage.arguments, stage.variables)

    def _argument(self, each: Instruction, into: dict[str, str], variables: Mapping[str, str]) -> None:
        for part in words.split(each.text, each.escape):
            name, equals, value = part.partition("=")
            name = self._expanded(each.line, name, variables)
            self._declared.add(name)
            if name in self._given:
                into[name] = self._given[name]
            elif equals:
                into[name] = self._expanded(each.line, value, variables, each.escape)
            elif into is not self._globals and name in self._globals:
                into[name] = self._globals[name]

    async def _env(self, stage: Stage, each: Instruction) -> None:
        env = stage.config.env | self._assigned(stage, each)
        if sum(len(name) + len(value) for name, value in env.items()) > MAX_ENV_BYTES:
            raise refuse(each.line, f"the variables are more than {MAX_ENV_BYTES} bytes together")
        stage.config = replace(stage.config, env=env)

    async def _label(self, stage: Stage, each: Instruction) -> None:
        stage.config = replace(stage.config, labels=stage.config.labels | self._assigned(stage, each))

    def _assigned(self, stage: Stage, each: Instruction) -> dict[str, str]:
        variables = stage.variables
        return {
            self._expanded(each.line, name, variables, each.escape): self._expanded(
                each.line, value, variables, each.escape
            )
            for name, value in assignments(each)
        }

    async def _workdir(self, stage: Stage, each: Instruction) -> None:
        path = joined(stage.config.workdir, self._expanded(each.line, each.text, stage.variables, each.escape))
        stage.config = replace(stage.config, workdir=path)
        try:
            await self._workshop.directory(stage, path)
        except InvalidRequest as error:
            raise refuse(each.line, error.message) from error

    async def _user(self, stage: Stage, each: Instruction) -> None:
        user = self._expanded(each.line, each.text, stage.variables, each.escape)
        if not user or len(user) > 100:
            raise refuse(each.line, "USER names nobody")
        stage.config = replace(stage.config, user=user)

    async def _shell(self, stage: Stage, each: Instruction) -> None:
        stage.shell = each.argv or DEFAULT_SHELL

    async def _run(self, stage: Stage, each: Instruction) -> None:
        network = each.flags.get("network", ["default"])[0]
        if network not in ("default", "none"):
            raise Unsupported(
                f"Dockerfile line {each.line}: RUN --network={network[:50]} is not supported",
                remedy="The build says what its commands may reach.",
                line=each.line,
            )
        argv = each.argv or [*stage.shell, _script(each)]
        title = f"Dockerfile line {each.line}: RUN {each.text}"[:300]
        mounts = [await self._mounted(stage, each, text) for text in each.flags.get("mount", [])]
        try:
            await self._workshop.run(
                stage, argv, title, env=stage.arguments, network=network == "default", mounts=mounts
            )
        except BuildFailed as error:
            raise BuildFailed(error.message, remedy=error.remedy, line=each.line, **error.details) from error
        except InvalidRequest as error:
            raise refuse(each.line, f"RUN: {error.message}", error.remedy) from error

    async def _mounted(self, stage: Stage, each: Instruction, text: str) -> Mounted:
        mount = parse_mount(
            text, each.line, lambda value: self._expanded(each.line, value, stage.variables, each.escape)
        )
        target = joined(stage.config.workdir, mount.target).encode(errors="surrogateescape")
        if mount.kind == "tmpfs":
            return Mounted(target, owner=ROOT, mode=0o1777)
        if mount.kind == "cache":
            mode = 0o755 if mount.mode is None else mount.mode
            return Mounted(
                target, owner=Owner(mount.uid, mount.gid), mode=mode, cache=mount.id or target.decode("latin-1")
            )
        origin, stays = await self._origin(each.line, mount.origin)
        try:
            (source,) = await asyncio.to_thread(find_sources, origin, [mount.source or "/"])
        except ValueError as error:
            raise refuse(each.line, f"RUN --mount: {error}") from None
        return Mounted(target, origin, source.node, None if stays else ROOT)

    async def _copy(self, stage: Stage, each: Instruction) -> None:
        variables = stage.variables
        parts = each.argv or words.split(each.text, each.escape)
        if len(parts) < 2:
            raise refuse(each.line, f"{each.name} takes at least one source, and a destination")
        *raw, last = parts
        dest = self._expanded(each.line, last, variables, each.escape)
        marks = {heredoc.name: heredoc for heredoc in each.heredocs}
        patterns = [self._expanded(each.line, w, variables, each.escape) for w in raw if not _mark(w, marks)]
        remote = [p for p in patterns if _REMOTE.match(p)] if each.name == "ADD" else []
        local = [p for p in patterns if p not in remote]
        if "checksum" in each.flags and (len(remote), len(local), len(marks)) != (1, 0, 0):
            raise refuse(each.line, "ADD --checksum is for a single URL")
        name = each.flags.get("from", [""])[0]
        origin, stays = await self._origin(each.line, self._expanded(each.line, name, stage.variables))
        view = await self._workshop.view(stage)
        try:
            sources = await asyncio.to_thread(find_sources, origin, local)
            owner = self._owner(each, variables, view.files, stays=stays)
        except ValueError as error:
            raise refuse(each.line, f"{each.name}: {error}") from None
        into = dest.endswith("/") or dest in (".", "..") or dest.endswith(("/.", "/.."))
        if len(sources) + len(marks) + len(remote) > 1 and not into:
            raise refuse(each.line, f"{each.name} of several files: the destination has to end with /")
        copy = Copy(
            origin,
            sources,
            joined(stage.config.workdir, dest).encode(errors="surrogateescape"),
            into,
            owner,
            self._mode(each, variables),
            each.name == "ADD",
            [self._expanded(each.line, text, variables, each.escape) for text in each.flags.get("exclude", [])],
        )
        copies = [copy] if sources else []
        for name, heredoc in marks.items():
            content = self._content(each, heredoc, variables)
            files, source = text_source(name, content)
            copies.append(copy._replace(files=files, sources=[source], owner=owner or ROOT, unpack=False))
        for url in remote:
            files, source = await self._fetched(each, url, variables)
            if into and not source.name:
                raise refuse(
                    each.line, f"ADD: {url[:200]!r} ends with no file's name", "Say one as the destination's end."
                )
            copies.append(copy._replace(files=files, sources=[source], owner=owner or ROOT, unpack=False))
        title = f"Dockerfile line {each.line}: {each.name} {each.text}"[:300]
        try:
            await self._workshop.copy(stage, copies, title)
        except (InvalidRequest, ValueError) as error:
            message = error.message if isinstance(error, InvalidRequest) else str(error)
            raise refuse(each.line, f"{each.name}: {message}") from error

    async def _fetched(self, each: Instruction, url: str, variables: Mapping[str, str]) -> tuple[Files, Source]:
        try:
            checksum = None
            if "checksum" in each.flags:
                checksum = checksum_of(self._expanded(each.line, each.flags["checksum"][0], variables, each.escape))
            return await self._workshop.fetch(url, checksum)
        except ValueError as error:
            raise refuse(each.line, f"ADD: {error}") from None
        except InvalidRequest as error:
            raise refuse(each.line, f"ADD: {error.message}", error.remedy) from error
        except (BuildFailed, TooLarge) as error:
            message = f"Dockerfile line {each.line}: ADD: {error.message}"
            raise type(error)(message, remedy=error.remedy, line=each.line) from error

    async def _origin(self, line: int, name: str) -> tuple[Files, bool]:
        """Where a COPY or a mount takes its files from, and whether they stay their owners'. `name`: of a stage or an
        image; empty: the context."""
        if not name:
            return self._context, False
        number = next((n for n in self._done if self._dockerfile.stages[n].name == name.lower()), None)
        if number is None and name.isdigit() and int(name) in self._done:
            number = int(name)
        if number is not None:
            source = self._done[number]
        else:
            with _on_line(line):
                source = await self._workshop.base(name)
        return (await self._workshop.view(source)).files, True

    def _owner(self, each: Instruction, variables: Mapping[str, str], image: Files, *, stays: bool) -> Owner | None:
        if "chown" in each.flags:
            return owner_of(self._expanded(each.line, each.flags["chown"][0], variables, each.escape), image)
        return None if stays else ROOT

    def _mode(self, each: Instruction, variables: Mapping[str, str]) -> int | None:
        if "chmod" not in each.flags:
            return None
        text = self._expanded(each.line, each.flags["chmod"][0], variables, each.escape)
        if not _MODE.fullmatch(text):
            raise refuse(each.line, f"--chmod={text[:50]}: only numbers like 0755 are supported")
        return int(text, 8)

    def _content(self, each: Instruction, heredoc: Heredoc, variables: Mapping[str, str]) -> str:
        try:
            return words.expand_text(heredoc.content, variables) if heredoc.expand else heredoc.content
        except ValueError as error:
            raise refuse(each.line, f"the heredoc {heredoc.name}: {error}") from None

    @staticmethod
    def _expanded(line: int, text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
        try:
            return words.expand(text, variables, escape)
        except ValueError as error:
            raise refuse(line, str(error)) from None

    _HANDLERS: Mapping[str, Callable[[Interpreter, Stage, Instruction], Awaitable[None]]] = {
        "ARG": _arg,
        "ENV": _env,
        "LABEL": _label,
        "WORKDIR": _workdir,
        "USER": _user,
        "SHELL": _shell,
        "RUN": _run,
        "COPY": _copy,
        "ADD": _copy,
    }


@contextlib.contextmanager
def _on_line(line: int, what: str = "") -> Iterator[None]:
    """Errors that don't name a line yet name this one."""
    try:
        yield
    except DsecError as error:
        if "line" in error.details:
            raise
        begin = "" if error.message.startswith("Dockerfile line") else f"Dockerfile line {line}: {what}"
        details = {**error.details, "line": line}
        raise type(error)(begin + error.message, remedy=error.remedy, **details) from error


def _mark(word: str, marks: Mapping[str, Heredoc]) -> bool:
    return (heredoc_mark(word) or "") in marks


def _argv(stage: Stage, each: Instruction) -> list[str]:
    return each.argv if each.argv is not None else [*stage.shell, each.text]


def _script(each: Instruction) -> str:
    """What the shell is given: heredocs follow the line, and one that stands alone is the script itself."""
    if not each.heredocs:
        return each.text
    (first, *more) = each.heredocs
    if not more and heredoc_mark(each.text.strip()) == first.name:
        if not first.content.startswith("#!"):
            return first.content
        path, end = "/tmp/.dsec-script", _end_mark(first.content)
        return (
            f"cat >{path} <<'{end}' && chmod +x {path} || exit 1\n{first.content}{end}\n"
            f"{path}; code=$?; rm -f {path}; exit $code"
        )
    return each.text + "\n" + "".join(f"{heredoc.content}{heredoc.name}\n" for heredoc in each.heredocs)


def _end_mark(content: str) -> str:
    mark = "DSEC_END"
    while mark in content:
        mark += "_"
    return mark


def shell_argv(stage: Stage, text: str) -> Sequence[str]:
    """A command line for the stage's shell."""
    return [*stage.shell, text]
