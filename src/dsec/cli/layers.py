"""Verbs about layers, and those about environments that make, show and remove them."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import click

from dsec import AsyncClient
from dsec.cli import signals
from dsec.cli.complete import ENVIRONMENT
from dsec.cli.network import grants, network_option
from dsec.cli.output import json_option, note, printable, readable, wants_json, write_json, write_table
from dsec.cli.progress import Steps
from dsec.cli.sandboxes import environment
from dsec.errors import InvalidRequest

T = TypeVar("T")

_readers = click.option("--reader", "readers", multiple=True, metavar="PROJECT", help="Who may use it too; `*`: all.")
_platform = click.option("--platform", metavar="OS/ARCH", help="Like linux/arm64; the server's own otherwise.")
_kind = click.option(
    "--kind", type=click.Choice(["base", "workspace", "toolkit"]), default="workspace", show_default=True
)


def _run(work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with AsyncClient() as client:
            return await work(client)

    return signals.run(connected())


@click.group("layer")
def layer() -> None:
    """Layers: what environments are made of."""


@layer.command("ls")
@json_option
def list_layers(as_json: bool) -> None:
    """List layers, oldest first."""
    found = _run(lambda client: client.catalog.layers())
    if wants_json(as_json):
        write_json(found)
        return
    rows = [
        (
            each["digest"][:12],
            each.get("kind", ""),
            readable(each.get("size_bytes", 0)),
            " ".join(each.get("names", [])),
            " ".join(each.get("environments", [])),
        )
        for each in found
    ]
    write_table(["layer", "kind", "size", "names", "environments"], rows, empty="no layers")


@layer.command("inspect")
@click.argument("reference")
def inspect(reference: str) -> None:
    """Everything about a layer, as JSON."""
    write_json(_run(lambda client: client.catalog.layer(reference)))


@layer.command("import")
@click.argument("image")
@click.argument("name", required=False, metavar="[ENVIRONMENT]")
@click.option("--tag", help="Which image, where an archive has several.")
@_platform
@click.option("--credentials", envvar="DSEC_REGISTRY_CREDENTIALS", metavar="USER:PASSWORD", help="For the registry.")
@_readers
@json_option
def load(
    image: str,
    name: str | None,
    tag: str | None,
    platform: str | None,
    credentials: str | None,
    readers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make an environment of an image: HOST[:PORT]/NAME[:TAG], or an archive or OCI layout on this machine."""
    name = name or os.path.basename(image.rstrip("/")).split("@")[0].removesuffix(".tar")
    with Steps() as steps:
        if not os.path.exists(image) and image.startswith((".", "/")):
            raise InvalidRequest(f"there is no {image}")
        if os.path.exists(image):
            with _packed(image) as path:
                found = _run(
                    lambda client: client.catalog.import_archive(
                        path, name, tag=tag, platform=platform, readers=readers, on_step=steps.show
                    )
                )
        else:
            found = _run(
                lambda client: client.catalog.import_image(
                    image, name, platform=platform, credentials=credentials, readers=readers, on_step=steps.show
                )
            )
    if wants_json(as_json):
        write_json(found)
    else:
        click.echo(found["environment"])
        note(f"{len(found['layers'])} layers, image {found['image'][:19]}")


