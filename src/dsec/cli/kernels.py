"""`dsec kernel`: the kernels that this node's virtual machines boot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dsec.cli.host import _needs_server
from dsec.cli.output import json_option, wants_json, write_json, write_table

if TYPE_CHECKING:
    from dsec.store.kernels import KernelStore

_state = click.option(
    "--state", type=click.Path(path_type=Path), help="State directory (default: DSEC_STATE, /var/lib/dsec)."
)


@click.group("kernel")
def kernel_group() -> None:
    """Kernels for virtual machines, on this node. A server that runs takes the new one for its next template."""


@kernel_group.command("import")
@click.argument("package", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_state
@json_option
def import_kernel(package: Path | None, state: Path | None, as_json: bool) -> None:
    """Take the kernel of a Debian kernel package: PACKAGE, a file, or the distribution's kernel for clouds."""
    _show(_store(state).import_package(package, click.echo if not wants_json(as_json) else None), as_json)


@kernel_group.command("build")
@click.argument("source", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--jobs", type=click.IntRange(1, 1024), help="Compilers at the same time (default: as there are CPUs).")
@_state
@json_option
def build_kernel(source: Path | None, jobs: int | None, state: Path | None, as_json: bool) -> None:
    """Compile a small kernel with everything built in, which boots in a fraction of the time: of SOURCE, a tar archive,
    or of the distribution's source package. About ten minutes on two CPUs, once."""
    _show(_store(state).build(source, click.echo if not wants_json(as_json) else None, jobs=jobs or 0), as_json)


@kernel_group.command("list")
@_state
@json_option
def list_kernels(state: Path | None, as_json: bool) -> None:
    """The kernels that are here; machines boot with the first."""
    found = _store(state).list()
    if wants_json(as_json):
        write_json([msgspec.to_builtins(each) for each in found])
    else:
        rows = [
            (each.digest[:12], each.release, each.origin, each.machine, f"{each.size_bytes >> 20} MiB", each.source)
            for each in found
        ]
        write_table(["digest", "release", "", "machine", "size", "of"], rows)


@kernel_group.command("remove")
@click.argument("digest")
@_state
def remove_kernel(digest: str, state: Path | None) -> None:
    """Remove a kernel; machines that run go on."""
    _store(state).remove(digest)


def _store(state: Path | None) -> KernelStore:
    try:
        from dsec.configuration import read_config
        from dsec.store.kernels import KernelStore
    except ImportError as error:
        raise _needs_server(error) from error
    return KernelStore(read_config(state).state)


def _show(kernel: object, as_json: bool) -> None:
    found = msgspec.to_builtins(kernel)
    if wants_json(as_json):
        write_json(found)
    else:
        click.echo(f"{found['release']} ({found['origin']}, {found['size_bytes'] >> 20} MiB): {found['digest'][:12]}")


COMMANDS: tuple[click.Command, ...] = (kernel_group,)
