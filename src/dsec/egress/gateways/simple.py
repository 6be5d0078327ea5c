"""Pages of a package index: PEP 503 (HTML) and PEP 691 (JSON) read into one form, filtered, and written again. Pure.

Everything that an index says of a file is kept (hashes, `requires-python`, `yanked`, sizes, PEP 658 metadata); only its
URL becomes one of the gateway's, and what a rule hides is left out.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

import msgspec
from msgspec import Struct, field
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from yarl import URL

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
HTML_TYPE = "application/vnd.pypi.simple.v1+html"
ACCEPT = f"{JSON_TYPE}, {HTML_TYPE};q=0.2, text/html;q=0.1"


class BadPage(ValueError):
    """What came isn't a page of an index."""


class File(Struct, frozen=True, kw_only=True, rename={
    "requires_python": "requires-python", "core_metadata": "core-metadata", "dist_info_metadata": "dist-info-metadata",
    "gpg_sig": "gpg-sig", "upload_time": "upload-time",
}, omit_defaults=True):  # fmt: skip
    """A file as PEP 691 has it."""

    filename: str
    url: str
    hashes: dict[str, str] = field(default_factory=dict)
    requires_python: str | None = None
    core_metadata: bool | dict[str, str] | None = None
    dist_info_metadata: bool | dict[str, str] | None = None
    gpg_sig: bool | None = None
    yanked: bool | str = False
    size: int | None = None
    upload_time: str | None = None

    @property
    def metadata(self) -> bool | dict[str, str] | None:
        """Whether it has a PEP 658 metadata file, and that one's hashes."""
        return self.core_metadata if self.core_metadata is not None else self.dist_info_metadata

    def version(self) -> Version | None:
        """As its name says; None where the name isn't one of a release."""
        try:
            if self.filename.endswith(".whl"):
                return parse_wheel_filename(self.filename)[1]
            return parse_sdist_filename(self.filename)[1]
        except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
            return None


class Page(Struct, frozen=True):
    """A project's page."""

    name: str
    files: Sequence[File]
    meta: Mapping[str, Any] = {}


class _JsonPage(Struct):
    name: str
    files: list[File]
    meta: dict[str, Any] = {}


def parse(body: bytes, content_type: str, base: URL, name: str) -> Page:
    """A page as it came, its URLs made absolute. Raises `BadPage`."""
    try:
        if content_type.partition(";")[0].strip().lower() in {JSON_TYPE, "application/json"}:
            found = msgspec.json.decode(body, type=_JsonPage)
            files = [msgspec.structs.replace(file, url=str(base.join(URL(file.url)))) for file in found.files]
            return Page(canonicalize_name(found.name), files, found.meta)
        parser = _Links(base)
        parser.feed(body.decode("utf-8", "replace"))
        parser.close()
        return Page(name, parser.files, {"api-version": "1.0"})
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadPage(f"not a page of a package index: {error}") from error


class _Links(HTMLParser):
    def __init__(self, base: URL) -> None:
        super().__init__()
        self._base = base
        self.files: list[File] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        href = given.get("href")
        if tag == "base" and href:
            self._base = self._base.join(URL(href))
        if tag != "a" or not href:
            return
        url = self._base.join(URL(href))
        algorithm, _, digest = url.fragment.partition("=")
        metadata = given.get("data-core-metadata", given.get("data-dist-info-metadata"))
        self.files.append(
            File(
                filename=url.name,
                url=str(url.with_fragment(None)),
                hashes={algorithm: digest} if digest else {},
                requires_python=given.get("data-requires-python"),
                core_metadata=_hashes(metadata) if metadata is not None else None,
                gpg_sig={"true": True, "false": False}.get(given.get("data-gpg-sig") or ""),
                yanked=(given["data-yanked"] or True) if "data-yanked" in given else False,
            )
        )


def _hashes(text: str) -> bool | dict[str, str]:
    algorithm, _, digest = text.partition("=")
    return {algorithm: digest} if digest else text == "true"


def render_json(page: Page, link: Callable[[File], str]) -> bytes:
    """PEP 691."""
    versions = {str(version) for file in page.files if (version := file.version()) is not None}
    return msgspec.json.encode(
        {
            "meta": {"api-version": page.meta.get("api-version", "1.0")},
            "name": page.name,
            "versions": sorted(versions, key=Version),
            "files": [{"hashes": {}, **msgspec.to_builtins(file), "url": link(file)} for file in page.files],
        }
    )


def render_html(page: Page, link: Callable[[File], str]) -> bytes:
    """PEP 503."""
    lines = ["<!DOCTYPE html>", f"<html><head><title>{html.escape(page.name)}</title></head><body>"]
    for file in page.files:
        # sha256 where there is one: a link carries a single digest
        algorithm = "sha256" if "sha256" in file.hashes else next(iter(file.hashes), "")
        attributes = {"href": link(file) + (f"#{algorithm}={file.hashes[algorithm]}" if algorithm else "")}
        if file.requires_python is not None:
            attributes["data-requires-python"] = file.requires_python
        if file.metadata:
            digests = file.metadata if isinstance(file.metadata, dict) else {}
            text = next((f"{name}={digest}" for name, digest in digests.items()), "true")
            attributes["data-core-metadata"] = attributes["data-dist-info-metadata"] = text
        if file.gpg_sig is not None:
            attributes["data-gpg-sig"] = str(file.gpg_sig).lower()
        if file.yanked is not False:
            attributes["data-yanked"] = file.yanked if isinstance(file.yanked, str) else ""
        written = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
        lines.append(f"<a {written}>{html.escape(file.filename)}</a><br/>")
    return "\n".join([*lines, "</body></html>", ""]).encode()


class Rule(Struct, frozen=True):
    """An entry of `allow` or `deny`: a project, or some of its versions (`requests`, `requests>=2.32`)."""

    name: str
    requirement: Requirement

    @classmethod
    def read(cls, text: str) -> Rule:
        """Raises `ValueError`."""
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise ValueError(f"{text!r} is neither a project nor versions of one: {error}") from error
        if requirement.url or requirement.marker or requirement.extras:
            raise ValueError(f"{text!r}: a rule has a name and versions, nothing else")
        return cls(canonicalize_name(requirement.name), requirement)

    @property
    def whole(self) -> bool:
        """Whether all versions are meant."""
        return not self.requirement.specifier

    def names(self, name: str) -> bool:
        """Whether a project is meant."""
        return name == self.name

    def matches(self, version: Version | None, *, otherwise: bool) -> bool:
        """Whether a release is meant; `otherwise` where its version can't be known."""
        if self.whole:
            return True
        return otherwise if version is None else self.requirement.specifier.contains(version, prereleases=True)
