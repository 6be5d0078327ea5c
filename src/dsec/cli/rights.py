"""Verbs about rights in a cluster: `project`, `role`, and the reading side of `audit`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from dsec import AsyncClient
from dsec.cli import signals
from dsec.cli.output import age, json_option, wants_json, write_json, write_table
from dsec.errors import InvalidRequest
from dsec.sdk._rights import AsyncRights

T = TypeVar("T")
_LIMITS = {"sandboxes": int, "cpus": float, "memory_bytes": int, "creates_per_s": float}
_QUOTA = click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="LIMIT=N",
    help="sandboxes, cpus, memory_bytes, creates_per_s, or backends.NAME; of it and all below it.",
)


@click.group("project")
def project() -> None:
    """Projects of a cluster, below that of the key."""


@project.command("ls")
@json_option
def list_projects(as_json: bool) -> None:
    """Projects with their quotas, and what lives in them and below."""
    found = _ask(lambda rights: rights.projects())
    if wants_json(as_json):
        write_json(found)
        return
    rows = [(each["path"], str(each["live"]), f"{each['weight']:g}", _said(each["quota"])) for each in found]
    write_table(["project", "live", "weight", "quota"], rows, empty="no projects on record")


@project.command("create")
@click.argument("path")
@_QUOTA
@click.option("--weight", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
@json_option
def create_project(path: str, quotas: tuple[str, ...], weight: float, as_json: bool) -> None:
    """Make a project within another (`lab/team`). Names are used once."""
    made = _ask(lambda rights: rights.create_project(path, quota=_quota(quotas), weight=weight))
    write_json(made) if as_json else click.echo(made["path"])


@project.command("set")
@click.argument("path")
@_QUOTA
@click.option("--no-quota", is_flag=True, help="Only what its parents allow.")
@click.option("--weight", type=click.FloatRange(0, min_open=True))
@json_option
def set_project(path: str, quotas: tuple[str, ...], no_quota: bool, weight: float | None, as_json: bool) -> None:
    """Another quota (all its limits) or weight; takes the right to make projects in its parent."""
    quota = {} if no_quota else _quota(quotas) if quotas else None
    made = _ask(lambda rights: rights.change_project(path, quota=quota, weight=weight))
    write_json(made) if as_json else click.echo(_said(made["quota"]))


@project.command("rm")
@click.argument("path")
def delete_project(path: str) -> None:
    """Delete it and all below it: keys are refused from now on, sandboxes are ended."""
    _ask(lambda rights: rights.delete_project(path))


@click.group("role")
def role() -> None:
    """Who may do what in a project."""


@role.command("ls")
@click.option("--project", "path", help="And those below it (default: the key's).")
@json_option
def list_roles(path: str | None, as_json: bool) -> None:
    """Roles on a project and those below it."""
    found = _ask(lambda rights: rights.roles(path))
    if wants_json(as_json):
        write_json(found)
        return
    rows = [(each["id"], each["principal"], each["project"], " ".join(sorted(each["verbs"]))) for each in found]
    write_table(["id", "principal", "project", "may"], rows, empty="no roles")


@role.command("give")
@click.argument("principal")
@click.argument("name", required=False)
@click.option("--verb", "verbs", multiple=True, help="A single permission, such as sandboxes.create.")
@click.option("--project", "path", help="Default: the key's.")
@click.option("--ttl-s", type=click.FloatRange(0, min_open=True), help="It ends so long from now.")
@json_option
def give_role(  # noqa: PLR0917 (click passes by name)
    principal: str, name: str | None, verbs: tuple[str, ...], path: str | None, ttl_s: float | None, as_json: bool
) -> None:
    """Give a role (viewer, solver, builder, grader, agent, admin, operator) to person:, agent: or service:NAME."""
    made = _ask(lambda rights: rights.give_role(principal, name, verbs=list(verbs) or None, project=path, ttl_s=ttl_s))
    write_json(made) if as_json else click.echo(made["id"])


@role.command("take")
@click.argument("role_id")
def take_role(role_id: str) -> None:
    """Take a role away, and all that was given by it."""
    _ask(lambda rights: rights.take_role(role_id))


def show_audit(after: int, limit: int, as_json: bool) -> None:
    """`dsec audit`: what was changed and refused."""
    entries, _ = _ask(lambda rights: rights.audit(after, limit))
    if wants_json(as_json):
        write_json(entries)
        return
    now = time.time()
    rows = [
        (str(each["number"]), age(now - each["at"]), each["what"], each["project"], each.get("about", ""), each["by"])
        for each in entries
    ]
    write_table(["number", "age", "what", "project", "about", "by"], rows, empty="nothing")


def _ask(work: Callable[[AsyncRights], Awaitable[T]]) -> T:
    async def run() -> T:
        async with AsyncClient() as client:
            return await work(client.rights)

    return signals.run(run())


def _quota(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        kind = int if name.startswith("backends.") else _LIMITS.get(name)
        try:
            if kind is None or not sign:
                raise ValueError
            value = kind(text)
        except ValueError:
            known = ", ".join(_LIMITS)
            raise InvalidRequest(f"{pair!r} is no limit", remedy=f"LIMIT=N: {known}, backends.NAME") from None
        if name.startswith("backends."):
            found.setdefault("backends", {})[name[9:]] = value
        else:
            found[name] = value
    return found


def _said(quota: dict[str, Any]) -> str:
    flat = {name: limit for name, limit in quota.items() if name != "backends" and limit is not None}
    flat |= {f"backends.{name}": limit for name, limit in quota.get("backends", {}).items()}
    return " ".join(f"{name}={limit:g}" for name, limit in flat.items())


COMMANDS = [project, role]
