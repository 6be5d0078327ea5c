"""`bin/quickstart`: the main job from the command line.

Uses the server that runs on the state directory, or starts one and stops it again (`--keep` leaves it up). Exit code 0
when everything came out as it must, 1 for a surprise, 2 and 3 as the rest of `dsec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from dsec import AsyncClient, AsyncSandbox
from dsec.errors import CallerError, DsecError
from dsec.kernel import census
from dsec.kernel.ledger import Ledger
from dsec.rollout import candidates, controls, project
from dsec.rollout.controls import Control
from dsec.rollout.environments import ensure_environments
from dsec.rollout.project import CACHETOOLS
from dsec.rollout.report import Screen, make_console
from dsec.rollout.server import LocalServer, default_state, running
from dsec.rollout.server import run as run_to_end
from dsec.rollout.step import Grader, Step, Task, base_spec, create_burst, run_step

_PROBE = Path(__file__).with_name("probe.py")
_KINDS = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
SANDBOXES = 48
"""Each change is tested twice, in its own sandbox and in the grader's, at 0.13 s of CPU with all that goes with it: 7 s
on two cores."""


class Options(Struct, frozen=True):
    """What the command line asks for."""

    sandboxes: int
    seed: int
    keep: bool
    every: bool
    as_json: bool


Fact = tuple[str, bool, str]
"""A check: what, whether it is good, a detail."""


@click.command(help="One step of agentic RL over a real project, in a burst of sandboxes on this machine.")
@click.option("--sandboxes", type=click.IntRange(1, 4096), default=SANDBOXES, show_default=True, help="Candidates.")
@click.option("--seed", type=int, default=1, show_default=True, help="Chooses the fault and the candidates.")
@click.option("--keep", is_flag=True, help="Leave the server up afterwards.")
@click.option("--all", "every", is_flag=True, help="A line for every candidate, not one of each kind.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def command(**fields: Any) -> int:
    return run_to_end(run(Options(**fields), default_state()))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process."""
    try:
        code = command.main(arguments, prog_name="quickstart", standalone_mode=False)
    except DsecError as error:
        sys.stderr.write(f"error: {error}\n")
        code = 2 if isinstance(error, CallerError) else 3
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = 130
    except asyncio.CancelledError:
        code = 143
    raise SystemExit(code or 0)


async def run(options: Options, state: Path) -> int:
    """The whole job. Raises `DsecError` where the platform can't do it at all."""
    screen = Screen(make_console(quiet=options.as_json))
    began = time.monotonic()
    before = census.take(state)
    async with contextlib.AsyncExitStack() as stack:
        client, started = await stack.enter_async_context(_server(state, screen, keep=options.keep))
        result = await _job(client, state, options, screen)
    facts = result.facts
    if started and not options.keep:
        beyond = census.take(state).beyond(before)
        facts.append(_left(beyond))
    screen.facts(facts)
    surprises = [row.id for row in result.step.rows if row.surprise]
    surprises += [control.name for control in result.controls if control.surprise]
    surprises += [what for what, good, _ in facts if not good]
    seconds = time.monotonic() - began
    screen.say(f"{'all as it must be' if not surprises else f'{len(surprises)} SURPRISES'}, {seconds:.1f} s in all")
    screen.say(_further(options, started=started))
    if options.as_json:
        sys.stdout.write(json.dumps(_json(result, surprises, seconds)) + "\n")
    return 1 if surprises else 0


class _Result(Struct):
    task: Task
    step: Step
    controls: list[Control]
    features: list[Fact]
    facts: list[Fact]


@contextlib.asynccontextmanager
async def _server(state: Path, screen: Screen, *, keep: bool) -> AsyncIterator[tuple[AsyncClient, bool]]:
    """A client of the running server, or of one that is started; whether it was started here."""
    client = await running(state)
    if client is not None:
        screen.say(f"uses the server that runs at {client.url}")
        try:
            yield client, False
        finally:
            await client.close()
        return
    began = time.monotonic()
    with screen.status("starting a one-node server") as say:
        server = await LocalServer.start(state, told=say)
    screen.say(f"a one-node server is up in {time.monotonic() - began:.1f} s")
    try:
        yield server.client, True
    except BaseException:
        await server.stop()
        raise
    if keep:
        await server.keep()
        screen.say(
            f"the server is left up at {server.client.url}: `kill {server.pid}` stops it and leaves nothing behind"
        )
    else:
        await server.stop()


