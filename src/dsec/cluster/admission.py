"""Who asks, and whether they may ask this: a key, then the right that the call takes (`verbs.py`).

What is refused is in the audit stream."""

from __future__ import annotations

from dsec.api.exchange import Scope
from dsec.cluster.audit import Audit
from dsec.cluster.iam import OPERATOR, Authority, Caller
from dsec.cluster.keys import Keys
from dsec.cluster.verbs import verb_of
from dsec.errors import PermissionDenied
from dsec.spec.iam import Verb


class Admission:
    """For the event loop."""

    def __init__(self, keys: Keys, authority: Authority, audit: Audit) -> None:
        self._keys = keys
        self._authority = authority
        self._audit = audit

    async def admit(self, bearer: str, scope: Scope, method: str = "") -> Caller:
        """Whose key it is, if it may make this call. `method`: in place of the request's. Raises `Unauthenticated`,
        `PermissionDenied`, `Unavailable`."""
        caller = await self._keys.authenticate(bearer)
        # An edge may read a path as it was sent, or decoded: what either means has to be allowed.
        for path in {scope["raw_path"].decode("ascii"), scope["path"]}:
            verb = verb_of(method or scope["method"], path)
            if verb is not None:
                self._demand(caller, verb, path)
        return caller

    async def admit_to(self, bearer: str, verb: Verb, about: str) -> Caller:
        """The same for a call whose right isn't to be seen in its path."""
        caller = await self._keys.authenticate(bearer)
        self._demand(caller, verb, about)
        return caller

    def _demand(self, caller: Caller, verb: Verb, about: str) -> None:
        project = OPERATOR if verb is Verb.OPERATE else caller.project
        if not self._authority.allowed(caller, verb, project):
            self._audit.refused(by=caller.name, project=caller.project, about=about, verb=verb)
            if verb is Verb.OPERATE:
                raise PermissionDenied(
                    "this key can't operate the cluster", remedy=f"Use one of the project {OPERATOR}."
                )
            self._authority.demand(caller, verb, project)
