"""`verify`: judge a sandbox's changes in a fresh one."""

from __future__ import annotations

from pathlib import Path

import click

from dsec import AsyncClient, Grader, Verdict
from dsec.cli import signals
from dsec.cli.complete import SANDBOX
from dsec.cli.output import EXIT_PLATFORM, json_option, wants_json, write_json
from dsec.cli.sandboxes import pairs
from dsec.errors import InvalidRequest
from dsec.spec.grading import ReportKind, Scoring


@click.command("verify", context_settings={"ignore_unknown_options": True})
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--path", "paths", multiple=True, required=True, metavar="PATH", help="Changes of this count; several times."
)
@click.option("--file", "files", multiple=True, metavar="PATH=LOCAL", help="A hidden file, of a local one's content.")
@click.option("--layer", "layers", multiple=True, metavar="NAME", help="A layer with hidden files.")
@click.option("--user", default="nobody", show_default=True, help="Who the grader is in its sandbox.")
@click.option("--cwd", help="Where it runs; the sandbox's workdir otherwise.")
@click.option("--env", "variables", multiple=True, metavar="K=V", help="A variable of the grader's.")
@click.option("--report", type=click.Choice([str(kind) for kind in ReportKind]), default="exit", show_default=True)
@click.option("--scoring", type=click.Choice([str(kind) for kind in Scoring]), default="all", show_default=True)
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True)
@click.option("-k", "--repeats", type=click.IntRange(1, 20), default=1, help="So many graders; they have to agree.")
@json_option
def verify(  # noqa: PLR0917 (click passes by name)
    sandbox_id: str,
    command: tuple[str, ...],
    paths: tuple[str, ...],
    files: tuple[str, ...],
    layers: tuple[str, ...],
    user: str,
    cwd: str | None,
    variables: tuple[str, ...],
    report: str,
    scoring: str,
    timeout_s: float,
    repeats: int,
    as_json: bool,
) -> int:
    """Judge what was changed in a sandbox, by a command in a fresh one. Exit code 1: the reward is below 1."""
    hidden = {}
    for path, local in pairs(files).items():
        try:
            hidden[path] = Path(local).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{local}: {error.strerror}", field="files") from None
    grader = Grader(
        argv=list(command),
        files=hidden,
        layers=list(layers),
        user=user,
        cwd=cwd,
        env=pairs(variables),
        report=ReportKind(report),
        scoring=Scoring(scoring),
        timeout_s=timeout_s,
    )

    async def work() -> Verdict:
        async with AsyncClient() as client:
            sandbox = await client.connect(sandbox_id)
            return await sandbox.verify(grader, paths=paths, repeats=repeats)

    verdict = signals.run(work())
    if wants_json(as_json):
        write_json(verdict)
    else:
        _show(verdict)
    if verdict.infra:
        return EXIT_PLATFORM
    return 0 if verdict.reward == 1 and not verdict.flaky else 1


COMMANDS: tuple[click.Command, ...] = (verify,)


def _show(verdict: Verdict) -> None:
    reward = "none: the platform failed" if verdict.reward is None else f"{verdict.reward:g}"
    click.echo(f"reward {reward}{', flaky' if verdict.flaky else ''}")
    for run in verdict.runs:
        counts = f", {run.passed} passed, {run.failed} failed" if run.tests else ""
        click.echo(f"  exit code {run.exit_code}{counts}{': ' + run.message if run.message else ''}")
    click.echo(f"taken {verdict.taken_total}, not taken {verdict.untaken_total}")
    for each in verdict.untaken[:20]:
        click.echo(f"  {each.why}: {each.path} ({each.kind})")