async def _job(client: AsyncClient, state: Path, options: Options, screen: Screen) -> _Result:
    sdist = await asyncio.to_thread(project.fetch, CACHETOOLS, state / "rollout")
    files = project.read_files(CACHETOOLS, sdist)
    source, tests = project.text_files(CACHETOOLS, files)
    burst = candidates.make_burst(source, tests, options.seed, options.sandboxes)
    agent, grader_environment = await asyncio.to_thread(ensure_environments, state, CACHETOOLS, files, burst)
    task = Task(CACHETOOLS, source, burst, agent, grader_environment)
    features = await observe(client, agent)
    screen.header(task, _host_facts(client, state), features)
    try:
        grader = Grader(client, task)
        measure, ends = await controls.take_scale(grader, burst)
        made = await create_burst(client, task, screen)
        step, others = await asyncio.gather(
            run_step(client, task, made, grader, measure, watch=screen),
            controls.run_controls(client, task, grader, measure),
        )
    finally:
        screen.close()
    done = [*ends, *others]
    screen.step(step, every=options.every)
    screen.controls(done)
    live = [info.id for info in await client.list(labels={"job": "main"})]
    facts: list[Fact] = [
        ("a marker written in each sandbox is seen in no other", not step.markers, step.markers),
        ("no sandbox of the job is live", not live, ", ".join(live)),
    ]
    return _Result(task, step, done, features, facts)


async def observe(client: AsyncClient, environment: str) -> list[Fact]:
    """Isolation as one sandbox sees it."""
    host = _own_namespaces()
    async with await AsyncSandbox.create(base_spec(environment, role="probe"), client=client) as sandbox:
        result = await sandbox.commands.run(["python3", "-I", "-B", "-c", _PROBE.read_text(), json.dumps(host)])
    return msgspec.json.decode(result.check().stdout_bytes, type=list[Fact])


def _own_namespaces() -> dict[str, str]:
    return {kind: str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in _KINDS}


def _host_facts(client: AsyncClient, state: Path) -> list[tuple[str, str]]:
    changes = Ledger(state / "host.json").changes
    settings = [change.what for change in changes if change.kind == "sysctl"]
    packages = [change.what for change in changes if change.kind == "packages"]
    others = [f"{change.kind} {change.what}" for change in changes if change.kind not in ("sysctl", "packages")]
    here = census.take(state).counts()
    holds = ", ".join(f"{kind} {count}" for kind, count in here.items() if count)
    return [
        ("kernel", f"{platform.system()} {platform.release()}, {os.cpu_count()} cores"),
        ("server", f"{client.url}, state in {state}"),
        ("mounts", f"below /run/dsec/{census.instance_of(state)}"),
        ("raised", f"{len(settings)} kernel settings, listed in {state / 'host.json'}"),
        *([("installed", ", ".join(packages))] if packages else []),
        *([("changed", ", ".join(others))] if others else []),
        ("holds", f"{holds}: gone when the server ends"),
        ("undo", "bin/dsec host undo"),
    ]


def _left(beyond: dict[str, list[str]]) -> Fact:
    kinds = "processes, mounts, cgroups, namespaces, loop and swap devices counted before and after"
    detail = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in beyond.items())
    return "nothing is left behind", not beyond, detail or kinds


def _further(options: Options, *, started: bool) -> str:
    lines = [
        f"bin/quickstart --seed {options.seed + 1} --all    # another fault, every candidate",
        "bin/quickstart --sandboxes 256",
        "bin/dsec bench create              # against crun, runc and bubblewrap",
        "bin/dsec doctor                    # what this host offers",
        "bin/dsec host undo                 # takes back what dsec changed on this host",
    ]
    if options.keep or not started:
        lines[:0] = [
            "bin/dsec run debian -- uname -a    # the server is up: a command in a sandbox",
            "bin/dsec ls",
        ]
    else:
        lines[:0] = ["bin/quickstart --keep              # leaves the server up"]
    return "go on with:\n" + "\n".join(f"  {line}" for line in lines)


def _json(result: _Result, surprises: list[str], seconds: float) -> dict[str, Any]:
    step, burst = result.step, result.task.burst
    rewards = [row.reward for row in step.rows]
    return {
        "project": msgspec.to_builtins(result.task.project),
        "fault": burst.fault.name,
        "seed": burst.seed,
        "created": msgspec.to_builtins(step.created),
        "graded_s": step.graded_s,
        "mean_reward": step.mean,
        "rewards": rewards,
        "rows": msgspec.to_builtins(step.rows),
        "controls": [{**msgspec.to_builtins(each), "surprise": each.surprise} for each in result.controls],
        "isolation": [{"feature": name, "on": on, "detail": detail} for name, on, detail in result.features],
        "checks": [{"what": what, "good": good, "detail": detail} for what, good, detail in result.facts],
        "surprises": surprises,
        "seconds": round(seconds, 2),
    }


if __name__ == "__main__":
    main()
