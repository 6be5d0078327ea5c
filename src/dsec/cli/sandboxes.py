"""Verbs about sandboxes, environments and keys."""

from __future__ import annotations

import time
from typing import Any

import click

from dsec import AsyncClient, KeyPolicy, SandboxInfo
from dsec.cli import signals
from dsec.cli.complete import SANDBOX
from dsec.cli.network import grants
from dsec.cli.output import age, complain, json_option, readable, wants_json, write_json, write_table
from dsec.errors import DsecError, InvalidRequest


@click.command("ls")
@click.option("--all", "everything", is_flag=True, help="Ended ones too.")
@click.option("--run", help="Of one run.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="With this label; all must match.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many.")
@json_option
def list_sandboxes(
    everything: bool, run: str | None, labels: tuple[str, ...], limit: int | None, as_json: bool
) -> None:
    """List sandboxes."""
    states = ["queued", "starting", "running", "paused", "ending", "ended"] if everything else []

    async def work() -> list[SandboxInfo]:
        async with AsyncClient() as client:
            return await client.list(states=states, run=run, labels=pairs(labels), limit=limit)

    infos = signals.run(work())
    if wants_json(as_json):
        write_json(infos)
        return
    now = time.time()
    write_table(
        ["id", "state", "environment", "run", "name", "age", "cpus", "memory", "cause"],
        [
            (
                info.id,
                info.state,
                info.spec.environment,
                info.spec.run,
                info.spec.name,
                age(now - info.created_at),
                f"{info.spec.cpus:g}",
                readable(info.spec.memory_bytes),
                info.cause,
            )
            for info in infos
        ],
        empty="no sandboxes",
    )


@click.command("kill")
@click.argument("ids", nargs=-1, type=SANDBOX)
@click.option("--run", help="All of a run.")
@click.option("--all", "everything", is_flag=True, help="All of the project.")
@json_option
@click.pass_context
def kill(context: click.Context, ids: tuple[str, ...], run: str | None, everything: bool, as_json: bool) -> int:
    """End sandboxes, named by their ids or by --run."""
    if bool(ids) + bool(run) + everything != 1:
        raise click.UsageError("name sandboxes by their ids, or use one of --run and --all", context)

    async def work() -> tuple[list[str], dict[str, DsecError]]:
        async with AsyncClient() as client:
            named = list(ids) or [info.id for info in await client.list(run=run)]
            return named, await client.kill_many(named)

    named, errors = signals.run(work())
    if wants_json(as_json):
        write_json([{"id": each, "error": errors[each].body() if each in errors else None} for each in named])
    else:
        for each in named:
            if each not in errors:
                click.echo(each)
    for error in errors.values():
        complain(error)
    return 2 if errors else 0


@click.group("env")
def environment() -> None:
    """Environments that sandboxes can be made of."""


@environment.command("ls")
@json_option
def list_environments(as_json: bool) -> None:
    """List environments."""

    async def work() -> dict[str, list[str]]:
        async with AsyncClient() as client:
            return await client.environments()

    found = signals.run(work())
    if wants_json(as_json):
        write_json([{"name": name, "layers": layers} for name, layers in found.items()])
    else:
        rows = [(name, "  ".join(layer[:12] for layer in layers)) for name, layers in found.items()]
        write_table(["name", "layers, top first"], rows, empty="no environments")


@click.group("key")
def key() -> None:
    """API keys of the project."""


@key.command("create")
@click.argument("label", default="")
@click.option("--allow", multiple=True, metavar="PERMISSION", help="It may grant this (`*` at the end: any ending).")
@click.option("--internet", is_flag=True, help="It may grant `internet`.")
@click.option("--private", is_flag=True, help="It may grant private addresses.")
@click.option("--default", multiple=True, metavar="PERMISSION", help="What E2B's sandboxes get when they don't say.")
@click.option("--project", "path", help="In a cluster: of this one, at or below the key's.")
@click.option("--principal", help="In a cluster: it uses the roles of this person:, agent: or service:NAME.")
@click.option("--scope", "scopes", multiple=True, help="In a cluster: it may at most this, such as sandboxes.create.")
@click.option("--ttl-s", type=click.FloatRange(0, min_open=True), help="In a cluster: it ends so long from now.")
@json_option
def create_key(  # noqa: PLR0917 (click passes by name)
    label: str,
    allow: tuple[str, ...],
    internet: bool,
    private: bool,
    default: tuple[str, ...],
    path: str | None,
    principal: str | None,
    scopes: tuple[str, ...],
    ttl_s: float | None,
    as_json: bool,
) -> None:
    """Make a key. It is shown this once. Without options it may do and grant what the key that makes it may."""
    policy = None
    if allow or internet or private or default:
        policy = KeyPolicy(allow=allow or ("*",), internet=internet, private=private, default=grants(default))

    async def work() -> str:
        async with AsyncClient() as client:
            if path is None and principal is None and not scopes and ttl_s is None:
                return await client.create_key(label, policy=policy)
            made = await client.rights.create_key(
                label, project=path, principal=principal, scopes=list(scopes) or None, ttl_s=ttl_s, policy=policy
            )
            return str(made["key"])

    made = signals.run(work())
    if as_json:
        write_json({"key": made, "label": label})
    else:
        click.echo(made)


@key.command("revoke")
@click.argument("key_id")
def revoke_key(key_id: str) -> None:
    """Revoke a key by its id (see `dsec key ls`)."""

    async def work() -> None:
        async with AsyncClient() as client:
            await client.revoke_key(key_id)

    signals.run(work())


@key.command("rotate")
@click.argument("key_id")
@click.option("--overlap-s", type=click.FloatRange(0, 604800), default=300.0, show_default=True)
@json_option
def rotate_key(key_id: str, overlap_s: float, as_json: bool) -> None:
    """In a cluster: a new key with the same rights; the old one is good for a while more."""

    async def work() -> dict[str, Any]:
        async with AsyncClient() as client:
            return await client.rights.rotate_key(key_id, overlap_s=overlap_s)

    made = signals.run(work())
    write_json(made) if as_json else click.echo(made["key"])


@key.command("ls")
@json_option
def list_keys(as_json: bool) -> None:
    """List keys; the keys themselves are not kept."""

    async def work() -> list[dict[str, Any]]:
        async with AsyncClient() as client:
            return await client.list_keys()

    keys = signals.run(work())
    if wants_json(as_json):
        write_json(keys)
        return
    now = time.time()
    write_table(
        ["id", "label", "age", "state"],
        [
            (
                each["id"],
                each.get("label", ""),
                age(now - each.get("created_at", 0.0)),
                "revoked" if "revoked_at" in each else "",
            )
            for each in keys
        ],
        empty="no keys",
    )


def pairs(texts: tuple[str, ...]) -> dict[str, str]:
    """`K=V` arguments. Raises `InvalidRequest`."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise InvalidRequest(f"{text!r} is not of the form K=V")
        found[name] = value
    return found


COMMANDS: tuple[click.Command, ...] = (list_sandboxes, kill, environment, key)
