"""What a policy decides: pure, and as quick with thousands of names as with one.

Owns the compiled policy and the classes of addresses. Invariants: nothing is allowed that no grant names; the most
specific rule wins (a name over a wildcard, a longer wildcard over a shorter one, anything over `internet`), and
among equals a refusal; a look-up costs as many hash look-ups as the name has labels; an address that isn't public is
allowed only by a grant that says `private`, or that names the address; metadata addresses only by the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dsec.errors import InvalidRequest
from dsec.plan.addresses import METADATA, plain, public, reachable
from dsec.plan.permissions import Definition, Registry
from dsec.spec.network import (
    DEFAULT_PORTS,
    LIMITS,
    Address,
    Block,
    Network,
    Permission,
    PermissionOptions,
    Reason,
    block_of,
    host_name,
    options_of,
    permissions,
)


class Rule(Struct, frozen=True):
    """One grant (or refusal) of a name or block."""

    permission: str
    allowed: bool
    ports: frozenset[int] | None
    """None: all."""
    private: bool = False
    connections: int | None = None
    bytes: int | None = None
    bytes_per_s: int | None = None
    gateway: str | None = None
    """The kind of gateway that answers at this name."""
    sandbox: str | None = None
    """The name of the sandbox that is meant."""
    intercept: bool = False
    """The gateway answers at this name by TLS."""


class GatewayGrant(Struct, frozen=True):
    """A permission that a gateway serves."""

    permission: str
    kind: str
    argument: str
    options: Mapping[str, Any]


class Decision(Struct, frozen=True):
    """What to do with a connection, before its address and its first bytes are known."""

    reason: Reason
    rule: Rule | None = None

    @property
    def allowed(self) -> bool:
        return self.reason is Reason.GRANTED


class Policy(Struct, frozen=True):
    """A compiled policy."""

    names: Mapping[str, tuple[Rule, ...]] = {}
    below: Mapping[str, tuple[Rule, ...]] = {}
    """By the name that they are below."""
    blocks: tuple[tuple[Block, Rule], ...] = ()
    """Most specific first; refusals first among equals."""
    internet: Rule | None = None
    gateways: tuple[GatewayGrant, ...] = ()

    @property
    def intercepts(self) -> bool:
        """The gateway of some name answers there by TLS."""
        return any(each.options.get("intercept") for each in self.gateways)

    @property
    def empty(self) -> bool:
        """Nothing is granted at all."""
        rules = (rule for table in (self.names, self.below) for each in table.values() for rule in each)
        return not (self.internet and self.internet.allowed) and not any(
            rule.allowed for rule in (*rules, *(rule for _, rule in self.blocks))
        )

    def own_names(self) -> list[str]:
        """Names at which the platform itself answers: gateways and other sandboxes."""
        own = (name for name, rules in self.names.items() for rule in rules if rule.gateway or rule.sandbox)
        return list(dict.fromkeys(own))

    def resolves(self, name: str) -> bool:
        """Whether some port of a name (in its one form) is granted."""
        for rules in self._levels(name):
            if any(rule.allowed for rule in rules):
                return True
            if any(rule.ports is None for rule in rules):
                return False
        return False

    def decide(self, name: str, port: int) -> Decision:
        """For a connection to a name (in its one form)."""
        known = False
        for rules in self._levels(name):
            known = known or any(rule.allowed for rule in rules)
            chosen: Rule | None = None
            for rule in rules:
                if rule.ports is None or port in rule.ports:
                    if not rule.allowed:
                        return Decision(Reason.FORBIDDEN, rule)
                    chosen = chosen or rule
            if chosen is not None:
                return Decision(Reason.GRANTED, chosen)
        return Decision(Reason.PORT_NOT_GRANTED if known else Reason.NOT_GRANTED)

    def decide_address(self, address: Address, port: int) -> Decision:
        """For a connection to an address that a program named itself."""
        address = plain(address)
        rule = self._by_block(address, port)
        if rule is not None:
            return Decision(Reason.GRANTED if rule.allowed else Reason.FORBIDDEN, rule)
        if self.internet is not None and self.internet.allowed and public(address):
            return Decision(Reason.GRANTED, self.internet)
        return Decision(Reason.ADDRESS_NOT_GRANTED)

    def check_address(self, rule: Rule, address: Address, port: int) -> Reason:
        """For the address that a granted name leads to."""
        address = plain(address)
        other = self._by_block(address, port)
        if other is not None:
            return Reason.GRANTED if other.allowed else Reason.FORBIDDEN
        if public(address) or (rule.private and reachable(address)):
            return Reason.GRANTED
        return Reason.PRIVATE_ADDRESS

    def _by_block(self, address: Address, port: int) -> Rule | None:
        """The rule of the smallest block. A metadata address is granted by itself alone, never by a block around it."""
        for block, rule in self.blocks:
            if address in block and (rule.ports is None or port in rule.ports):
                if rule.allowed and address in METADATA and block.num_addresses > 1:
                    continue
                return rule
        return None

    def _levels(self, name: str) -> Iterator[tuple[Rule, ...]]:
        rules = self.names.get(name)
        if rules is not None:
            yield rules
        if self.below:
            rest = name
            while (dot := rest.find(".")) >= 0:
                rest = rest[dot + 1 :]
                rules = self.below.get(rest)
                if rules is not None:
                    yield rules
        if self.internet is not None and "." in name and not name.endswith(".dsec"):
            yield (self.internet,)


EMPTY = Policy()


def compile_policy(network: Network, registry: Registry) -> Policy:
    """A policy that has passed `Registry.check`, made ready."""
    names: dict[str, list[Rule]] = {}
    below: dict[str, list[Rule]] = {}
    blocks: list[tuple[Block, Rule]] = []
    gateways: list[GatewayGrant] = []
    internet: Rule | None = None
    for each, grant in permissions(network):
        options = options_of(grant)
        definition = registry.definition(each)
        if each.kind == "internet":
            internet = _rule(each, options, definition, None)
        elif each.kind == "ip":
            ports = _ports(each, options, None)
            blocks.append((block_of(each.block), _rule(each, options, None, ports)))
        elif each.kind == "sandbox":
            rule = _rule(each, options, None, frozenset({each.port or 0}), sandbox=each.host)
            names.setdefault(each.host, []).append(rule)
        elif definition is None:
            rule = _rule(each, options, None, _ports(each, options, DEFAULT_PORTS))
            _place(each.host, rule, names, below)
        else:
            ports = None if options is None else frozenset(definition.ports)
            rule = _rule(each, options, definition, ports)
            for host in definition.hosts:
                _place(host, rule, names, below)
            blocks += [(block_of(text), rule) for text in definition.addresses]
            if definition.gateway is not None and options is not None:
                gateways.append(_gateway_grant(each, options, definition))
                rule = _rule(each, options, definition, frozenset({80}), gateway=definition.gateway)
                for host in registry.gateways[definition.gateway]:
                    names.setdefault(host, []).append(rule)
                if gateways[-1].options.get("intercept"):
                    rule = replace(rule, ports=frozenset({443}), intercept=True)
                    names.setdefault(_host_of(gateways[-1]), []).insert(0, rule)
    blocks.sort(key=lambda item: (-item[0].prefixlen, item[1].allowed))
    return Policy(
        {name: tuple(rules) for name, rules in names.items()},
        {name: tuple(rules) for name, rules in below.items()},
        tuple(blocks),
        internet,
        tuple(gateways),
    )


def _host_of(grant: GatewayGrant) -> str:
    """The name that an intercepting permission is for. Raises `InvalidRequest`."""
    host = str(grant.options.get("target") or grant.argument).partition("/")[0]
    try:
        return host_name(host)
    except ValueError as error:
        raise InvalidRequest(f"network: {grant.permission!r} can't be intercepted: {error}", field="network") from None


def _place(host: str, rule: Rule, names: dict[str, list[Rule]], below: dict[str, list[Rule]]) -> None:
    if host.startswith("*."):
        below.setdefault(host_name(host[2:]), []).append(rule)
    else:
        names.setdefault(host_name(host), []).append(rule)


def _ports(
    each: Permission, options: PermissionOptions | None, default: tuple[int, ...] | None
) -> frozenset[int] | None:
    """A refusal without a port is of all ports."""
    if each.port is not None:
        return frozenset({each.port})
    if options is None:
        return None
    if options.ports is not None:
        return frozenset(options.ports)
    return None if default is None else frozenset(default)


def _rule(
    each: Permission,
    options: PermissionOptions | None,
    definition: Definition | None,
    ports: frozenset[int] | None,
    *,
    gateway: str | None = None,
    sandbox: str | None = None,
) -> Rule:
    if options is None:
        return Rule(each.text, False, ports)
    return Rule(
        each.text,
        True,
        ports,
        private=bool(options.private) or (definition is not None and definition.private),
        connections=_lower(options.connections, definition and definition.connections),
        bytes=_lower(options.bytes, definition and definition.bytes),
        bytes_per_s=_lower(options.bytes_per_s, definition and definition.bytes_per_s),
        gateway=gateway,
        sandbox=sandbox,
    )


def _lower(one: Any, other: Any) -> Any:
    values = [value for value in (one, other) if value is not None]
    return min(values) if values else None


def _both(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a definition and of a policy, so that what either forbids is forbidden. `within`, which only this
    sets, is a second list that something has to be in."""
    merged = {**own, **given}
    for name in own.keys() & given.keys():
        mine, theirs = own[name], given[name]
        if name in {"requests", "tokens"}:
            merged[name] = min(mine, theirs)
        elif name == "before":
            merged[name] = min(mine if isinstance(mine, str) else mine.isoformat(), theirs)
        elif name == "deny":
            merged[name] = [*mine, *theirs]
        elif name in {"methods", "suites", "models"}:
            merged[name] = [each for each in theirs if each in mine]
        elif name in {"allow", "paths"}:
            merged["within"] = mine
    if own.keys() & {"refs", "pins"} and given.keys() & {"refs", "pins"}:
        merged["pins"] = {**given.get("pins", {}), **own.get("pins", {})}
        merged["within"] = [*own.get("refs", []), *own.get("pins", {})]
    return merged


def _gateway_grant(each: Permission, options: PermissionOptions, definition: Definition) -> GatewayGrant:
    given: dict[str, Any] = msgspec.to_builtins(options)
    merged = _both(definition.options, given)
    for name in LIMITS:
        limit = _lower(given.get(name), getattr(definition, name))
        if limit is not None:
            merged[name] = limit
    return GatewayGrant(each.text, definition.gateway or each.kind, each.argument, merged)
