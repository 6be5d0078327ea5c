"""The conformance suite through every apiserver of a real cluster, in network namespaces of its own, while edges,
apiservers and NATS servers are killed one at a time and started again.

Long, by hand: DSEC_TEST_CHAOS_S=1800 pytest -s tests/cluster/test_chaos.py; then processes also stand still and are cut
off, and all cases are run over and over. DSEC_TEST_CHAOS_SEED chooses another order.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import chaos_suite
import pytest
from chaos_monkey import Monkey, summary
from chaos_suite import Outcome, Runner, ThroughApis, Verdict
from cluster_kit import Cluster, apart, running, until

from dsec import Client
from server_kit import Server

LONG_S = float(os.environ.get("DSEC_TEST_CHAOS_S", "0"))
SEED = int(os.environ.get("DSEC_TEST_CHAOS_SEED", "7"))
LIMIT_S = 300.0 + 2 * LONG_S
"""Within this all have passed, or it is said which have not, and why. The short form takes less than a minute."""
STALL_S = 1.0
"""A thread that sleeps a tenth of a second and wakes so late was on a machine that stood still."""
pytestmark = [pytest.mark.root, pytest.mark.timeout(LIMIT_S + 3 * chaos_suite.STEP_S, func_only=True)]


@pytest.fixture(scope="module")
def cluster(state_over: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("chaos")
    states = [state_over(directory / f"state-{number}") for number in (1, 2, 3)]
    with apart() as spaces, running(directory, states, spaces=spaces) as made:
        yield made


def test_the_suite_while_parts_of_the_cluster_die(cluster: Cluster) -> None:
    try:
        outlives(cluster)
    except BaseException:
        print(cluster.logs())  # noqa: T201
        raise
    nothing_is_left(cluster)


def outlives(cluster: Cluster) -> None:
    """All cases pass, through each apiserver, whatever dies."""
    until = time.monotonic() + LIMIT_S
    monkey = Monkey(cluster, seed=SEED, pause_s=1.0 if LONG_S else 0.2)
    chosen = chaos_suite.cases(None if LONG_S else chaos_suite.SHORT)
    urls = [api.url for api in cluster.apis]
    runners = []
    for number in range(len(urls)):
        key = cluster.make_key("--project", f"chaos-{number}")
        factory = ThroughApis([*urls[number:], *urls[:number]], key)
        runners.append(Runner(factory, chosen, wanted=monkey.goes_on.is_set, until=until))
    kills = (lambda: monkey.until(time.monotonic() + LONG_S)) if LONG_S else monkey.once
    threads = [threading.Thread(target=each, name="chaos", daemon=True) for each in (*runners, kills)]
    for thread in threads:
        thread.start()
    stalls, woke = list[tuple[float, float]](), time.time()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)
        slept, woke = woke, time.time()
        if woke - slept > STALL_S:
            stalls.append((slept, woke))
        for each in (monkey, *runners):  # the others would go on in vain
            assert each.failed is None, "".join(traceback.format_exception(each.failed))
        hang = [thread for thread in threads if thread.is_alive()]
        late = time.monotonic() > until + 2 * chaos_suite.STEP_S
        assert not late, "\n".join([*map(stack, hang), *(f"in {runner.at}" for runner in runners)])
    outcomes = [outcome for runner in runners for outcome in runner.outcomes]
    print("chaos:", summary(monkey.blows))  # noqa: T201
    print("cases:", told(outcomes))  # noqa: T201
    wrong = [outcome for outcome in outcomes if outcome.verdict is Verdict.WRONG]
    assert not wrong, "\n".join(f"{each.case}:\n{each.why}" for each in wrong)
    for runner in runners:
        passed = {outcome.case for outcome in runner.outcomes if outcome.verdict in (Verdict.PASSED, Verdict.SKIPPED)}
        assert passed == {case.name for case in chosen}
    lost = [each for each in outcomes if each.verdict is Verdict.LOST]
    lost = [each for each in lost if not any(since <= each.ended and to >= each.began for since, to in stalls)]
    strange = [each for each in lost if not monkey.disturbed(each.began, each.ended)]
    assert not strange, f"lost while nothing was dead, and the machine went on: {strange}"
    assert len(monkey.blows) >= len(cluster.edges) + len(cluster.apis) + len(cluster.nats)


def stack(thread: threading.Thread) -> str:
    """Where a thread stands."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))


def told(outcomes: list[Outcome]) -> str:
    """For a person to read."""
    counts = Counter(outcome.verdict.value for outcome in outcomes)
    lost = Counter(outcome.why for outcome in outcomes if outcome.verdict is Verdict.LOST)
    return json.dumps({**counts, "lost": lost}, indent=1)


def nothing_is_left(cluster: Cluster) -> None:
    """No sandbox in any project, none on any host."""
    servers = [Server(state) for state in cluster.states]
    until(lambda: all(server.difference(set()) == "" for server in servers), "no sandbox is on any node")
    for api in cluster.apis:
        with Client(api.url, cluster.key) as client:
            assert client.list() == []
    until(lambda: not any(node["live"] for node in cluster.get("/v1/nodes")["nodes"]), "the nodes say so")
