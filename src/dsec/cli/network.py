"""`network`: what a sandbox may reach, now and from now on; and how permissions are written as options."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from dsec import AsyncClient, NetworkInfo
from dsec.cli import signals
from dsec.cli.complete import SANDBOX
from dsec.cli.output import json_option, wants_json, write_json, write_table
from dsec.errors import InvalidRequest
from dsec.spec.network import Network, PermissionOptions

network_option = click.option(
    "--network",
    "network",
    multiple=True,
    metavar="PERMISSION",
    help="What it may reach: pypi, git:HOST/PATH, host:NAME[:PORT], ... Options: PERMISSION,before=DATE,...",
)


@click.command("network")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.option("--allow", multiple=True, metavar="PERMISSION", help="Grant this too.")
@click.option("--deny", multiple=True, metavar="PERMISSION", help="Take this away.")
@click.option(
    "--set", "only", multiple=True, metavar="PERMISSION", help="Grant this, and nothing else but other --set."
)
@click.option("--none", "nothing", is_flag=True, help="Take everything away.")
@json_option
@click.pass_context
def network(  # noqa: PLR0917 (click passes by name)
    context: click.Context,
    sandbox_id: str,
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    only: tuple[str, ...],
    nothing: bool,
    as_json: bool,
) -> None:
    """What a sandbox may reach; with options: change it, at once and for open connections too.

    `dsec events ID --follow` shows its connections.
    """
    if bool(only) + nothing + bool(allow or deny) > 1:
        raise click.UsageError("--allow and --deny change the policy, --set and --none replace it: use one", context)

    async def work() -> NetworkInfo:
        async with AsyncClient() as client:
            sandbox = await client.connect(sandbox_id)
            if only or nothing:
                return await sandbox.network.set(grants(only))
            if allow or deny:
                return await sandbox.network.update({**grants(allow), **dict.fromkeys(deny, False)})
            return await sandbox.network.get()

    info = signals.run(work())
    if wants_json(as_json):
        write_json(msgspec.to_builtins(info))
        return
    rows = [(name, _shown(grant)) for name, grant in sorted(info.policy.items())]
    write_table(["permission", "granted"], rows, empty="it reaches nothing")


def grants(texts: tuple[str, ...]) -> Network:
    """`PERMISSION` or `PERMISSION,option=value,...`. A list's values are separated by `+`. Raises `InvalidRequest`."""
    found: Network = {}
    for text in texts:
        name, *options = text.split(",")
        try:
            fields = {key: _value(key, value) for key, _, value in (option.partition("=") for option in options)}
            found[name] = msgspec.convert(fields, PermissionOptions, strict=False) if fields else True
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{text!r}: {error}") from None
    return found


def _value(key: str, value: str) -> Any:
    if key in ("paths", "methods", "ports"):
        return value.split("+")
    return value or "true"


def _shown(grant: bool | PermissionOptions) -> str:
    if isinstance(grant, bool):
        return "yes" if grant else "no"
    return ", ".join(f"{name}={value}" for name, value in msgspec.to_builtins(grant).items()) or "yes"


COMMANDS: tuple[click.Command, ...] = (network,)
