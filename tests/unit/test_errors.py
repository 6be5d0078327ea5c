"""The tree of errors, and its pages in docs/errors.md."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from dsec import errors
from dsec.errors import BY_CODE, CallerError, DsecError, ErrorBody, Internal, PlatformError, from_body
from dsec.spec.causes import Cause

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
LEAVES = sorted(set(BY_CODE.values()), key=lambda leaf: leaf.code)


def sections(title: str) -> dict[str, str]:
    """Heading -> text of the parts below a title."""
    body = re.split(r"(?m)^# ", PAGE.partition(f"\n# {title}\n")[2])[0]
    parts = re.split(r"(?m)^## ", body)[1:]
    found = {}
    for part in parts:
        heading, _, text = part.partition("\n")
        found[heading.removesuffix(" (cause)").strip("`")] = " ".join(text.split())
    assert len(found) == len(parts), "a heading comes twice"
    return found


def test_every_code_has_a_part_and_every_part_a_code() -> None:
    assert set(sections("Error codes")) == set(BY_CODE)


def test_every_cause_has_a_part_and_every_part_a_cause() -> None:
    assert set(sections("Causes")) == set(Cause)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.code)
def test_a_codes_part_says_its_status_its_reason_and_its_remedy(leaf: type[DsecError]) -> None:
    text = sections("Error codes")[leaf.code]
    head = text.partition("**Why:**")[0]
    assert re.match(r"HTTP (\d+)", head).group(1) == str(leaf.http_status)  # type: ignore[union-attr]
    assert ("infra" in head) == leaf.infra
    assert ("retryable" in head) == leaf.retryable
    assert "**What to do:**" in text


@pytest.mark.parametrize("cause", list(Cause))
def test_a_causes_part_says_whose_fault_it_is_and_what_to_do(cause: Cause) -> None:
    text = sections("Causes")[cause]
    assert text.startswith("Infra.") == cause.infra
    assert "**What to do:**" in text


def test_the_tree() -> None:
    for leaf in LEAVES:
        assert issubclass(leaf, CallerError | PlatformError)
        assert leaf.infra == issubclass(leaf, PlatformError)
        assert 400 <= leaf.http_status < 600
        assert (leaf.http_status >= 500) == leaf.infra
    for leaf in LEAVES:
        assert f" {leaf.code} " in (errors.__doc__ or ""), "the tree at the top of the file lacks it"


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.code)
def test_an_error_survives_the_wire(leaf: type[DsecError]) -> None:
    error = leaf("what happened", remedy="what to do", field="x", numbers=[1, 2])
    body = msgspec.json.decode(msgspec.json.encode(error.body()), type=ErrorBody)
    again = from_body(body)
    assert type(again) is leaf
    assert again.body() == error.body()
    assert str(again) == str(error)
    assert leaf.code in str(again)
    assert "what to do" in str(again)


def test_an_unknown_code_keeps_its_side() -> None:
    assert isinstance(from_body(ErrorBody(code="new", message="m", infra=True)), Internal)
    caller = from_body(ErrorBody(code="new", message="m"))
    assert isinstance(caller, CallerError)
    assert not caller.infra
