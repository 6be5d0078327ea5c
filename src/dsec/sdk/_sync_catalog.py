"""The sync client. Generated from the async one by tools/generate_sync.py: change that one and run the
tool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsec.sdk._catalog import AsyncCatalog, Info, OnLog, OnStep
from dsec.sdk._functions import AsyncFunction
from dsec.sdk._nodes import AsyncNodes, Row
from dsec.sdk._portal import Wrapper, call, iterate
from dsec.sdk._rights import AsyncRights
from dsec.spec.functions import FunctionCall, FunctionResult, FunctionSpec
from dsec.spec.network import KeyPolicy, Network


class Catalog(Wrapper):
    """The layers and environments that the project may read.

    A layer is named `NAME@VERSION` or by its digest. Calls that take long tell `on_step` how far they are; they are not
    repeated when the connection breaks (`Unavailable`): what was finished by then is found again quickly.
    """

    _async: AsyncCatalog

    def __init__(self, inner: AsyncCatalog) -> None:
        """Not for callers."""
        self._async = inner

    def layers(self) -> list[Info]:
        """All of them, oldest first."""
        return call(self._async.layers())

    def layer(self, reference: str) -> Info:
        """Everything about one. Raises `NotFound`."""
        return call(self._async.layer(reference))

    def environment(self, name: str) -> Info:
        """`environment` and its `layers`, top first. Raises `EnvironmentNotFound`."""
        return call(self._async.environment(name))

    def create_environment(
        self,
        name: str,
        layers: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        description: str = "",
        readers: Sequence[str] = (),
    ) -> Info:
        """Make or replace an environment of layers, top first; `env:NAME` stands for all layers of an environment.
        `readers`: projects that may use it too (`*`: all). Raises `NotFound`, `InvalidRequest`."""
        return call(
            self._async.create_environment(
                name, layers, env=env, user=user, workdir=workdir, description=description, readers=readers
            )
        )

    def remove_environment(self, name: str) -> None:
        """Forget one; sandboxes of it go on. Raises `EnvironmentNotFound`."""
        return call(self._async.remove_environment(name))

    def remove_layer(self, name: str) -> None:
        """Forget a layer's name; its data goes with `collect`, once nothing needs it. Raises `NotFound`."""
        return call(self._async.remove_layer(name))

    def import_image(
        self,
        image: str,
        environment: str,
        *,
        platform: str | None = None,
        credentials: str | None = None,
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make an environment of a registry's image, `HOST[:PORT]/NAME[:TAG][@DIGEST]`. `credentials`:
        `user:password`. Raises `NotFound`, `InvalidRequest`, `Unsupported`, `TooLarge`, `LayerCorrupt`, `Unavailable`,
        `PermissionDenied`."""
        return call(
            self._async.import_image(
                image, environment, platform=platform, credentials=credentials, readers=readers, on_step=on_step
            )
        )

    def import_archive(
        self,
        path: str | Path,
        environment: str,
        *,
        tag: str | None = None,
        platform: str | None = None,
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make an environment of an image in an archive of this machine's (`docker save`, an OCI layout). Raises as
        `import_image`."""
        return call(
            self._async.import_archive(path, environment, tag=tag, platform=platform, readers=readers, on_step=on_step)
        )

    def build(
        self,
        path: str | Path,
        name: str,
        *,
        at: str = "/",
        kind: str = "workspace",
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make a layer of a tar archive (also compressed) of this machine's, placed at the path `at`. `readers`: as of
        `create_environment`. Raises `InvalidRequest`, `Unsupported`, `TooLarge`, `Conflict`."""
        return call(self._async.build(path, name, at=at, kind=kind, readers=readers, on_step=on_step))

    def build_packages(
        self,
        packages: Sequence[str],
        name: str,
        *,
        on: str | None = None,
        suite: str | None = None,
        mirror: str | None = None,
        kind: str | None = None,
        fresh: bool = False,
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make a layer of Debian packages and what they need: a whole base, or (`on`) what they add to an environment.

        `suite`: like `bookworm`; None: the environment's, or the node's own. `mirror`: in place of the node's own, with
        a key of the project `default`. `kind`: None: `base`, or `toolkit` with `on`. `fresh`: install again what was
        installed before. Raises `InvalidRequest` for what
        the suite hasn't got, `EnvironmentNotFound`, `BuildFailed` with dpkg's last output, `Unavailable` where no
        mirror answers, `Unsupported`, `PermissionDenied`, `Conflict`."""
        return call(
            self._async.build_packages(
                packages,
                name,
                on=on,
                suite=suite,
                mirror=mirror,
                kind=kind,
                fresh=fresh,
                readers=readers,
                on_step=on_step,
            )
        )

    def build_dockerfile(
        self,
        context: str | Path,
        name: str,
        *,
        dockerfile: str | Path | None = None,
        target: str | None = None,
        args: Mapping[str, str] | None = None,
        network: Network | None = None,
        fresh: bool = False,
        platform: str | None = None,
        readers: Sequence[str] = (),
        on_log: OnLog | None = None,
    ) -> Info:
        """Make the environment `name` of a Dockerfile (None: the one in `context`, a directory of this machine).

        `target`: the stage that counts. `args`: for its ARG. `network`: what its RUN may reach, by named permission.
        `fresh`: do every step again. Raises `InvalidRequest` and `Unsupported`, which name the line, `BuildFailed`
        (`details` has `line`, `exit_code` and the last `output`), `PermissionDenied`, `TooLarge`, and what importing an
        image raises.
        """
        return call(
            self._async.build_dockerfile(
                context,
                name,
                dockerfile=dockerfile,
                target=target,
                args=args,
                network=network,
                fresh=fresh,
                platform=platform,
                readers=readers,
                on_log=on_log,
            )
        )

    def merge(
        self,
        layers: Sequence[str],
        name: str,
        *,
        kind: str = "workspace",
        readers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> Info:
        """Make one layer of several, top first. `readers`: as of `create_environment`. Raises `NotFound`,
        `Conflict`."""
        return call(self._async.merge(layers, name, kind=kind, readers=readers, on_step=on_step))

    def verify(self, reference: str, *, on_step: OnStep | None = None) -> Info:
        """Read all of a layer and compare it with its digests. Raises `NotFound`, `LayerCorrupt`."""
        return call(self._async.verify(reference, on_step=on_step))

    def collect(self, *, least_age_s: float | None = None, on_step: OnStep | None = None) -> int:
        """Delete what nothing needs any more and is that old (None: an hour). Returns the bytes that were freed. Raises
        `Unavailable`."""
        return call(self._async.collect(least_age_s=least_age_s, on_step=on_step))

    def export(self, reference: str, path: str | Path, *, on_step: OnStep | None = None) -> int:
        """Write a layer to a file, as an archive of the kind that OCI images hold. Returns its size. Raises
        `NotFound`, `Unavailable`; then there is no file."""
        return call(self._async.export(reference, path, on_step=on_step))


class Function(Wrapper):
    """A function that is called in fresh, jailed processes on the server's side. Make it with `Client.function`.

    Calls have no state: what one changes (globals, files, processes) no other sees.
    """

    _async: AsyncFunction

    def __init__(self, inner: AsyncFunction) -> None:
        """Not for callers."""
        self._async = inner

    @property
    def spec(self) -> FunctionSpec:
        return self._async.spec

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; its value. Cancelling it ends the call. Raises `FunctionFailed` with what it raised or how it ended,
        and as `run`."""
        return call(self._async.remote(*args, **kwargs))

    def run(
        self, asked: FunctionCall | None = None, *, stdin: bytes = b"", files: Mapping[str, bytes] | None = None
    ) -> FunctionResult:
        """One call, or for a program one run with `stdin` and `files`; whatever becomes of it is in the result.

        Safe to repeat: a connection that breaks is made again, and the call made again. Raises `InvalidRequest`,
        `EnvironmentNotFound`, `Unsupported` (an import fails, a toolchain is missing)."""
        return call(self._async.run(asked, stdin=stdin, files=files))

    def map(self, *iterables: Iterable[Any]) -> Iterator[Any]:
        """Call it with an item of each, as the built-in `map` does; yields the values in order, while later calls run.
        Leaving the loop ends them. Raises `FunctionFailed` for the first call that fails, when it is its turn."""
        return iterate(self._async.map(*iterables))

    def run_many(
        self, calls: Iterable[FunctionCall], *, ordered: bool = False, stop: bool = False
    ) -> Iterator[FunctionResult]:
        """Many calls: a result each, as they come or `ordered`. `stop`: begin no more after the first that failed.
        Leaving the loop ends what runs. Raises as `run`."""
        return iterate(self._async.run_many(calls, ordered=ordered, stop=stop))


class Rights(Wrapper):
    """Who may do what, in the project of this client's key and in those below it. Only in a cluster: one machine has
    API keys alone (`Unsupported` or `NotFound`)."""

    _async: AsyncRights

    def __init__(self, inner: AsyncRights) -> None:
        """Not for callers."""
        self._async = inner

    def projects(self) -> list[Row]:
        """Those on record, each with its quota, its weight, and how many sandboxes live in it and below."""
        return call(self._async.projects())

    def create_project(self, path: str, *, quota: Mapping[str, Any] | None = None, weight: float = 1.0) -> Row:
        """A sub-project. `quota`: `sandboxes`, `backends` (by name), `cpus`, `memory_bytes`, `creates_per_s`; of it and
        all below it together. Raises `PermissionDenied`, `Conflict` (names are used once), `InvalidRequest` (above a
        parent's)."""
        return call(self._async.create_project(path, quota=quota, weight=weight))

    def change_project(self, path: str, *, quota: Mapping[str, Any] | None = None, weight: float | None = None) -> Row:
        """Another quota or weight; None: as it is. Takes the right to make projects in its parent."""
        return call(self._async.change_project(path, quota=quota, weight=weight))

    def delete_project(self, path: str) -> None:
        """It and all below it, for good: their keys are refused from now on, their sandboxes are ended."""
        return call(self._async.delete_project(path))

    def roles(self, project: str | None = None) -> list[Row]:
        """Those on a project and below it; None: the client's."""
        return call(self._async.roles(project))

    def give_role(
        self,
        principal: str,
        role: str | None = None,
        *,
        verbs: Sequence[str] | None = None,
        project: str | None = None,
        ttl_s: float | None = None,
    ) -> Row:
        """A role (or single permissions) on a project and all below it, at most what this key's principal holds.
        `principal`: `person:NAME`, `agent:NAME` or `service:NAME`. Raises `PermissionDenied`."""
        return call(self._async.give_role(principal, role, verbs=verbs, project=project, ttl_s=ttl_s))

    def take_role(self, role_id: str) -> None:
        """Take it away, and all that was given by it. Raises `NotFound`, `PermissionDenied`."""
        return call(self._async.take_role(role_id))

    def create_key(
        self,
        label: str = "",
        *,
        project: str | None = None,
        principal: str | None = None,
        scopes: Sequence[str] | None = None,
        ttl_s: float | None = None,
        policy: KeyPolicy | None = None,
    ) -> Row:
        """A key: `key` (seen this once), `id`, `project`. `principal`: whose roles it uses; None: this key's own.
        `scopes`: at most these permissions. Raises `PermissionDenied`."""
        return call(
            self._async.create_key(
                label, project=project, principal=principal, scopes=scopes, ttl_s=ttl_s, policy=policy
            )
        )

    def rotate_key(self, key_id: str, *, overlap_s: float = 300.0) -> Row:
        """A new key with the same rights; the old one is good for `overlap_s` more."""
        return call(self._async.rotate_key(key_id, overlap_s=overlap_s))

    def audit(self, after: int = 0, limit: int = 100) -> tuple[list[Row], int]:
        """What was changed and refused in the project and below it, oldest first, and the number to go on from."""
        return call(self._async.audit(after, limit))


class Nodes(Wrapper):
    """A cluster's nodes, with a key of its operator's (of the project `default`). Only in a cluster (else
    `NotFound`)."""

    _async: AsyncNodes

    def __init__(self, inner: AsyncNodes) -> None:
        """Not for callers."""
        self._async = inner

    def list(self) -> list[Row]:
        """Each with its number (`edge`), health, labels and load."""
        return call(self._async.list())

    def cordon(self, edge: int) -> Row:
        """It gets no new sandboxes; those that it has go on. Raises `NotFound`, `PermissionDenied`."""
        return call(self._async.cordon(edge))

    def uncordon(self, edge: int) -> Row:
        """It gets new ones again."""
        return call(self._async.uncordon(edge))

    def drain(self, edge: int, *, deadline_s: float | None = None) -> Iterator[Row]:
        """Cordon it and move what it has to other nodes, under the same ids: a row each, as it is known, with `id` and
        either `edge` (where it is now) or `error` (it stays). One in which anything runs is waited for, 300 s unless
        `deadline_s` says otherwise. Asked again it goes on, which a broken connection does by itself. Raises as
        `cordon`, `SandboxLost` where the node is lost."""
        return iterate(self._async.drain(edge, deadline_s=deadline_s))
