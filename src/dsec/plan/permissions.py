"""What the names of permissions mean on a node: the built-in definitions and an operator's, as data.

Owns `Definition`, `Registry` and the built-ins. A permission that no definition names is refused, never ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from dsec.errors import InvalidRequest, Unsupported
from dsec.plan.addresses import covers
from dsec.spec.network import (
    DEFAULT_PORTS,
    LIMITS,
    KeyPolicy,
    Network,
    Permission,
    PermissionOptions,
    Port,
    block_of,
    host_name,
    options_of,
    permissions,
)

RESERVED = frozenset({"host", "ip", "sandbox", "internet"})
"""Their meaning is fixed: an operator can't define them anew."""
OWN_DOMAIN = ".dsec"
"""Names below it are the platform's: gateways, never anything outside."""


class Definition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One permission: either a gateway, or names and addresses with their ports, or both."""

    description: str = ""
    hosts: list[str] = []
    """Names; `*.` and a name for all below."""
    addresses: list[str] = []
    """Blocks that programs may name themselves."""
    ports: Annotated[tuple[Port, ...], Meta(min_length=1)] = DEFAULT_PORTS
    private: bool = False
    """The names may lead to private addresses."""
    gateway: str | None = None
    """The kind of gateway that serves it."""
    argument: Literal["none", "optional", "required"] = "none"
    """Whether it has a part after a colon."""
    accepts: list[str] = []
    """Options that a policy may set, besides limits."""
    options: dict[str, Any] = {}
    """For the gateway: `headers`, `deny`, ... A policy's own, which `accepts` names, narrow them, never widen them."""
    connections: Annotated[int, Meta(ge=1)] | None = None
    bytes: Annotated[int, Meta(ge=1)] | None = None
    bytes_per_s: Annotated[int, Meta(ge=1024)] | None = None
    requests_per_s: Annotated[float, Meta(gt=0)] | None = None


_PACKAGES = ["before", "allow", "deny"]

BUILT_IN: Mapping[str, Definition] = MappingProxyType(
    {
        "pypi": Definition(description="Python packages", gateway="pypi", accepts=_PACKAGES),
        "npm": Definition(description="npm packages", gateway="npm", accepts=_PACKAGES),
        "apt": Definition(description="Debian packages", gateway="apt", accepts=["suites"]),
        "go": Definition(
            description="Go modules; after a colon: of one path", gateway="go", argument="optional", accepts=_PACKAGES
        ),
        "git": Definition(
            description="git repositories by HTTP: git:HOST/PATH",
            gateway="git",
            argument="required",
            accepts=["write", "refs", "pins"],
        ),
        "http": Definition(
            description="paths of one host, TLS outside: http:HOST/PATH",
            gateway="http",
            argument="required",
            accepts=["paths", "methods", "intercept"],
        ),
        "inference": Definition(
            description="a model endpoint that the operator named, with credentials added outside",
            gateway="inference",
            argument="required",
            accepts=["models", "requests", "tokens"],
        ),
        "internet": Definition(description="any public name and address"),
    }
)


