"""Debian packages for a system that isn't this host: this host's apt says which are needed and in what order they are
unpacked and configured, fetches them from its mirrors, and checks their signatures by the keys that this host trusts.

Nothing of a package runs here; `dsec.builder.packages` installs them in a sandbox. Of the system only its list of
packages is read, which may be hostile: apt gets it anew, of fields and characters that such lists are made of.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from dsec.errors import InvalidRequest, PlatformError, Unavailable, Unsupported
from dsec.store.build import apt_options, host_sources, host_suite
from dsec.store.programs import Failed, Stop, run_program
from dsec.store.shared import Progress

PACKAGE = r"^[a-z0-9][a-z0-9+.-]{1,100}$"
SUITE = r"^[a-z][a-z0-9]{1,40}(-[a-z]{1,20})?$"
MIRROR = r"^https?://[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]{1,500}$"
MAX_STATUS_BYTES = 64 << 20
_KEYS = ("trusted.gpg.d", "auth.conf.d")
_KEYRINGS = ("debian-archive-keyring.gpg", "ubuntu-archive-keyring.gpg")
_FIELDS = (
    "Package", "Status", "Essential", "Installed-Size", "Architecture", "Multi-Arch", "Version", "Provides", "Replaces",
    "Depends", "Pre-Depends", "Breaks", "Conflicts",
)  # fmt: skip
"""Size and dependencies also tell apt whether a version is the one of the mirror: else it fetches that again."""
_VALUE = re.compile(r"[A-Za-z0-9 .,:;()<>=|~+_\[\]!/-]{1,100000}")
_STEP = re.compile(r"^(Inst|Conf|Remv|Purg) ([a-z0-9][a-z0-9+.-]*)(?::\w+)?(?: \[[^\]]*\])? \((\S+) .*\[(\w+)\]\)")
_MISSING = re.compile(
    r"^E: (?:Unable to locate package|Couldn't find any package by \w+) '?([^\s']+)"
    r"|^E: Package '?([^\s']+?)'? has no installation candidate",
    re.MULTILINE,
)
_UNREACHED = re.compile(
    r"Could not (resolve|connect)|Temporary failure|Unable to connect|Connection (failed|timed out|refused)"
    r"|Cannot initiate the connection|Network is unreachable|No route to host"
)


class Target(NamedTuple):
    """The system that the packages are for."""

    status: bytes
    """Its /var/lib/dpkg/status."""
    distribution: str = "debian"
    suite: str = ""


class Step(NamedTuple):
    """One call of dpkg."""

    verb: str
    """`unpack` files, or `configure` packages."""
    names: Sequence[str]


class Fetched(NamedTuple):
    """Packages that are here."""

    files: Sequence[Path]
    steps: Sequence[Step]
    made_at: int
    """The time of the youngest package: the same packages have the same."""


def target_of(status: bytes, release: bytes) -> Target:
    """What a system says of itself. `release`: its os-release."""
    said = dict(re.findall(r'^([A-Z_]+)="?([a-z0-9.-]*)"?$', release.decode(errors="replace"), re.MULTILINE))
    return Target(status, said.get("ID", ""), said.get("VERSION_CODENAME", ""))


def installed(status: bytes) -> tuple[str, str]:
    """A system's list of packages with nothing in it but what apt needs, and its architecture. Raises `InvalidRequest`
    for what is no such list."""
    stanzas, architecture = [], ""
    for text in status.decode(errors="replace").split("\n\n"):
        fields = {name: value for name, value in _fields(text).items() if _VALUE.fullmatch(value)}
        if not re.match(PACKAGE, fields.get("Package", "")) or "installed" not in fields.get("Status", ""):
            continue
        if fields["Package"] == "dpkg":
            architecture = fields.get("Architecture", "")
        stanzas.append("".join(f"{name}: {fields[name]}\n" for name in _FIELDS if name in fields))
    if not re.fullmatch(r"[a-z0-9-]{1,20}", architecture):
        raise InvalidRequest("the environment isn't a Debian system: its list of packages has no dpkg")
    return "\n".join(stanzas), architecture


def _fields(stanza: str) -> Mapping[str, str]:
    return dict(re.findall(r"^([A-Za-z-]+): *(.*)$", stanza, re.MULTILINE))


def fetch(
    scratch: Path,
    packages: Sequence[str],
    target: Target,
    *,
    suite: str,
    mirror: str | None,
    progress: Progress,
    stop: Stop,
) -> Fetched:
    """Have apt fetch `packages` and what they need beside what `target` has, into `scratch`. Blocks.

    Raises `InvalidRequest` for a package or suite that doesn't exist, or doesn't go with what is there, `Unavailable`
    where no mirror answers, `Unsupported` where this host has no apt, `PlatformError` with apt's last words.
    """
    if shutil.which("apt-get") is None:
        raise Unsupported("apt-get is missing on the node", remedy="Install it: apt-get install apt, from a Debian.")
    apt = _Apt(scratch, target, suite, mirror, stop)
    progress(f"asking for {suite}", 0, 0)
    apt.run("update")
    steps, files = planned(apt.run("-s", "install", "-y", *packages))
    if files:
        addresses = apt.run("--print-uris", "-qq", "install", "-y", *packages)
        total = sum(map(int, re.findall(r"^'\S+' \S+ (\d+)", addresses, re.MULTILINE)))
        step = f"fetching {len(files)} packages"
        apt.run(
            "--download-only", "install", "-y", *packages, tick=lambda: progress(step, min(apt.size(), total), total)
        )
        progress(step, total, total)
    paths = [apt.archives / name for name in files]
    return Fetched(paths, steps, max(map(made_at, paths), default=0))


def planned(simulated: str) -> tuple[Sequence[Step], Sequence[str]]:
    """What apt would have dpkg do, of what `apt-get -s install` said, and the files that it takes."""
    found = []
    files = []
    for line in simulated.splitlines():
        match = _STEP.match(line)
        if match is None:
            continue
        verb, name, version, architecture = match.groups()
        if verb == "Inst":
            files.append(f"{name}_{version.replace(':', '%3a')}_{architecture}.deb")
            found.append(("unpack", files[-1]))
        elif verb == "Conf":
            found.append(("configure", name))
        else:
            raise InvalidRequest(f"{name} would have to be removed", field="packages")
    return [Step(verb, [name for _, name in each]) for verb, each in groupby(found, lambda pair: pair[0])], files


def made_at(package: Path) -> int:
    """When a package was made, by itself: dpkg-deb gives no file in it a later time."""
    with package.open("rb") as file:
        head = file.read(8 + 60)
    if not head.startswith(b"!<arch>\n") or not head[24:36].strip().isdigit():
        raise PlatformError(f"{package.name} is no Debian package")
    return int(head[24:36])


class _Apt:
    """apt with a configuration of its own, of which only the mirrors, keys and proxies are this host's."""

    def __init__(self, scratch: Path, target: Target, suite: str, mirror: str | None, stop: Stop) -> None:
        self._stop = stop
        self._suite = suite
        self.archives = scratch / "cache" / "archives"
        etc = scratch / "etc"
        folders = ("apt.conf.d", "preferences.d", "sources.list.d")
        for path in (scratch / "state/lists/partial", self.archives / "partial", *(etc / name for name in folders)):
            path.mkdir(parents=True)
        status, architecture = installed(target.status)
        (scratch / "status").write_text(status)
        for name in _KEYS:
            (etc / name).mkdir()
            for file in Path("/etc/apt", name).glob("*"):
                (etc / name / file.name).symlink_to(file)
        if (login := Path("/etc/apt/auth.conf")).exists():
            (etc / "auth.conf").symlink_to(login)
        for name in _KEYRINGS:
            if (keyring := Path("/usr/share/keyrings", name)).exists():
                (etc / "trusted.gpg.d" / name).symlink_to(keyring)
        if mirror:
            (etc / "sources.list").write_text(f"deb {mirror} {suite} main\n")
        else:
            for number, (file, text) in enumerate(own_sources(target.distribution, suite)):
                (etc / "sources.list.d" / f"{number}{file.suffix}").write_text(text)
        options = {
            "Dir::State": scratch / "state",
            "Dir::State::status": scratch / "status",
            "Dir::Cache": scratch / "cache",
            "Dir::Etc": etc,
            "Dir::Log": scratch / "log",
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Get::Remove": "false",
            "APT::Sandbox::User": "root",
            "APT::Update::Error-Mode": "any",
            "Debug::NoLocking": "true",
        }
        lines = [*apt_options(), *(f'{name} "{value}";' for name, value in options.items())]
        self._config = scratch / "apt.conf"
        self._config.write_text("".join(f"{line}\n" for line in lines))

    def run(self, *arguments: str, tick: Callable[[], None] = lambda: None) -> str:
        """Its output. Raises as `fetch`."""
        command = ["apt-get", "-q", "-o", "Dpkg::Use-Pty=false", *arguments]
        try:
            return run_program(command, stop=self._stop, tick=tick, env={"APT_CONFIG": str(self._config)})
        except Failed as error:
            raise explained(error.output, self._suite) from error

    def size(self) -> int:
        """Bytes that have come."""
        found = 0
        for file in (*self.archives.glob("*.deb"), *(self.archives / "partial").glob("*")):
            try:
                found += file.stat().st_size
            except FileNotFoundError:  # it was renamed
                continue
        return found


