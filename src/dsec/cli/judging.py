"""`judge`: a program against a problem's cases, or all submissions of a problem against their known verdicts."""

from __future__ import annotations

from pathlib import Path

import click

from dsec import AsyncClient, CaseVerdict, Judged, Problem
from dsec.cli import signals
from dsec.cli.output import EXIT_PLATFORM, json_option, wants_json, write_json, write_table
from dsec.errors import InvalidRequest
from dsec.spec.judging import Language, Word


@click.command("judge")
@click.argument("problem", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("submission", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--language", type=click.Choice([str(each) for each in Language]), help="Else the file's suffix says it.")
@click.option("--environment", default="debian", show_default=True)
@click.option("--stop-early", is_flag=True, help="Begin no case after the first one that isn't accepted.")
@json_option
def judge(  # noqa: PLR0917 (click passes by name)
    problem: Path, submission: Path | None, language: str | None, environment: str, stop_early: bool, as_json: bool
) -> int:
    """Judge SUBMISSION by the cases in the directory PROBLEM (docs/JUDGE.md). Exit code 1: it isn't accepted.

    Without a SUBMISSION: all those in PROBLEM/submissions. Exit code 1: one got another verdict than it is known to.
    """
    found = Problem.read(problem)
    if submission is None:
        return signals.run(_all(found, environment, as_json))
    spec = found.spec(submission, language, environment=environment, stop_early=stop_early)
    shown = not wants_json(as_json)

    async def work() -> Judged:
        async with AsyncClient() as client:
            return await client.judge(spec, on_case=_show if shown else None)

    judged = signals.run(work())
    if shown:
        click.echo(f"{judged.verdict}: {judged.passed} of {judged.total}")
    else:
        write_json(judged)
    return EXIT_PLATFORM if judged.infra else 0 if judged.verdict is Word.ACCEPTED else 1


async def _all(problem: Problem, environment: str, as_json: bool) -> int:
    if not problem.submissions:
        raise InvalidRequest(f"{problem.name} has no submissions", remedy="Name one, or see docs/JUDGE.md.")
    specs = [problem.spec(each.path, environment=environment) for each in problem.submissions]
    async with AsyncClient() as client:
        results = [result async for result in client.judge_many(specs)]
    judged = [each.unwrap() for each in sorted(results, key=lambda each: each.index)]
    rows = [
        (f"{each.path.parent.name}/{each.path.name}", str(got.verdict), "" if got.verdict is each.expected else "NO")
        for each, got in zip(problem.submissions, judged, strict=True)
    ]
    wrong = sum(bool(row[2]) for row in rows)
    if wants_json(as_json):
        write_json([{"submission": name, "verdict": verdict, "as_known": not mark} for name, verdict, mark in rows])
    else:
        write_table(["submission", "verdict", ""], rows)
    if any(each.infra for each in judged):
        return EXIT_PLATFORM
    return 1 if wrong else 0


def _show(case: CaseVerdict) -> None:
    where = "compiling" if case.index < 0 else f"case {case.index + 1}"
    cost = f"{case.cpu_s * 1e3:.0f} ms CPU, {case.wall_s * 1e3:.0f} ms, {case.memory_bytes / (1 << 20):.0f} MiB"
    click.echo(f"{where}: {case.verdict} ({cost}){': ' + case.message if case.message else ''}")
    if case.verdict is Word.COMPILE_ERROR:
        click.echo(case.stderr.rstrip(), err=True)


COMMANDS: tuple[click.Command, ...] = (judge,)