class Registry(Struct, frozen=True):
    """What the permissions of one node mean."""

    definitions: Mapping[str, Definition] = BUILT_IN
    gateways: Mapping[str, tuple[str, ...]] = {}
    """Kind -> the names at which it answers inside."""

    def definition(self, each: Permission) -> Definition | None:
        """What a permission means; None for `host`, `ip` and `sandbox`. Raises `InvalidRequest`, `Unsupported`."""
        if each.kind in ("host", "ip", "sandbox"):
            return None
        found = self.definitions.get(each.kind)
        if found is None:
            names = [*self.definitions, "host", "ip", "sandbox"]
            close = difflib.get_close_matches(each.kind, names, n=3, cutoff=0.5)
            known = ", ".join(close or sorted(names))
            raise InvalidRequest(
                f"there is no permission {each.kind!r}",
                remedy=f"{'Did you mean' if close else 'Use one of'}: {known}? A single name is granted as host:NAME.",
                field="network",
            )
        if each.argument and found.argument == "none":
            raise _invalid(f"{each.kind!r} takes nothing after a colon", each)
        if not each.argument and found.argument == "required":
            raise _invalid(f"{each.kind!r} needs an argument: {found.description}", each)
        if found.gateway is not None and found.gateway not in self.gateways:
            raise Unsupported(
                f"{each.kind!r} needs a gateway that this node doesn't have", remedy="Leave it out.", field="network"
            )
        return found

    def check(self, network: Network) -> None:
        """Raises `InvalidRequest` or `Unsupported`: why this policy can't be."""
        try:
            parts = permissions(network)
        except ValueError as error:
            raise InvalidRequest(f"network: {error}", field="network") from None
        for each, grant in parts:
            definition = self.definition(each)
            if each.host.endswith(OWN_DOMAIN):
                raise _invalid(f"{each.text!r}: names below {OWN_DOMAIN} are the platform's", each)
            options = options_of(grant)
            if options is not None:
                _check_options(each, options, definition)

    def check_key(self, network: Network, policy: KeyPolicy) -> str | None:
        """Why a key may not grant this, or None. `network` has passed `check`."""
        exact = {text for text in policy.allow if not text.endswith("*")}
        starts = tuple(text[:-1] for text in policy.allow if text.endswith("*"))
        for each, grant in permissions(network):
            options = options_of(grant)
            if options is None:
                continue
            if each.text not in exact and not each.text.startswith(starts):
                return f"it may not grant {each.text!r}"
            if each.kind == "internet" and not policy.internet:
                return "it may not grant 'internet'"
            if options.private and not policy.private:
                return f"it may not grant private addresses ({each.text!r})"
            if each.kind == "ip":
                has_public, has_private = covers(block_of(each.block))
                if has_private and not policy.private:
                    return f"it may not grant private addresses ({each.text!r})"
                if has_public and not policy.internet:
                    return f"it may not grant public addresses ({each.text!r})"
        return None


def within(inner: KeyPolicy, outer: KeyPolicy) -> bool:
    """Whether one key's policy allows nothing that another's doesn't."""
    starts = tuple(text[:-1] for text in outer.allow if text.endswith("*"))
    return (
        inner.internet <= outer.internet
        and inner.private <= outer.private
        and all(text in outer.allow or text.startswith(starts) for text in inner.allow)
    )


def check_definition(name: str, definition: Definition) -> str | None:
    """What is wrong with an operator's definition, or None."""
    if name in RESERVED:
        return "this name has a fixed meaning"
    if definition.gateway is None and not definition.hosts and not definition.addresses:
        return "it has no hosts, no addresses and no gateway"
    if definition.gateway is None and (definition.argument != "none" or definition.options):
        return "argument and options are for gateways"
    unknown = set(definition.accepts) - set(PermissionOptions.__struct_fields__)
    if unknown:
        return f"accepts names no option: {', '.join(sorted(unknown))}"
    try:
        for host in definition.hosts:
            if host_name(host.removeprefix("*.")).endswith(OWN_DOMAIN):
                return f"names below {OWN_DOMAIN} are the platform's"
        for block in definition.addresses:
            block_of(block)
    except ValueError as error:
        return str(error)
    return None


def _check_options(each: Permission, options: PermissionOptions, definition: Definition | None) -> None:
    given = {name for name, value in asdict(options).items() if value is not None}
    if each.kind in ("host", "ip"):
        taken = {"ports", "private"} if each.kind == "host" else {"ports"}
    else:
        taken = set(definition.accepts) if definition is not None else set()
    wrong = given - taken - LIMITS
    if wrong:
        raise _invalid(f"{each.text!r} doesn't take the option {', '.join(sorted(wrong))}", each)
    if options.ports is not None and each.port is not None:
        raise _invalid(f"{each.text!r} names its port already", each)


def _invalid(message: str, each: Permission) -> InvalidRequest:
    return InvalidRequest(f"network: {message}", field="network", permission=each.text)
