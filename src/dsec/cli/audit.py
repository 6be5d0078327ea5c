"""`dsec audit`: does a server hold what it claims?"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from dsec.cli.output import json_option, wants_json, write_json, write_table
from dsec.cli.rights import show_audit
from dsec.errors import InvalidRequest, Unsupported

EXIT_FAILED = 1


@click.command("audit")
@click.option("--self-test", is_flag=True, help="Try the catalogue of misbehaviour in real sandboxes.")
@click.option("--after", type=click.IntRange(0), default=0, help="Entries of a cluster after this number.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="So many of them.")
@click.option("--environment", default="debian", show_default=True, help="Of which; with python3 and git.")
@click.option("--backend", default="container", show_default=True, help="Of which kind.")
@click.option("--group", "groups", multiple=True, help="These groups of cases only.")
@click.option("--case", "names", multiple=True, help="These cases only.")
@click.option("--running", is_flag=True, help="Use the server that runs, instead of one that is started for it.")
@click.option("--state", type=click.Path(path_type=Path), help="State directory of the server to start (DSEC_STATE).")
@json_option
def audit(  # noqa: PLR0917 (click passes by name)
    self_test: bool,
    after: int,
    limit: int,
    environment: str,
    backend: str,
    groups: tuple[str, ...],
    names: tuple[str, ...],
    running: bool,
    state: Path | None,
    as_json: bool,
) -> int:
    """What was changed and refused in a cluster's project: keys, roles, projects, nodes, calls without a right.

    With --self-test: misbehave in sandboxes in every way of the catalogue, and say what was expected and what was seen.
    Exit code 1 where a case isn't as expected.
    """
    if not self_test:
        show_audit(after, limit, as_json)
        return 0
    try:
        from dsec.rollout.server import LocalServer, default_state
        from dsec.testing.misbehaviour import CASES, Arena, Outcome, run_cases
    except ImportError as error:
        raise Unsupported(
            f"this needs the server's packages: {error.name}", remedy="pip install 'dsec[server]'"
        ) from error
    from dsec.sdk._client import AsyncClient

    cases = [c for c in CASES if (not groups or c.group in groups) and (not names or c.id in names)]
    if not cases:
        known = ", ".join(sorted({case.group for case in CASES}))
        raise InvalidRequest("no case is chosen", remedy=f"The groups are: {known}.")
    done = 0

    def told(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            click.echo(f"\r{done} of {len(cases)}  {outcome.case}".ljust(60), nl=done == len(cases), err=True)

    async def work() -> list[Outcome]:
        if running:
            async with AsyncClient() as client:
                return await run_cases(Arena(client, environment, backend), cases, told)
        server = await LocalServer.start(state or default_state())
        try:
            return await run_cases(Arena(server.client, environment, backend), cases, told)
        finally:
            await server.stop()

    outcomes = asyncio.run(work())
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if wants_json(as_json):
        write_json(_report(outcomes, backend))
    else:
        words = {True: "ok", False: "FAILED"}
        rows = [
            (o.case, o.group, "skipped" if o.skipped else words[o.ok], o.expected, o.observed, o.why) for o in outcomes
        ]
        write_table(["case", "group", "", "expected", "observed", "why"], rows)
        skipped = sum(outcome.skipped for outcome in outcomes)
        click.echo(f"{len(outcomes)} cases: {len(failed)} failed, {skipped} skipped")
    return EXIT_FAILED if failed else 0


def _report(outcomes: list[Any], backend: str) -> dict[str, Any]:
    return {
        "backend": backend,
        "ok": all(outcome.ok for outcome in outcomes),
        "failed": [outcome.case for outcome in outcomes if not outcome.ok],
        "skipped": [outcome.case for outcome in outcomes if outcome.skipped],
        "cases": outcomes,
    }


COMMANDS: tuple[click.Command, ...] = (audit,)
