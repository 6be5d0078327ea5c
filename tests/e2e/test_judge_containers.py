"""The judge over containers, which it falls back to: the same verdicts, and nothing left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dsec.app import open_edge, read_config
from dsec.backends.container.host import Host
from dsec.edge.node import Edge
from dsec.errors import QuotaExceeded
from dsec.grading.containers import ContainerRunner
from dsec.grading.judge import Judge
from dsec.grading.running import FirstOf, Job, Ran
from dsec.spec.judging import Case, CaseVerdict, JudgeLimits, JudgeSpec, JudgeVerdict, Language

pytestmark = pytest.mark.root
SUM = [Case(stdin="1 2\n", expected="3\n"), Case(stdin="5 -7\n", expected="-2\n")]
RIGHT = "a, b = map(int, input().split())\nprint(a + b)\n"
MIB = 1 << 20


class Full:
    """A runner that has no room."""

    async def run(self, job: Job) -> Ran:
        """Never."""
        raise QuotaExceeded("all in use")


@asynccontextmanager
async def judging(state: Path) -> AsyncIterator[tuple[Judge, Edge]]:
    hosts: list[Host] = []
    async with open_edge(read_config(state), keep=False, on_host=hosts.append) as edge:
        runner = FirstOf(Full(), ContainerRunner(edge))
        yield Judge(runner, hosts[0].environments.around), edge


async def judged(judge: Judge, source: str, **fields: Any) -> tuple[JudgeVerdict, list[CaseVerdict]]:
    spec = JudgeSpec(**{"environment": "debian", "language": Language.PYTHON, "source": source, "cases": SUM, **fields})
    lines = [line async for line in judge.judge("project", spec)]
    result = lines[-1].result
    assert result is not None
    return result, [line.case for line in lines if line.case is not None]


async def test_containers_give_the_same_verdicts(debian_state: Path) -> None:
    short = JudgeLimits(cpu_s=0.5, wall_s=60)
    known: list[tuple[str, dict[str, Any], str]] = [
        (RIGHT, {}, "accepted"),
        ("read a b; echo $((a + b))", {"language": Language.BASH}, "accepted"),
        ("print(3)", {}, "wrong_answer"),
        ("raise ValueError", {}, "runtime_error"),
        ("while True: pass", {"limits": short}, "time_limit"),
        ("import os\nos.fork()\nwhile True: pass", {"limits": short}, "time_limit"),
        ("import time\ntime.sleep(60)", {"limits": JudgeLimits(wall_s=1)}, "time_limit"),
        ("x = bytearray(1 << 30)", {"limits": JudgeLimits(memory_bytes=64 * MIB)}, "memory_limit"),
        ("while True: print('x' * 10000)", {"limits": JudgeLimits(output_bytes=MIB)}, "output_limit"),
    ]
    async with judging(debian_state) as (judge, edge):
        for source, fields, word in known:
            result, cases = await judged(judge, source, **fields)
            assert (result.verdict, result.infra) == (word, False), (source, cases)
            if word == "time_limit" and "limits" in fields and fields["limits"] is short:
                assert cases[0].wall_s < 50
        assert (await edge.list_sandboxes("project")).sandboxes == []


async def test_files_go_in_and_come_back(debian_state: Path) -> None:
    script = "import os\nos.symlink('/etc/passwd', '/tmp/link')\nopen('/tmp/made', 'w').write(open('/tmp/d/in').read())"
    job = Job(
        project="project",
        environment="debian",
        argv=("python3", "-c", script),
        files={b"/tmp/d/in": b"hello"},
        fetch=(b"/tmp/made", b"/tmp/link", b"/tmp/missing", b"/tmp/d", b"/tmp/d/in"),
        fetch_bytes=7,
    )
    async with judging(debian_state) as (_, edge):
        ran = await ContainerRunner(edge).run(job)
        assert ran.status.exit_code == 0, ran.stderr
        assert ran.fetched == {b"/tmp/made": b"hello"}  # the other one is beyond the limit