def explained(output: str, suite: str) -> Exception:
    """What apt's, or mmdebstrap's, last words mean to who asked for packages."""
    missing = sorted({first or second for first, second in _MISSING.findall(output)})
    said = [line for line in output.splitlines() if line.startswith("E: ")] or output.splitlines()[-5:]
    words = " / ".join(said)[:1000]
    if missing:
        return InvalidRequest(f"{suite} has no package {', '.join(missing)}", field="packages")
    if _UNREACHED.search(output):
        return Unavailable(f"the node reaches no mirror of {suite}: {words}", remedy="Check its network, or --mirror.")
    if re.search(r"does not have a Release file|404 +Not Found", output):
        return InvalidRequest(f"the mirror has no suite {suite}: {words}", field="suite")
    if "NO_PUBKEY" in output or "is not signed" in output:
        return InvalidRequest(
            f"what the mirror says of {suite} isn't signed by a key that the node trusts: {words}",
            remedy="Keys are those in the node's /etc/apt/trusted.gpg.d.",
            field="mirror",
        )
    if re.search(r"^E: (Unable to correct problems|Packages need to be removed)", output, re.MULTILINE):
        detail = re.findall(r"^ (\S+ : .*)$", output, re.MULTILINE)
        return InvalidRequest(
            f"these packages don't go together, or not with what is there: {'; '.join(detail)[:1000] or words}",
            field="packages",
        )
    return PlatformError(f"apt failed: {words}", remedy="Check with `apt-get update` on the node, and its disk.")


def own_sources(distribution: str, suite: str) -> Sequence[tuple[Path, str]]:
    """The files of this host's own sources, with what they say of a suite: of one that isn't in them, what they say of
    this host's. Raises `InvalidRequest` where they are another distribution's."""
    own = suite if host_sources(suite) else host_suite()
    files = host_sources(own)
    if not files or (own != suite and distribution != host_distribution()):
        raise InvalidRequest(
            f"the node's own mirrors have no suite {suite} of {distribution or 'an unnamed distribution'}",
            remedy="Name one: --mirror.",
            field="suite",
        )
    return [(file, for_suite(file.read_text(), own, suite)) for file in files]


def for_suite(sources: str, own: str, suite: str) -> str:
    """Sources of one suite, as they are for another."""
    return re.sub(rf"(?<![\w.-]){re.escape(own)}(?=(-updates|-security)?(?![\w.-]))", suite, sources)


def host_distribution() -> str:
    """As its os-release calls it."""
    try:
        return target_of(b"", Path("/etc/os-release").read_bytes()).distribution
    except OSError:
        return ""
