"""`dsec disk`: the disks that this node's full virtual machines boot from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from dsec.cli.host import _needs_server
from dsec.cli.output import json_option, readable, wants_json, write_json, write_table

if TYPE_CHECKING:
    from dsec.vmm.images import ImageStore

_state = click.option(
    "--state", type=click.Path(path_type=Path), help="State directory (default: DSEC_STATE, /var/lib/dsec)."
)


@click.group("disk")
def disk_group() -> None:
    """Disks for full virtual machines (backend vm), on this node. A machine's environment is the name of one."""


@disk_group.command("build")
@click.argument("name", default="debian")
@click.option("--package", "packages", multiple=True, help="A Debian package to have in it; may be repeated.")
@_state
@json_option
def build_disk(name: str, packages: tuple[str, ...], state: Path | None, as_json: bool) -> None:
    """Make NAME (debian): a small Debian with systemd and our guest, of what this host's apt reaches."""
    _show(_store(state).build(name, packages, click.echo if not wants_json(as_json) else None), as_json)


@disk_group.command("import")
@click.argument("image", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("name")
@click.option("--firmware", type=click.Choice(["uefi", "bios"]), default="uefi", help="What it boots by (uefi).")
@click.option("--machine", type=click.Choice(["q35", "pc"]), default="q35", help="The board (q35).")
@click.option("--pointer", type=click.Choice(["virtio", "usb"]), default="virtio", help="The tablet (virtio).")
@click.option(
    "--guest/--no-guest",
    default=True,
    help="Whether it starts our guest, by cloud-init or as a service (docs/VM.md). Without: screen and console alone.",
)
@click.option("--boot-s", type=float, default=600.0, help="When a boot has failed (600).")
@_state
@json_option
def import_disk(  # noqa: PLR0917 (click passes by name)
    image: Path,
    name: str,
    firmware: Literal["uefi", "bios"],
    machine: Literal["q35", "pc"],
    pointer: Literal["virtio", "usb"],
    guest: bool,
    boot_s: float,
    state: Path | None,
    as_json: bool,
) -> None:
    """Take a bootable disk, raw or qcow2, as NAME. One that names other files is refused."""
    store = _store(state)
    from dsec.vmm.images import Traits

    traits = Traits(firmware=firmware, machine=machine, pointer=pointer, guest=guest, boot_s=boot_s)
    _show(store.import_file(image, name, traits, click.echo if not wants_json(as_json) else None), as_json)


@disk_group.command("list")
@_state
@json_option
def list_disks(state: Path | None, as_json: bool) -> None:
    """The disks that are here."""
    found = _store(state).list()
    if wants_json(as_json):
        write_json([msgspec.to_builtins(each) for each in found])
        return
    rows = [
        (
            ", ".join(each.names) or "-",
            each.digest[:12],
            readable(each.size_bytes),
            f"{each.traits.firmware}, {each.traits.machine}",
            "yes" if each.traits.guest else "no",
            each.source,
        )
        for each in found
    ]
    write_table(["name", "digest", "size", "boots by", "guest", "of"], rows)


@disk_group.command("remove")
@click.argument("name")
@_state
def remove_disk(name: str, state: Path | None) -> None:
    """Remove a disk by its name or digest; machines that run go on."""
    _store(state).remove(name)


def _store(state: Path | None) -> ImageStore:
    try:
        from dsec.configuration import read_config
        from dsec.vmm.images import ImageStore
    except ImportError as error:
        raise _needs_server(error) from error
    return ImageStore(read_config(state).state)


def _show(image: object, as_json: bool) -> None:
    found: dict[str, Any] = msgspec.to_builtins(image)
    if wants_json(as_json):
        write_json(found)
    else:
        click.echo(f"{', '.join(found['names'])}: {readable(found['size_bytes'])}, {found['digest'][:12]}")


COMMANDS: tuple[click.Command, ...] = (disk_group,)