@layer.command("build")
@click.argument("arguments", nargs=-1, required=True, metavar="[SOURCE] NAME")
@click.option("--at", metavar="PATH", help="Where in the sandbox SOURCE lies.  [default: /]")
@click.option("--keep-owners", is_flag=True, help="Owners as on disk; else everything is root's.")
@click.option("--packages", multiple=True, metavar="'P ...'", help="Debian packages, in place of SOURCE.")
@click.option("--on", metavar="ENVIRONMENT", help="Only what the packages add to it; else a whole base.")
@click.option("--suite", help="Of the packages, like bookworm.  [default: the environment's, or the server's own]")
@click.option("--mirror", metavar="URL", help="Of the packages; the server's own otherwise.")
@click.option("--no-cache", "fresh", is_flag=True, help="Install packages again that were installed before.")
@click.option(
    "--kind",
    type=click.Choice(["base", "workspace", "toolkit"]),
    help="[default: workspace; of packages base, with --on toolkit]",
)
@_readers
@json_option
def build(
    arguments: tuple[str, ...],
    at: str | None,
    keep_owners: bool,
    packages: tuple[str, ...],
    on: str | None,
    suite: str | None,
    mirror: str | None,
    fresh: bool,
    kind: str | None,
    readers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make the layer NAME (like tools@1.0) of SOURCE, a directory or a tar archive (also compressed) on this machine,
    or of Debian packages and what they need: NAME --packages 'git curl'."""
    *sources, name = arguments
    wanted = [word for text in packages for word in text.replace(",", " ").split()]
    if packages and (sources or at or keep_owners or not wanted):
        raise InvalidRequest("--packages takes packages, and no SOURCE, --at or --keep-owners")
    if not packages and (len(sources) != 1 or on or suite or mirror or fresh):
        raise InvalidRequest(
            "it takes SOURCE and NAME, or NAME and --packages (with --on, --suite, --mirror, --no-cache)"
        )
    with Steps() as steps:
        if packages:
            found = _run(
                lambda client: client.catalog.build_packages(
                    wanted,
                    name,
                    on=on,
                    suite=suite,
                    mirror=mirror,
                    kind=kind,
                    fresh=fresh,
                    readers=readers,
                    on_step=steps.show,
                )
            )
        else:
            if not os.path.exists(sources[0]):
                raise InvalidRequest(f"there is no {sources[0]}")
            with _packed(sources[0], keep_owners=keep_owners) as path:
                found = _run(
                    lambda client: client.catalog.build(
                        path, name, at=at or "/", kind=kind or "workspace", readers=readers, on_step=steps.show
                    )
                )
    _made(found, as_json)


@layer.command("merge")
@click.argument("name")
@click.argument("layers", nargs=-1, required=True)
@_kind
@_readers
@json_option
def merge(name: str, layers: tuple[str, ...], kind: str, readers: tuple[str, ...], as_json: bool) -> None:
    """Make the layer NAME of several, given top first. Whiteouts are kept."""
    with Steps() as steps:
        found = _run(lambda client: client.catalog.merge(layers, name, kind=kind, readers=readers, on_step=steps.show))
    _made(found, as_json)


@layer.command("verify")
@click.argument("reference")
@json_option
def verify(reference: str, as_json: bool) -> None:
    """Read all of a layer and compare it with its digests."""
    with Steps() as steps:
        found = _run(lambda client: client.catalog.verify(reference, on_step=steps.show))
    if wants_json(as_json):
        write_json({"layer": found["digest"]})
    else:
        click.echo(found["digest"])


@layer.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Forget a layer's name. `dsec layer gc` deletes what nothing needs."""
    _run(lambda client: client.catalog.remove_layer(name))


@layer.command("gc")
@click.option(
    "--older-than",
    "least_age_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="What is younger stays.  [default: 3600]",
)
@json_option
def collect(least_age_s: float | None, as_json: bool) -> None:
    """Delete layers without a name that no sandbox stands on. With a key of the project `default`."""
    with Steps() as steps:
        freed = _run(lambda client: client.catalog.collect(least_age_s=least_age_s, on_step=steps.show))
    if wants_json(as_json):
        write_json({"freed_bytes": freed})
    else:
        click.echo(f"freed {readable(freed)}")


@layer.command("export")
@click.argument("reference")
@click.argument("file", type=click.Path())
def export(reference: str, file: str) -> None:
    """Write a layer to FILE, as a tar archive of the kind that OCI images hold."""
    with Steps() as steps:
        size = _run(lambda client: client.catalog.export(reference, file, on_step=steps.show))
    note(f"{readable(size)} written to {file}")


@click.command("create")
@click.argument("name")
@click.argument("layers", nargs=-1, required=True)
@click.option("--env", "env", multiple=True, metavar="K=V", help="A variable of all its sandboxes.")
@click.option("--user", help="Who runs commands.")
@click.option("--workdir", help="Where commands start.")
@click.option("--description", default="")
@_readers
@json_option
def create_environment(
    name: str,
    layers: tuple[str, ...],
    env: tuple[str, ...],
    user: str | None,
    workdir: str | None,
    description: str,
    readers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make the environment NAME of layers, given top first; env:NAME stands for all layers of an environment."""
    pairs = [text.partition("=") for text in env]
    if any(not key or not equals for key, equals, _ in pairs):
        raise InvalidRequest("--env takes K=V")
    made = _run(
        lambda client: client.catalog.create_environment(
            name,
            layers,
            env={key: value for key, _, value in pairs},
            user=user,
            workdir=workdir,
            description=description,
            readers=readers,
        )
    )
    if wants_json(as_json):
        write_json(made)
    else:
        click.echo(made["name"])


@click.command("build")
@click.argument("name")
@click.argument("context", type=click.Path(exists=True, file_okay=False), default=".")
@click.option("--file", "-f", "dockerfile", type=click.Path(exists=True, dir_okay=False), help="The Dockerfile.")
@click.option("--target", metavar="STAGE", help="The stage that counts; the last one otherwise.")
@click.option("--build-arg", "args", multiple=True, metavar="K[=V]", help="For ARG; without =V from this environment.")
@click.option("--no-cache", "fresh", is_flag=True, help="Do every step again.")
@network_option
@_platform
@_readers
@json_option
def build_environment(
    name: str,
    context: str,
    dockerfile: str | None,
    target: str | None,
    args: tuple[str, ...],
    fresh: bool,
    network: tuple[str, ...],
    platform: str | None,
    readers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make the environment NAME of a Dockerfile and the files beside it."""
    pairs = [text.partition("=") for text in args]
    found = _run(
        lambda client: client.catalog.build_dockerfile(
            context,
            name,
            dockerfile=dockerfile,
            target=target,
            args={key: value if equals else os.environ.get(key, "") for key, equals, value in pairs},
            network=grants(network),
            fresh=fresh,
            platform=platform,
            readers=readers,
            on_log=lambda line: click.echo(line, err=True),
        )
    )
    if wants_json(as_json):
        write_json(found)
    else:
        click.echo(found["environment"])


@click.command("show")
@click.argument("name", type=ENVIRONMENT)
@json_option
def show_environment(name: str, as_json: bool) -> None:
    """An environment's layers, top first, and which environments share them."""
    found = _run(lambda client: client.catalog.environment(name))
    if wants_json(as_json):
        write_json(found)
        return
    for text in drawn(found):
        click.echo(text)


def drawn(found: dict[str, Any]) -> Iterator[str]:
    """An environment and what shares its layers, a line each, that can be shown as it is."""
    yield from map(printable, _drawn(found))


def _drawn(found: dict[str, Any]) -> Iterator[str]:
    made, layers = found["environment"], found["layers"]
    yield f"{made['name']}  user {made.get('user', 'root')}, starts in {made.get('workdir', '/')}"
    for key, value in sorted(made.get("env", {}).items()):
        yield f"  {key}={value}"
    for number, each in enumerate(layers):
        size, unique = each.get("size_bytes", 0), each.get("unique_bytes")
        others = [other for other in each.get("environments", []) if other != made["name"]]
        shared = f"shared with {', '.join(others[:4])}{' and more' if len(others) > 4 else ''}" if others else "its own"
        if unique is not None and not others and size:
            shared += f", {100 - min(100, 100 * unique // size)} % of its data elsewhere too"
        corner = "`--" if number == len(layers) - 1 else "|--"
        label = each["names"][0] if each.get("names") else each.get("description", "")[:40]
        yield f"{corner} {each['digest'][:12]}  {each.get('kind', ''):10} {readable(size):>10}  {shared}  {label}"
    total = sum(each.get("size_bytes", 0) for each in layers)
    common = sum(each.get("size_bytes", 0) for each in layers if len(each.get("environments", [])) > 1)
    yield f"{readable(total)} in {len(layers)} layers, {readable(common)} shared"


@click.command("rm")
@click.argument("name", type=ENVIRONMENT)
def remove_environment(name: str) -> None:
    """Forget an environment; its sandboxes go on."""
    _run(lambda client: client.catalog.remove_environment(name))


def _made(found: dict[str, Any], as_json: bool) -> None:
    if wants_json(as_json):
        write_json(found)
    else:
        click.echo(found["name"])
        note(f"{readable(found['size_bytes'])}, layer {found['layer'][:12]}")


class _packed:
    """A directory as a temporary archive; an archive as it is."""

    def __init__(self, source: str, *, keep_owners: bool = True) -> None:
        self._source = source
        self._keep_owners = keep_owners
        self._temporary: str | None = None

    def __enter__(self) -> str:
        if not os.path.isdir(self._source):
            return self._source
        fd, self._temporary = tempfile.mkstemp(suffix=".tar")
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for folder, names, files in os.walk(self._source):
                names.sort()
                for name in sorted((*files, *names, *(("",) if folder == self._source else ()))):
                    path = os.path.join(folder, name) if name else folder
                    info = archive.gettarinfo(path, os.path.relpath(path, self._source))
                    if info is None:
                        continue  # a socket
                    if not self._keep_owners:
                        info.uid = info.gid = 0
                    info.uname = info.gname = ""
                    info.pax_headers = _beyond_tar(path)
                    if info.isreg():
                        with open(path, "rb") as data:
                            archive.addfile(info, data)
                    else:
                        archive.addfile(info)
        return self._temporary

    def __exit__(self, *_: object) -> None:
        if self._temporary is not None:
            os.unlink(self._temporary)


def _beyond_tar(path: str) -> dict[str, str]:
    """What a tar header can't hold: attributes, and the exact time."""
    seconds, nanoseconds = divmod(os.lstat(path).st_mtime_ns, 10**9)
    found = {"mtime": f"{seconds}.{nanoseconds:09}"} if nanoseconds and seconds >= 0 else {}
    with contextlib.suppress(OSError):  # a file system without attributes
        for name in os.listxattr(path, follow_symlinks=False):
            value = os.getxattr(path, name, follow_symlinks=False)
            found[f"SCHILY.xattr.{name}"] = value.decode("utf-8", "surrogateescape")
    return found


for _command in (build_environment, create_environment, show_environment, remove_environment):
    environment.add_command(_command)

COMMANDS = (layer,)
