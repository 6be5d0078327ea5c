"""What apt says, and what it is told, as text."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from dsec.errors import DsecError, InvalidRequest, PlatformError, Unavailable
from dsec.store.build import same_day
from dsec.store.debian import Step, explained, for_suite, installed, made_at, planned, target_of
from dsec.store.programs import Failed, Stopped, run_program

DPKG = "Package: dpkg\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1.21\n"


def test_a_list_of_packages_has_nothing_left_in_it_but_what_apt_needs() -> None:
    status = (
        f"{DPKG}Conffiles:\n /etc/x 12\nDescription: short\n Status: install ok installed\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n"
        "Package: ../../x\nStatus: install ok installed\nVersion: 1\n\n"
        'Package: odd\nStatus: install ok installed\nVersion: 1\nDepends: a (>= 1), b | c\nProvides: "$(id)"\n'
    )
    text, architecture = installed(status.encode())
    assert architecture == "amd64"
    assert text == (
        "Package: dpkg\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1.21\n\n"
        "Package: odd\nStatus: install ok installed\nVersion: 1\nDepends: a (>= 1), b | c\n"
    )


@pytest.mark.parametrize("status", [b"", b"\xff\x00", b"Package: x\nStatus: install ok installed\nVersion: 1\n"])
def test_what_is_no_debian_system_is_said(status: bytes) -> None:
    with pytest.raises(InvalidRequest, match="isn't a Debian system"):
        installed(status)


def test_what_a_system_says_of_itself() -> None:
    release = b'NAME="x"\nVERSION_CODENAME=trixie\nID=debian\nID_LIKE="y"\n'
    assert target_of(b"s", release)[1:] == ("debian", "trixie")
    assert target_of(b"s", b"")[1:] == ("", "")


def test_the_order_of_an_installation_is_apts() -> None:
    said = (
        "Reading package lists...\n"
        "Inst libonig5 (6.9.8-1 Debian:12.5/stable [amd64])\n"
        "Inst libc-bin [2.36-9] (2.36-10 Debian:12.5/stable, Debian-Security:12/stable-security [amd64]) []\n"
        "Conf libonig5 (6.9.8-1 Debian:12.5/stable [amd64])\n"
        "Inst g++ (4:12.2.0-3 Debian:12.5/stable [all])\n"
        "Conf g++ (4:12.2.0-3 Debian:12.5/stable [all])\n"
    )
    steps, files = planned(said)
    assert files == ["libonig5_6.9.8-1_amd64.deb", "libc-bin_2.36-10_amd64.deb", "g++_4%3a12.2.0-3_all.deb"]
    assert steps == [
        Step("unpack", files[:2]),
        Step("configure", ["libonig5"]),
        Step("unpack", files[2:]),
        Step("configure", ["g++"]),
    ]
    with pytest.raises(InvalidRequest, match="old would have to be removed"):
        planned("Remv old (1 Debian:12.5/stable [amd64])\n")


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        ("E: Unable to locate package a\nE: Unable to locate package b.c", InvalidRequest, "has no package a, b.c"),
        ("E: Package 'awk' has no installation candidate", InvalidRequest, "has no package awk"),
        ("E: Failed to fetch http://m/x  Could not resolve 'm'", Unavailable, "reaches no mirror of bookworm: E: Fail"),
        ("E: Failed to fetch x  Could not connect to 127.0.0.1:1", Unavailable, "reaches no mirror"),
        ("E: The repository 'http://m x Release' does not have a Release file.", InvalidRequest, "has no suite"),
        ("W: NO_PUBKEY 1\nE: The repository 'http://m x InRelease' is not signed.", InvalidRequest, "isn't signed"),
        (
            " a : Depends: b but it is not going\nE: Unable to correct problems, you",
            InvalidRequest,
            "together.*a : Dep",
        ),
        ("something else", PlatformError, "apt failed: something else"),
    ],
)
def test_apts_last_words_say_whose_fault_it_is(output: str, kind: type[DsecError], words: str) -> None:
    error = explained(output, "bookworm")
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


def test_a_suite_that_the_node_has_not_named_comes_from_where_its_own_does() -> None:
    sources = (
        "# of bookworm\nURIs: http://m.example/bookworm-mirror\nSuites: bookworm bookworm-updates bookworm-security\n"
    )
    assert for_suite(sources, "bookworm", "trixie") == (
        "# of trixie\nURIs: http://m.example/bookworm-mirror\nSuites: trixie trixie-updates trixie-security\n"
    )


def test_a_package_says_when_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "a.deb"
    path.write_bytes(b"!<arch>\ndebian-binary   1700000000  0     0     100644  4         `\n2.0\n")
    assert made_at(path) == 1_700_000_000
    path.write_bytes(b"<html>")
    with pytest.raises(PlatformError, match="no Debian package"):
        made_at(path)


def test_passwords_of_the_build_are_the_packages() -> None:
    shadow = "root:*:20000:0:99999:7:::\nsshd:!:20787::::::\nold:x:19000:0:::::\nodd:x::0:::::\n"
    assert same_day(shadow, 20787, 20001) == shadow.replace("20787", "20001")


def test_a_program_is_ended_with_all_that_it_began(tmp_path: Path) -> None:
    stop = threading.Event()
    mark = tmp_path / "mark"
    lines: list[str] = []
    script = f"sleep 1000 & echo $! >{mark}; echo begun; wait"

    def begun(line: str) -> None:
        lines.append(line)
        stop.set()

    with pytest.raises(Stopped):
        run_program(["sh", "-c", script], stop=stop, line=begun)
    assert lines == ["begun"]
    child = Path("/proc", mark.read_text().strip())
    deadline = time.monotonic() + 60
    while child.exists() and "Z" not in (child / "stat").read_text().split()[2] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or "Z" in (child / "stat").read_text().split()[2]


def test_what_a_program_says_is_kept_whole() -> None:
    assert run_program(["sh", "-c", "seq 3000; printf end"]).splitlines() == [*map(str, range(1, 3001)), "end"]
    with pytest.raises(Failed) as failed:
        run_program(["sh", "-c", "echo why >&2; exit 7"])
    assert (failed.value.code, failed.value.output) == (7, "why")
