"""The `pypi` gateway, with pip itself and an index that speaks the real protocols."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_kit import Front, open_front, run, serve
from upstream_kit import MIDDLE, NEW, OLD, Index

from dsec.egress.gateways.config import GatewaysConfig, Upstream
from dsec.errors import InvalidRequest

JSON = "application/vnd.pypi.simple.v1+json"
PAGE = "http://pypi.dsec/simple/tool/"


@pytest.fixture
async def index() -> AsyncIterator[Index]:
    index = Index()
    async with serve(index.handle) as index.url:
        index.add("tool", "1.0", OLD, requires="base")
        index.add("tool", "2.0", MIDDLE, requires="base")
        index.add("tool", "3.0", NEW, requires="base")
        index.add("base", "0.1", OLD)
        index.add("base", "0.2", NEW)
        yield index


@pytest.fixture
async def front(index: Index, tmp_path: Path) -> AsyncIterator[Front]:
    config = GatewaysConfig(pypi=Upstream(f"{index.url}/simple/"), index_ttl_s=0)
    async with open_front(tmp_path / "state", config) as front:
        yield front


async def pip(front: Front, tmp_path: Path, *wanted: str) -> tuple[int, str]:
    """Install into `tmp_path/site` with nothing but what the gateway sets."""
    return await run(
        sys.executable, "-m", "pip", "install", "--target", str(tmp_path / "site"), "--no-cache-dir", *wanted,
        environment={**front.environment(), "PIP_CONFIG_FILE": "/dev/null"}, cwd=tmp_path,
    )  # fmt: skip


def installed(tmp_path: Path) -> set[str]:
    return {path.name.removesuffix(".dist-info") for path in (tmp_path / "site").glob("*.dist-info")}


async def test_pip_installs_the_newest(front: Front, index: Index, tmp_path: Path) -> None:
    front.grant("pypi")
    code, output = await pip(front, tmp_path, "tool")
    assert code == 0, output
    assert installed(tmp_path) == {"tool-3.0", "base-0.2"}
    assert any(path.endswith(".metadata") for path in index.asked), "PEP 658 was not used"
    files = [note for note in front.notes if note.get("file") == "tool-3.0-py3-none-any.whl"]
    assert files
    assert {note["status"] for note in files} == {200}
    assert files[0]["permission"] == "pypi"


async def test_pip_installs_what_there_was_at_a_date(front: Front, index: Index, tmp_path: Path) -> None:
    index.html = True  # an index of the older kind: its dates are elsewhere
    front.grant("pypi", before="2022-12-31")
    code, output = await pip(front, tmp_path, "tool")
    assert code == 0, output
    assert installed(tmp_path) == {"tool-2.0", "base-0.1"}


@pytest.mark.parametrize("html", [False, True])
async def test_both_kinds_of_pages_show_what_there_was(front: Front, index: Index, html: bool) -> None:
    index.html = html
    front.grant("pypi", before="2022-12-31")
    for accept in (JSON, "text/html"):
        status, body = await front.get(PAGE, Accept=accept)
        assert status == 200
        assert b"tool-2.0-" in body
        assert b"3.0" not in body


async def test_a_hidden_file_is_refused_by_its_address_too(front: Front) -> None:
    front.grant("pypi", before="2022-12-31")
    file = "http://pypi.dsec/files/tool/tool-3.0-py3-none-any.whl"
    for url in (file, f"{file}.metadata"):
        status, body = await front.get(url)
        assert status == 403
        assert b"permission pypi" in body
        assert b"2024-01-15" in body
    assert (await front.get("http://pypi.dsec/files/tool/tool-2.0-py3-none-any.whl"))[0] == 200


async def test_without_dates_everything_is_hidden_and_says_why(front: Front, index: Index) -> None:
    index.html, index.json_api = True, False
    front.grant("pypi", before="2022-12-31")
    status, body = await front.get(PAGE)
    assert status == 404
    assert b"doesn't say when it was published" in body
    assert (await front.get("http://pypi.dsec/files/tool/tool-1.0-py3-none-any.whl"))[0] == 403


async def test_projects_and_versions_are_denied_and_allowed(front: Front) -> None:
    front.grant("pypi", deny=["tool>=2"])
    _, body = await front.get(PAGE, Accept=JSON)
    assert json.loads(body)["versions"] == ["1.0"]
    assert (await front.get("http://pypi.dsec/files/tool/tool-2.0-py3-none-any.whl"))[0] == 403
    front.grant("pypi", deny=["Tool"])
    assert (await front.get(PAGE))[0] == 403
    assert (await front.get("http://pypi.dsec/simple/base/"))[0] == 200
    front.grant("pypi", allow=["tool<3"])
    _, body = await front.get(PAGE, Accept=JSON)
    assert json.loads(body)["versions"] == ["1.0", "2.0"]
    assert (await front.get("http://pypi.dsec/simple/base/"))[0] == 403
    status, body = await front.get("http://pypi.dsec/simple/")
    assert status == 200
    assert b"tool" in body
    front.grant("pypi", allow=["tool", "base"], within=["tool<3"])
    _, body = await front.get(PAGE, Accept=JSON)
    assert json.loads(body)["versions"] == ["1.0", "2.0"]
    assert (await front.get("http://pypi.dsec/simple/base/"))[0] == 403


async def test_yanked_and_hashes_are_kept(front: Front, index: Index) -> None:
    index.yanked.add("tool-2.0-py3-none-any.whl")
    front.grant("pypi")
    _, body = await front.get(PAGE, Accept=JSON)
    files = {file["filename"]: file for file in json.loads(body)["files"]}
    assert files["tool-2.0-py3-none-any.whl"]["yanked"] == "bad"
    assert set(files["tool-1.0-py3-none-any.whl"]["hashes"]) == {"sha256"}
    assert index.url.encode() not in body
    _, body = await front.get(PAGE)
    assert b'data-yanked="bad"' in body
    assert b"#sha256=" in body


async def test_files_come_from_the_cache_once_fetched(front: Front, index: Index) -> None:
    front.grant("pypi")
    url, path = "http://pypi.dsec/files/tool/tool-1.0-py3-none-any.whl", "/packages/tool/tool-1.0-py3-none-any.whl"
    whole = index.files["tool"]["tool-1.0-py3-none-any.whl"][0]
    answers = await asyncio.gather(*(front.get(url) for _ in range(20)))
    assert set(answers) == {(200, whole)}
    assert index.asked.count(path) == 1
    assert await front.get(url, Range="bytes=10-19") == (206, whole[10:20])
    assert await front.get(url, Range="bytes=-5") == (206, whole[-5:])
    assert (await front.get(url, Range=f"bytes={len(whole)}-"))[0] == 416
    async with front.ask("HEAD", url) as response:
        assert (response.status, int(response.headers["Content-Length"])) == (200, len(whole))
        tag = response.headers["ETag"]
    assert (await front.get(url, **{"If-None-Match": tag}))[0] == 304
    assert index.asked.count(path) == 1


async def test_a_file_without_the_digest_of_its_page_is_not_served(front: Front, index: Index) -> None:
    front.grant("pypi")
    filename = "tool-1.0-py3-none-any.whl"
    _, page = await front.get(PAGE, Accept=JSON)
    good = index.files["tool"][filename]
    digests = {file["filename"]: file["hashes"] for file in json.loads(page)["files"]}

    original = index._page

    def lying(request: object, name: str) -> object:
        index.files["tool"][filename] = good
        response = original(request, name)  # type: ignore[arg-type]
        index.files["tool"][filename] = (good[0] + b"evil", good[1])
        return response

    index._page = lying  # type: ignore[method-assign,assignment]
    assert digests[filename]
    with pytest.raises(Exception, match=r"payload|disconnected|closed"):
        await front.get(f"http://pypi.dsec/files/tool/{filename}")
    index._page = original  # type: ignore[method-assign]
    index.files["tool"][filename] = good
    assert await front.get(f"http://pypi.dsec/files/tool/{filename}") == (200, good[0])


async def test_unchanged_pages_are_not_sent_again(front: Front) -> None:
    front.grant("pypi")
    async with front.ask("GET", PAGE) as response:
        tag = response.headers["ETag"]
    assert (await front.get(PAGE, **{"If-None-Match": tag}))[0] == 304


@pytest.mark.parametrize(
    "options", [{"before": "soon"}, {"befor": "2022-01-01"}, {"deny": ["a b c"]}, {"allow": "tool"}, {"deny": [1]}]
)
async def test_options_that_are_wrong_are_refused(front: Front, options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="pypi"):
        front.grant("pypi", **options)


async def test_nothing_else_of_an_index_is_served(front: Front, index: Index) -> None:
    front.grant("pypi")
    for url in ("http://pypi.dsec/", "http://pypi.dsec/pypi/tool/json", "http://pypi.dsec/legacy/", PAGE + "x/"):
        assert (await front.get(url))[0] == 404, url
    before = len(index.asked)
    for url in (
        "/simple/../pypi/tool/json",
        "/simple/%2e%2e/x",
        "/simple//tool/",
        "/files/tool/..%2fx",
        "/simple/a%252fb/",
    ):
        assert (await front.get(f"http://pypi.dsec{url}"))[0] in {400, 404}, url
    async with front.ask("POST", PAGE, data=b"x", headers={"X-HTTP-Method-Override": "GET"}) as response:
        assert response.status == 403
    assert len(index.asked) == before


async def test_an_index_that_is_down_is_the_platforms_fault(tmp_path: Path) -> None:
    config = GatewaysConfig(pypi=Upstream("http://127.0.0.1:1/simple/"))
    async with open_front(tmp_path / "state", config) as front:
        front.grant("pypi")
        status, body = await front.get(PAGE)
    assert status == 502
    assert b"pypi" in body
    assert b"platform" in body
