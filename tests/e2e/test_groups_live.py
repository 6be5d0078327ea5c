"""Groups of services against a real server: started, linked, checked and ended as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import dsec
from cli_kit import Live
from dsec.errors import Conflict, InvalidRequest, NotFound, ServiceFailed
from server_kit import serving

pytestmark = pytest.mark.root

DB = """
import socket, time
time.sleep(0.5)
s = socket.create_server(("127.0.0.1", 7000))
print("serving", flush=True)
while True:
    c, _ = s.accept()
    c.sendall(b"by db")
    c.close()
"""
APP = """
import socket
open("/tmp/said", "wb").write(socket.create_connection(("db", 7000), 60).recv(9))
import time; time.sleep(999)
"""
DB_SERVICE = dsec.Service(
    spec="debian",
    command=["python3", "-uc", DB],
    ports=[7000],
    health=dsec.Health(port=7000, interval_s=0.2, retries=300),
)
APP_SERVICE = dsec.Service(
    spec="debian",
    command=["python3", "-c", APP],
    links=["db"],
    health=dsec.Health(command="test -s /tmp/said", interval_s=0.2, retries=300),
)


@pytest.fixture(scope="module")
def live(debian_module_state: Path) -> Iterator[Live]:
    with serving(debian_module_state) as server:
        yield Live(server)


@pytest.fixture
def client(live: Live) -> Iterator[dsec.Client]:
    endpoint = live.server.endpoint()
    with dsec.Client(endpoint.url, endpoint.api_key) as client:
        yield client
        assert dsec.Group.list(client=client) == {}


def test_a_group_is_started_linked_and_ended_as_one(client: dsec.Client) -> None:
    services = {"app": APP_SERVICE, "db": DB_SERVICE}
    with dsec.Group.create(services, name="one", client=client) as group:
        assert group.sandbox("app").files.read("/tmp/said") == "by db"
        assert "serving" in group.sandbox("db").commands.run("cat /tmp/service.log").stdout
        assert group.check() == {"app": True, "db": True}
        # Nothing else is reached, and nobody else reaches it.
        to_app = "import socket; socket.create_connection(('app', 7000), 5)"
        assert group.sandbox("db").commands.run(["python3", "-c", to_app]).exit_code == 1
        # By a client that knows the name alone, and again by who starts it.
        again = dsec.Group.create(services, name="one", client=client)
        assert again.sandbox("db").id == group.sandbox("db").id
        assert len(again.sandbox("db").commands.list()) == 1
        other = msgspec.structs.replace(APP_SERVICE, command="sleep 1")
        with pytest.raises(Conflict, match="'app' of group 'one' was started with another command"):
            dsec.Group.create({"app": other, "db": DB_SERVICE}, name="one", client=client)
        found = dsec.Group.find("one", client=client)
        assert {name: info.id for name, info in found.refresh().items()} == {
            name: group.sandbox(name).id for name in services
        }
        ended = "pkill -f '[c]reate_server'; while pgrep -f '[c]reate_server'; do sleep 0.05; done"
        group.sandbox("db").commands.run(ended)
        assert found.check() == {"app": True, "db": False}
        with pytest.raises(Conflict):
            dsec.Group.create({"db": dsec.Service(spec="debian")}, name="one", client=client)
        assert {info.state for info in found.refresh().values()} == {"running"}
    assert {info.state for info in found.refresh().values()} == {"ended"}
    with pytest.raises(NotFound):
        dsec.Group.find("one", client=client)


def test_a_check_looks_at_the_command_where_there_is_no_other(client: dsec.Client) -> None:
    commands = {"runs": "sleep infinity", "broke": "no-such-program", "done": "true", "none": None}
    services = {name: dsec.Service(spec="debian", command=command) for name, command in commands.items()}
    with dsec.Group.create(services, name="checked", client=client) as group:
        for name in ("broke", "done"):
            group.sandbox(name).commands.attach("dsec.service").wait()
        found = dsec.Group.find("checked", client=client)
        for each in (group, found):
            assert each.check() == {"runs": True, "broke": False, "done": True, "none": True}
        group.sandbox("runs").commands.attach("dsec.service").kill()
        group.sandbox("runs").commands.attach("dsec.service").wait()
        assert found.check()["runs"] is False


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (dsec.Service(spec="debian", command="echo no disk; exit 3", health=dsec.Health(port=1)), "ended: 3"),
        (
            dsec.Service(
                spec="debian", command="echo no disk; sleep 99", health=dsec.Health(port=1, retries=2, interval_s=0.1)
            ),
            "after 2 checks",
        ),
    ],
)
def test_one_that_fails_ends_all(client: dsec.Client, bad: dsec.Service, why: str) -> None:
    with pytest.raises(ServiceFailed, match=why) as failed:
        dsec.Group.create({"db": DB_SERVICE, "bad": bad}, name="two", client=client)
    assert failed.value.details["service"] == "bad"
    assert failed.value.details["log"] == "no disk\n"
    with pytest.raises(dsec.DsecError):
        dsec.Group.create({"db": DB_SERVICE, "bad": dsec.Service(spec="no-such")}, name="two", client=client)
    with pytest.raises(InvalidRequest):
        dsec.Group.create({}, client=client)


def test_from_the_command_line(live: Live, client: dsec.Client, tmp_path: Path) -> None:
    file = tmp_path / "shop.toml"
    file.write_text(
        f"[services.db]\nenvironment = 'debian'\ncommand = ['python3', '-uc', '''{DB}''']\nports = [7000]\n"
        "health = {port = 7000, interval_s = 0.2, retries = 300}\n"
        f"[services.app]\nenvironment = 'debian'\nlinks = ['db']\ncommand = ['python3', '-c', '''{APP}''']\n"
        "health = {command = 'test -s /tmp/said', interval_s = 0.2, retries = 300}\n"
    )
    code, out, err = live("group", "up", str(file), "--json")
    assert code == 0, err
    assert {info["state"] for info in json.loads(out).values()} == {"running"}
    _, out, _ = live("group", "ls", "--json")
    rows = [(row["group"], row["service"], row["ready"]) for row in json.loads(out)]
    assert rows == [("shop", "app", True), ("shop", "db", True)]
    assert live("group", "down", "shop")[:2] == (0, "shop\n")
    assert live("group", "down", "shop")[0] != 0
    file.write_text("[services.db]\nenvironment = 'debian'\ncommand = 'echo broken; exit 1'\nhealth = {port = 1}\n")
    code, _, err = live("group", "up", str(file))
    assert code != 0
    assert "broken" in err
