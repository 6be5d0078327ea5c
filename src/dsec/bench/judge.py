"""The judge: many submissions of some cases each, against the CPU time that their cases use.

`vs_cpu` is the time that it took, over the sum of the cases' CPU time spread over the machine's cores (`--cores`): 1
would be no cost but that of the programs themselves. `cpu_vs_cases` is the CPU time of everything that took part
(server, zygote, sandboxes, this client) over that of the cases: where all cores are busy with it alone, that is what
`vs_cpu` comes to. `python` and `c` are the languages; each submission has a source of its own, so a compiled one is
compiled too (`--language c` counts that as cost). Starts a server of its own and stops it. Exit code 1 where a verdict
was not the right one.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from dsec import AsyncClient, Case, JudgeSpec
from dsec.bench import load, meter
from dsec.bench.output import say, write_result
from dsec.bench.rounds import percentile
from dsec.configuration import read_config
from dsec.kernel.cgroups import CgroupRoot
from dsec.rollout.server import LocalServer, default_state, run
from dsec.spec.judging import Judged, JudgeLimits, Language, Word

_PYTHON = "# {name}\nn = int(input())\ntotal = 0\nfor i in range({rounds}):\n    total += i\nprint(n + 1)\n"
_C = """/* {name} */
#include <stdio.h>
int main(void) {{
    volatile unsigned total = 0;
    int n;
    if (scanf("%d", &n) != 1) return 1;
    for (unsigned i = 0; i < {rounds}u; i++) total += i;
    printf("%d\\n", n + 1);
    return 0;
}}
"""
_SOURCES = {Language.PYTHON: (_PYTHON, 400_000), Language.C: (_C, 20_000_000)}
"""Source, and rounds to calibrate by."""


class Plan(Struct, frozen=True):
    """What to judge."""

    environment: str
    language: Language
    submissions: int
    cases: int
    case_ms: float
    at_once: int
    cores: int


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--environment", default="debian", show_default=True)
@click.option("--language", type=click.Choice(["python", "c"]), default="python", show_default=True)
@click.option("--submissions", type=click.IntRange(1, 100_000), default=1000, show_default=True)
@click.option("--cases", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Of each.")
@click.option(
    "--case-ms", type=click.FloatRange(1, 10_000), default=50.0, show_default=True, help="CPU time of a case."
)
@click.option("--at-once", type=click.IntRange(1, 1000), default=8, show_default=True, help="Submissions.")
@click.option("--cores", type=click.IntRange(1, 1024), default=os.cpu_count() or 1, show_default=True)
@click.option("--state", type=click.Path(path_type=Path), help="State directory of the server (DSEC_STATE).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(state: Path | None, as_json: bool, language: str, **fields: Any) -> int:
    _, loop_factory = load.event_loop()
    plan = Plan(language=Language(language), **fields)
    result = run(measure(plan, state or default_state()), loop_factory)
    write_result(result, as_json=as_json)
    return 1 if result["failures"] else 0


def main(arguments: list[str]) -> int:
    """Run with these arguments; returns the exit code."""
    return int(command.main(arguments, prog_name="dsec bench judge", standalone_mode=False) or 0)


async def measure(plan: Plan, state: Path) -> dict[str, Any]:
    """All figures, by their keys. Raises `DsecError` where the server doesn't start or nothing can be judged."""
    server = await LocalServer.start(state)
    try:
        rounds = await _calibrated(server.client, plan)
        used = _Used(server, state)
        before, began = used.parts(), time.perf_counter()
        judged: list[Judged] = []
        errors: list[str] = []
        async for each in server.client.judge_many(_specs(plan, rounds), at_once=plan.at_once):
            if each.judged is None:
                errors.append(str(each.error))
            else:
                judged.append(each.judged)
        seconds = time.perf_counter() - began
        parts = {name: now - before[name] for name, now in used.parts().items()}
    finally:
        await server.stop()
    cases = [case for each in judged for case in each.cases]
    cases_s = sum(case.cpu_s for case in cases)
    words = Counter(case.verdict.value for case in cases)
    wrong = plan.submissions * plan.cases - words[Word.ACCEPTED.value]
    say(f"{len(cases)} cases of {cases_s / max(1, len(cases)) * 1e3:.1f} ms in {seconds:.1f} s")
    return {
        "vs_cpu": round(seconds / (cases_s / plan.cores), 3) if cases_s else None,
        "cpu_vs_cases": round(sum(parts.values()) / cases_s, 3) if cases_s else None,
        "cases_per_s": round(len(cases) / seconds, 1),
        "case_cpu_ms": round(percentile([case.cpu_s * 1e3 for case in cases], 50), 2),
        "case_wall_ms": round(percentile([case.wall_s * 1e3 for case in cases], 50), 2),
        "cost_ms_per_case": {name: round(part / max(1, len(cases)) * 1e3, 2) for name, part in parts.items()},
        "cores": plan.cores,
        "seconds": round(seconds, 2),
        "submissions": plan.submissions,
        "cases": plan.cases,
        "verdicts": dict(words),
        "failures": wrong + len(errors),
        "first_failure": errors[0] if errors else next((c.message for c in cases if c.verdict != "accepted"), ""),
    }


class _Used:
    """CPU time of all that takes part, in seconds. What ran in sandboxes that ended is in their common cgroup's
    count."""

    def __init__(self, server: LocalServer, state: Path) -> None:
        self._server = server.pid
        self._zygote = meter.zygote_of(state)
        config = read_config(state)
        groups = CgroupRoot.detect(f"dsec-{config.instance}", config.run / "cgroup2")
        self._group = groups.v2 / groups.name

    def parts(self) -> dict[str, float]:
        stat = dict(line.split() for line in (self._group / "cpu.stat").read_text().splitlines())
        return {
            "server": meter.cpu_s([self._server]),
            "zygote": meter.cpu_s([self._zygote]),
            "sandboxes": int(stat["usage_usec"]) / 1e6,
            "client": meter.cpu_s([os.getpid()]),
        }


def _specs(plan: Plan, rounds: int) -> Iterator[JudgeSpec]:
    for number in range(plan.submissions):
        yield _spec(plan, f"submission {number}", rounds, plan.cases)


def _spec(plan: Plan, name: str, rounds: int, cases: int) -> JudgeSpec:
    source, _ = _SOURCES[plan.language]
    limit_s = max(2.0, plan.case_ms / 100)
    return JudgeSpec(
        environment=plan.environment,
        language=plan.language,
        source=source.format(name=name, rounds=rounds),
        cases=[Case(stdin=f"{number}\n", expected=f"{number + 1}\n") for number in range(cases)],
        limits=JudgeLimits(cpu_s=limit_s, wall_s=min(3600.0, 20 * limit_s)),
    )


async def _calibrated(client: AsyncClient, plan: Plan) -> int:
    """Rounds of the loop that make a case of the CPU time that is asked for."""
    _, step = _SOURCES[plan.language]
    empty, full = [await _cost_ms(client, plan, rounds) for rounds in (0, step)]
    rounds = max(0, int(step * (plan.case_ms - empty) / max(0.1, full - empty)))
    say(f"a case costs {empty:.1f} ms before its loop; {rounds} rounds make it {plan.case_ms:g} ms")
    return rounds


async def _cost_ms(client: AsyncClient, plan: Plan, rounds: int) -> float:
    judged = await client.judge(_spec(plan, f"calibration {rounds}", rounds, 12))
    return percentile([case.cpu_s * 1e3 for case in judged.cases], 50)
