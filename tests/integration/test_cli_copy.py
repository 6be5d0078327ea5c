"""`dsec cp` against a sandbox that has no `tar`: file by file. (With `tar`: tests/e2e/test_cli_live.py.)"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_kit import served_in_thread
from test_cli import Cli

from dsec.cli.copy import Place
from trees import state_of


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with served_in_thread(tmp_path_factory.mktemp("server")) as (server, call):
        yield Cli(server, call)


def plain(root: Path) -> None:
    (root / "sub" / "deep").mkdir(parents=True)
    for number in range(40):
        (root / "sub" / f"f{number}").write_bytes(b"%d" % number * number)
    (root / "sub" / "run").write_bytes(b"#!")
    (root / "sub" / "run").chmod(0o750)
    (root / "sub" / "deep" / "big").write_bytes(os.urandom(2_000_000))
    Path(os.fsdecode(os.fsencode(root) + b"/\xff")).write_bytes(b"name")


def content(root: Path) -> dict[bytes, tuple[object, ...]]:
    return {name: (kind, mode, data) for name, (kind, mode, _, data) in state_of(root).items()}


def test_a_tree_both_ways(cli: Cli, tmp_path: Path) -> None:
    box = cli.sandbox()
    plain(tmp_path / "in")
    code, out, err = cli("cp", str(tmp_path / "in"), f"{box}:/tree")
    assert (code, out) == (0, ""), err
    assert "43 files" in err
    code, out, err = cli("cp", "--json", f"{box}:/tree", str(tmp_path / "out"))
    assert code == 0, err
    assert json.loads(out)["files"] == 43
    assert json.loads(out)["left_out"] == []
    assert content(tmp_path / "out") == content(tmp_path / "in")
    assert not (tmp_path / "out.dsec-part").exists()


def test_files_and_where_they_go(cli: Cli, tmp_path: Path) -> None:
    box = cli.sandbox()
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    (tmp_path / "a").chmod(0o754)
    assert cli("cp", "-q", str(tmp_path / "a"), f"{box}:/x") == (0, "", "")
    assert cli("cp", "-q", str(tmp_path / "a"), str(tmp_path / "b"), f"{box}:/tmp/") == (0, "", "")
    (tmp_path / "out").mkdir()
    assert cli("cp", "-q", f"{box}:/x", f"{box}:tmp/b", str(tmp_path / "out"))[0] == 0
    assert (tmp_path / "out" / "x").read_text() + (tmp_path / "out" / "b").read_text() == "ab"
    assert (tmp_path / "out" / "x").stat().st_mode & 0o777 == 0o754
    assert cli("cp", "-q", f"{box}:/x", str(tmp_path / "new"))[0] == 0
    assert (tmp_path / "new").read_text() == "a"


def test_content_of_a_directory(cli: Cli, tmp_path: Path) -> None:
    box = cli.sandbox()
    plain(tmp_path / "in")
    assert cli("cp", "-q", f"{tmp_path}/in/.", f"{box}:/tmp")[0] == 0
    (tmp_path / "out").mkdir()
    assert cli("cp", "-q", f"{box}:/tmp/sub/.", str(tmp_path / "out"))[0] == 0
    assert (tmp_path / "out" / "f7").read_bytes() == b"7" * 7
    assert cli("cp", "-q", f"{box}:/tmp/sub", str(tmp_path / "out"))[0] == 0
    assert (tmp_path / "out" / "sub" / "f7").read_bytes() == b"7" * 7


def test_what_was_cut_goes_on(cli: Cli, tmp_path: Path) -> None:
    box = cli.sandbox()
    plain(tmp_path / "in")
    assert cli("cp", "-q", str(tmp_path / "in"), f"{box}:/tree")[0] == 0
    out = tmp_path / "out"
    assert cli("cp", "-q", f"{box}:/tree", str(out))[0] == 0
    (out / "sub" / "f9").unlink()
    (out / "sub" / "f8").write_text("other size")
    kept = (out / "sub" / "f7").stat().st_ino
    (tmp_path / "out.dsec-part").touch()  # as a copy that was cut leaves it
    code, text, _ = cli("cp", "--json", "--resume", f"{box}:/tree", str(out))
    assert (code, json.loads(text)["files"]) == (0, 2)
    assert content(out) == content(tmp_path / "in")
    assert (out / "sub" / "f7").stat().st_ino == kept
    assert not (tmp_path / "out.dsec-part").exists()


def test_a_large_file_goes_on_where_it_stood(cli: Cli, tmp_path: Path) -> None:
    box = cli.sandbox()
    data = os.urandom(40 << 20)
    (tmp_path / "big").write_bytes(data)
    os.utime(tmp_path / "big", ns=(5, 1_000_000_000_000_000_000))
    part = f"/tmp/.big.{len(data):x}-{1_000_000_000_000_000_000:x}.dsec-part"
    (tmp_path / "begun").write_bytes(data[: 10 << 20])
    assert cli("cp", "-q", str(tmp_path / "begun"), f"{box}:{part}")[0] == 0
    before = next(int(line.split()[-1]) for line in metrics(cli) if 'direction="in",by="files"' in line)
    assert cli("cp", "-q", str(tmp_path / "big"), f"{box}:/tmp")[0] == 0
    after = next(int(line.split()[-1]) for line in metrics(cli) if 'direction="in",by="files"' in line)
    assert after - before == 30 << 20
    assert cli("cp", "-q", f"{box}:/tmp/big", str(tmp_path / "back"))[0] == 0
    assert (tmp_path / "back").read_bytes() == data
    assert cli("exec", box, "--", "ls", "-a", "/tmp")[1].count("dsec-part") == 0


def metrics(cli: Cli) -> list[str]:
    _, _, body = cli.call(cli.server.raw("GET", "/metrics"))
    return body.decode().splitlines()  # type: ignore[no-any-return]


def test_what_is_wrong(cli: Cli, tmp_path: Path) -> None:
    box = cli.sandbox()
    (tmp_path / "a").write_text("a")
    here = str(tmp_path / "a")
    for arguments, code, says in (
        ((here, here), 2, "one side is ID:PATH"),
        ((f"{box}:/a", f"{box}:/b"), 2, "one side is ID:PATH"),
        ((str(tmp_path / "nothing"), f"{box}:/a"), 2, "No such file"),
        ((f"{box}:/nothing", here), 2, "[file_not_found]"),
        ((here, f"{box}:/nothing/"), 2, "no directory"),
        ((here, here, f"{box}:/nothing"), 2, "no directory"),
        ((f"{'0' * 24}:/a", here), 2, "[sandbox_not_found]"),
        ((f"{box}:/", str(tmp_path)), 2, "has no name"),
    ):
        found, out, err = cli("cp", *arguments)
        assert (found, out) == (code, ""), err
        assert says in err
        assert "Traceback" not in err


def test_places() -> None:
    box = "0005s0bu0000005ejtvn60ra"
    assert Place.of(f"{box}:a/b") == Place(box, b"/a/b")
    assert Place.of(f"{box}:") == Place(box, b"/")
    assert Place.of(f"./{box}:a").sandbox_id is None
    assert Place.of("C:/x").sandbox_id is None
    assert [Place.of(each).bare for each in ("a/", "a/.", "a//./", "/", ".", "./.")] == [
        b"a", b"a", b"a", b"/", b".", b".",
    ]  # fmt: skip
    assert Place.of(f"{box}:/a/.").content_only
