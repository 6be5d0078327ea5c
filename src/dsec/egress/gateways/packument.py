"""Packuments, npm's descriptions of packages: filtered by rules, their tarballs' addresses made the gateway's. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsec.egress.gateways.base import moment
from dsec.egress.gateways.rules import Either
from dsec.egress.gateways.semver import order

ABBREVIATED = "application/vnd.npm.install-v1+json"

_KEPT = [
    "name",
    "version",
    "deprecated",
    "dependencies",
    "optionalDependencies",
    "devDependencies",
    "bundleDependencies",
    "bundledDependencies",
    "peerDependencies",
    "peerDependenciesMeta",
    "acceptDependencies",
    "bin",
    "directories",
    "dist",
    "engines",
    "cpu",
    "os",
    "libc",
    "funding",
    "_hasShrinkwrap",
    "hasInstallScript",
]


def filtered(
    document: Mapping[str, Any], name: str, rules: Either[str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """A packument as the rules show it (None: all of it), and why which version is hidden."""
    given = document.get("time")
    times: dict[str, Any] = given if isinstance(given, dict) else {}
    versions = document.get("versions")
    hidden, shown = {}, {}
    for version, manifest in versions.items() if isinstance(versions, dict) else ():
        if not isinstance(manifest, dict) or not isinstance(manifest.get("dist"), dict):
            continue
        why = rules.hidden(name, version, moment(times.get(version))) if rules is not None else None
        if why is None:
            shown[version] = manifest
        else:
            hidden[version] = why
    result = {**document, "versions": shown, "dist-tags": _tags(document.get("dist-tags"), shown)}
    if hidden:
        result.pop("readme", None)  # the newest version's, like what else is said of the package as a whole
        result["time"] = {key: at for key, at in times.items() if key in shown or key == "created"}
        kept = [at for key, at in result["time"].items() if key in shown]
        if kept:
            result["time"]["modified"] = max(kept, key=str)
    return result, hidden


def _tags(tags: Any, shown: Mapping[str, Any]) -> dict[str, str]:
    """Tags of versions that are shown; `latest` always is one: the highest release, where its own is hidden."""
    kept = {tag: version for tag, version in tags.items() if version in shown} if isinstance(tags, dict) else {}
    if "latest" not in kept and shown:
        ordered = [(key[3], key, version) for version in shown if (key := order(version)) is not None]
        kept["latest"] = max(ordered)[2] if ordered else list(shown)[-1]
    return kept


def abbreviated(document: Mapping[str, Any]) -> dict[str, Any]:
    """What an installation needs of it."""
    short: dict[str, Any] = {key: document[key] for key in ("name", "dist-tags", "modified") if key in document}
    short["versions"] = {
        version: {key: value for key, value in manifest.items() if key in _KEPT}
        for version, manifest in document["versions"].items()
    }
    times = document.get("time")
    if "modified" not in short and isinstance(times, dict) and "modified" in times:
        short["modified"] = times["modified"]
    return short


def linked(document: dict[str, Any], link: Callable[[str], str]) -> dict[str, Any]:
    """The same with the tarballs' addresses written by `link`, which gets the upstream's."""
    versions = {
        version: {**manifest, "dist": {**manifest["dist"], "tarball": link(str(manifest["dist"].get("tarball", "")))}}
        for version, manifest in document["versions"].items()
    }
    return {**document, "versions": versions}
