"""The sync client. Generated from the async one by tools/generate_sync.py: change that one and run the
tool."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from dsec.sdk._groups import AsyncGroup, Checks, Groups, Infos
from dsec.sdk._portal import Wrapper, call, unwrap
from dsec.sdk._sync import Client
from dsec.sdk._sync_sandbox import Sandbox
from dsec.spec.groups import Service


class Group(Wrapper):
    """Sandboxes that are started and ended as one. Make it with `create`, find it again with `find`; leaving
    `with` ends it. Like a sandbox, nothing else does but `kill` and its sandboxes' own ends.
    """

    _async: AsyncGroup

    def __init__(self, inner: AsyncGroup) -> None:
        """Not for callers."""
        self._async = inner

    @property
    def name(self) -> str:
        """The run of its sandboxes too."""
        return self._async.name

    @classmethod
    def create(
        cls,
        services: Mapping[str, Service],
        *,
        name: str | None = None,
        client: Client | None = None,
        deadline_s: float | None = None,
    ) -> Group:
        """Start all services: their sandboxes at once, then each one's command when those that it links to are ready.
        Returns when all are ready.

        `name`: None: one is made up. The same name and services again give the same group, and what was started isn't
        started again. Where a service fails, all of the group is ended: `ServiceFailed` says which and why, with what
        it wrote last. Raises `InvalidRequest`, `Conflict` (a service of this name has another spec; nothing is ended),
        and as `Sandbox.create`.
        """
        return Group(call(AsyncGroup.create(services, name=name, client=unwrap(client), deadline_s=deadline_s)))

    @classmethod
    def find(cls, name: str, *, client: Client | None = None) -> Group:
        """The group of a name, with those of its sandboxes that live. Raises `NotFound` where none does."""
        return Group(call(AsyncGroup.find(name, client=unwrap(client))))

    @classmethod
    def list(cls, *, client: Client | None = None) -> Groups:
        """The project's groups: their live sandboxes, by group and service."""
        return call(AsyncGroup.list(client=unwrap(client)))

    def sandbox(self, service: str) -> Sandbox:
        """The sandbox of a service. Raises `NotFound`."""
        return Sandbox(self._async.sandbox(service))

    def refresh(self) -> Infos:
        """The sandboxes as they are now, by service; ended ones too."""
        return call(self._async.refresh())

    def check(self) -> Checks:
        """Whether each service is ready now: one check of its health, where it has one, else whether its command runs
        or has ended with 0."""
        return call(self._async.check())

    def kill(self) -> None:
        """End all of it. Idempotent. Raises the first error of those that couldn't be ended."""
        return call(self._async.kill())

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return call(self._async.__aexit__(kind, error, trace))
