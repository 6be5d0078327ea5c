"""Permissions by name: their grammar, what they mean, and what a compiled policy decides."""

from __future__ import annotations

import datetime
import ipaddress
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.errors import InvalidRequest, Unsupported
from dsec.plan.addresses import covers, plain, public
from dsec.plan.egress import EMPTY, Policy, compile_policy
from dsec.plan.permissions import BUILT_IN, Definition, Registry, check_definition, within
from dsec.spec.network import KeyPolicy, Network, PermissionOptions, Reason, host_name, permission

REGISTRY = Registry(
    {
        **BUILT_IN,
        "db": Definition(hosts=["db.internal", "*.shard.internal"], ports=(5432,), private=True, connections=4),
    },
    {"pypi": ("pypi.dsec",), "git": ("git.dsec",), "http": ("http.dsec",)},
)


def compiled(network: Network) -> Policy:
    REGISTRY.check(network)
    return compile_policy(network, REGISTRY)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Example.COM.", "example.com"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("ｅxample.com", "example.com"),
        ("a_b.example", "a_b.example"),
        ("localhost", "localhost"),
    ],
)
def test_a_name_has_one_form(text: str, name: str) -> None:
    assert host_name(text) == name
    assert host_name(name) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a..b",
        "-a.example",
        "a-.example",
        "a b",
        "a/b",
        "x" * 64,
        ".".join(["a" * 60] * 5),
        "xn--zzzz-.example",
        "1.2.3.4",
        "127.1",
        "2130706433",
        "0x7f000001",
        "1.2.3.0x4",
        "１.２.３.４",
        "[::1]",
        "::1",
        "a\0b",
        "*.x",
        "a%b",
    ],
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        host_name(text)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("pypi", "pypi"),
        ("host:DB.Internal.:5432", "host:db.internal:5432"),
        ("host:*.Example.com", "host:*.example.com"),
        ("ip:10.0.0.0/8", "ip:10.0.0.0/8"),
        ("ip:10.1.2.3:22", "ip:10.1.2.3:22"),
        ("ip:::ffff:10.1.2.3", "ip:10.1.2.3"),
        ("ip:[2001:DB8::1]:443", "ip:[2001:db8::1]:443"),
        ("sandbox:db:5432", "sandbox:db:5432"),
        ("git:github.com/org/repo", "git:github.com/org/repo"),
    ],
)
def test_a_permission_has_one_spelling(text: str, canonical: str) -> None:
    assert permission(text).text == canonical
    assert permission(canonical).text == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "PYPI",
        "host:",
        "host:*",
        "host:*.com",
        "host:a.*.example",
        "host:x:0",
        "host:x:65536",
        "host:x:-1",
        "host:x:１",
        "ip:10.0.0.1/8",
        "ip:10.0.0",
        "ip:[::1",
        "ip:[::1]x",
        "sandbox:db",
        "git:a b",
        "a" * 600,
        ":",
        "host:::1",
    ],
)
def test_what_is_no_permission(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        permission(text)


@pytest.mark.parametrize(
    ("network", "error", "words"),
    [
        ({"pipy": True}, InvalidRequest, "pypi"),
        ({"host": True}, InvalidRequest, "after a colon"),
        ({"git": True}, InvalidRequest, "argument"),
        ({"pypi:x": True}, InvalidRequest, "nothing after a colon"),
        ({"npm": True}, Unsupported, "gateway"),
        ({"host:a.example": True, "host:A.example.": False}, InvalidRequest, "same permission"),
        ({"host:pypi.dsec": True}, InvalidRequest, "platform's"),
        ({f"host:h{n}.example": True for n in range(5000)}, InvalidRequest, "at most"),
        ({"host:a.example:1": PermissionOptions(ports=[2])}, InvalidRequest, "port already"),
        ({"pypi": PermissionOptions(paths=["/x"])}, InvalidRequest, "paths"),
        ({"internet": PermissionOptions(private=True)}, InvalidRequest, "private"),
    ],
)
def test_policies_that_are_refused_say_why(network: Network, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        REGISTRY.check(network)


def test_the_most_specific_rule_decides() -> None:
    policy = compiled(
        {
            "internet": True,
            "host:*.example.com": False,
            "host:*.ok.example.com": True,
            "host:bad.ok.example.com": False,
            "host:api.example.com:8443": True,
        }
    )

    def reason(name: str, port: int = 443) -> Reason:
        return policy.decide(name, port).reason

    assert reason("example.com") is Reason.GRANTED  # a wildcard isn't the name itself
    assert reason("a.example.com") is Reason.FORBIDDEN
    assert reason("a.b.ok.example.com") is Reason.GRANTED
    assert reason("bad.ok.example.com") is Reason.FORBIDDEN
    assert reason("api.example.com", 8443) is Reason.GRANTED
    assert reason("api.example.com", 443) is Reason.FORBIDDEN
    assert reason("anything.example", 12345) is Reason.GRANTED
    assert reason("localhost") is Reason.NOT_GRANTED  # a public name has a dot
    assert not policy.resolves("bad.ok.example.com")


def test_ports() -> None:
    policy = compiled({"host:a.example": True, "host:b.example": PermissionOptions(ports=[22]), "db": True})
    assert [policy.decide("a.example", port).allowed for port in (80, 443, 22)] == [True, True, False]
    assert policy.decide("a.example", 22).reason is Reason.PORT_NOT_GRANTED
    assert [policy.decide("b.example", port).allowed for port in (80, 22)] == [False, True]
    assert policy.decide("x.shard.internal", 5432).rule == policy.decide("db.internal", 5432).rule


def test_an_empty_policy_grants_nothing() -> None:
    for policy in (EMPTY, compiled({}), compiled({"internet": False, "host:a.example": False, "ip:1.1.1.1": False})):
        assert policy.empty
        assert not policy.resolves("a.example")
        assert policy.decide("a.example", 443).reason in (Reason.NOT_GRANTED, Reason.FORBIDDEN)
        assert not policy.decide_address(ipaddress.ip_address("1.1.1.1"), 443).allowed


NOT_PUBLIC = ["127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200"]
NOT_PUBLIC += [
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "198.18.0.1",
    "192.0.2.1",
    "240.0.0.1",
    "::1",
    "::",
    "fe80::1",
]
NOT_PUBLIC += ["fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe"]
NOT_PUBLIC += ["2002:7f00:1::", "2002:a9fe:a9fe::", "2001:0:1::1", "fec0::1"]


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_names_lead_to_public_addresses_only(text: str) -> None:
    address = ipaddress.ip_address(text)
    for network in ({"host:a.example": True}, {"internet": True}):
        policy = compiled(network)
        rule = policy.decide("a.example", 443).rule
        assert rule is not None
        assert policy.check_address(rule, address, 443) is Reason.PRIVATE_ADDRESS
        assert not policy.decide_address(address, 443).allowed


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses(text: str) -> None:
    assert public(plain(ipaddress.ip_address(text)))


def test_private_addresses_take_a_grant_and_metadata_a_named_one() -> None:
    policy = compiled({"host:a.example": PermissionOptions(private=True), "ip:169.254.169.254:80": True})
    rule = policy.decide("a.example", 443).rule
    assert rule is not None
    check = {text: policy.check_address(rule, ipaddress.ip_address(text), 443) for text in NOT_PUBLIC}
    assert check["127.0.0.1"] is check["10.0.0.1"] is check["100.64.0.1"] is Reason.GRANTED
    assert check["169.254.169.254"] is check["fd00:ec2::254"] is check["198.18.0.1"] is Reason.PRIVATE_ADDRESS
    assert policy.decide_address(ipaddress.ip_address("169.254.169.254"), 80).allowed
    assert not policy.decide_address(ipaddress.ip_address("169.254.169.254"), 81).allowed


@given(st.integers(0, 2**32 - 1), st.integers(0, 32))
def test_what_a_block_has_is_what_its_addresses_are(number: int, bits: int) -> None:
    block = ipaddress.ip_network((number >> (32 - bits) << (32 - bits), bits))
    has_public, has_private = covers(block)
    for address in (ipaddress.ip_address(number), block[0], block[-1]):
        assert has_public if public(address) else has_private


def test_no_block_grants_metadata_addresses() -> None:
    policy = compiled({"ip:0.0.0.0/0": True, "host:a.example": PermissionOptions(private=True)})
    for text in ("169.254.169.254", "100.100.100.200"):
        assert not policy.decide_address(ipaddress.ip_address(text), 80).allowed
    assert policy.decide_address(ipaddress.ip_address("169.254.169.253"), 80).allowed


def test_a_forbidden_block_is_forbidden_under_any_name() -> None:
    policy = compiled({"internet": True, "ip:1.1.1.0/24": False, "ip:1.1.1.1": True})
    rule = policy.decide("a.example", 443).rule
    assert rule is not None
    assert policy.check_address(rule, ipaddress.ip_address("1.1.1.2"), 443) is Reason.FORBIDDEN
    assert policy.check_address(rule, ipaddress.ip_address("1.1.1.1"), 443) is Reason.GRANTED


def test_the_lower_limit_holds() -> None:
    rule = compiled({"db": PermissionOptions(connections=9, bytes=7)}).decide("db.internal", 5432).rule
    assert rule is not None
    assert (rule.connections, rule.bytes, rule.private) == (4, 7, True)


def test_gateways_get_their_grants() -> None:
    policy = compiled({"git:x.example/a": True, "git:x.example/b": False, "pypi": True})
    assert [(each.permission, each.kind, each.argument) for each in policy.gateways] == [
        ("git:x.example/a", "git", "x.example/a"),
        ("pypi", "pypi", ""),
    ]
    rule = policy.decide("git.dsec", 80).rule
    assert rule is not None
    assert rule.gateway == "git"
    assert not policy.decide("git.dsec", 443).allowed
    assert not policy.resolves("npm.dsec")


def test_what_is_intercepted() -> None:
    grant = PermissionOptions(intercept=True)
    policy = compiled({"host:a.example": True, "http:a.example/v1/*": grant, "http:b.example": True})
    rule = policy.decide("a.example", 443).rule
    assert rule is not None
    assert (rule.intercept, rule.gateway) == (True, "http")
    plain_rule = policy.decide("a.example", 80).rule
    assert plain_rule is not None
    assert not plain_rule.intercept
    assert policy.decide("b.example", 443).reason is Reason.NOT_GRANTED
    assert policy.own_names() == ["a.example", "http.dsec"]
    assert policy.intercepts
    assert not compiled({"http:b.example": True}).intercepts
    denied = compiled({"http:a.example/*": grant, "host:a.example": False})
    assert denied.decide("a.example", 443).reason is Reason.FORBIDDEN
    for text in ("http:a.example:8443/*", "http:1.2.3.4/*"):
        with pytest.raises(InvalidRequest):
            compiled({text: grant})


@pytest.mark.parametrize(
    ("network", "policy", "allowed"),
    [
        ({"pypi": True, "host:a.example": True}, KeyPolicy(), True),
        ({"internet": True}, KeyPolicy(), False),
        ({"internet": True}, KeyPolicy(internet=True), True),
        ({"internet": True}, KeyPolicy(internet=True, allow=("pypi",)), False),
        ({"internet": False}, KeyPolicy(allow=()), True),
        ({"host:a.example": PermissionOptions(private=True)}, KeyPolicy(), False),
        ({"host:a.example": PermissionOptions(private=True)}, KeyPolicy(private=True), True),
        ({"ip:10.0.0.1": True}, KeyPolicy(internet=True), False),
        ({"ip:1.1.1.1": True}, KeyPolicy(private=True), False),
        ({"ip:0.0.0.0/0": True}, KeyPolicy(internet=True), False),
        ({"ip:0.0.0.0/0": True}, KeyPolicy(internet=True, private=True), True),
        ({"ip:2000::/3": True}, KeyPolicy(internet=True), False),
        ({"git:x.example/evil": True}, KeyPolicy(allow=("git:x.example/org/*",)), False),
        ({"git:x.example/org/a": True}, KeyPolicy(allow=("git:x.example/org/*",)), True),
    ],
)
def test_a_key_grants_no_more_than_its_policy(network: Network, policy: KeyPolicy, allowed: bool) -> None:
    REGISTRY.check(network)
    assert (REGISTRY.check_key(network, policy) is None) == allowed


def test_one_policy_within_another() -> None:
    assert within(KeyPolicy(), KeyPolicy())
    assert within(KeyPolicy(allow=("git:a/b", "git:a/*")), KeyPolicy(allow=("git:*",)))
    assert not within(KeyPolicy(), KeyPolicy(allow=("git:*",)))
    assert not within(KeyPolicy(internet=True), KeyPolicy())


@pytest.mark.parametrize(
    "definition",
    [
        {},
        {"hosts": ["1.2.3.4"]},
        {"hosts": ["x.dsec"]},
        {"addresses": ["x"]},
        {"hosts": ["a.b"], "accepts": ["nothing"]},
    ],
)
def test_definitions_with_mistakes(definition: dict[str, Any]) -> None:
    assert check_definition("mine", Definition(**definition))
    assert check_definition("internet", Definition(hosts=["a.example"]))


labels = st.from_regex(r"[a-z]([a-z0-9]{0,5})", fullmatch=True)
names = st.lists(labels, min_size=2, max_size=4).map(".".join)


@given(granted=st.sets(names, max_size=8), below=st.sets(names, max_size=4), asked=names)
def test_nothing_is_allowed_that_no_grant_names(granted: set[str], below: set[str], asked: str) -> None:
    policy = compiled({f"host:{name}": True for name in granted} | {f"host:*.{name}": True for name in below})
    named = asked in granted or any(asked.endswith(f".{name}") for name in below)
    assert policy.decide(asked, 443).allowed == policy.resolves(asked) == named


@given(st.text(max_size=40))
def test_any_text_is_a_permission_or_a_value_error(text: str) -> None:
    for kind in ("", "host:", "ip:", "sandbox:"):
        try:
            canonical = permission(kind + text).text
        except ValueError:
            continue
        assert permission(canonical).text == canonical


def test_two_thousand_names_cost_what_one_does() -> None:
    small = compiled({"host:h1.example.com": True})
    large = compiled({f"host:h{n}.example.com": True for n in range(2000)})

    def looked_up(policy: Policy) -> float:
        began = time.perf_counter()
        for _ in range(2000):
            policy.decide("h1.example.com", 443)
        return time.perf_counter() - began

    ratio = min(looked_up(large) for _ in range(5)) / min(looked_up(small) for _ in range(5))
    assert ratio < 10, "a list would cost a thousand times as much"


@pytest.mark.parametrize(
    ("own", "given", "both"),
    [
        ({"before": "2022-01-01"}, {"before": "2023-01-01"}, {"before": "2022-01-01"}),
        ({"before": datetime.date(2022, 1, 1)}, {"before": "2021-01-01T10:00:00"}, {"before": "2021-01-01T10:00:00"}),
        ({"deny": ["a"]}, {"deny": ["b"]}, {"deny": ["a", "b"]}),
        ({"allow": ["a"]}, {"allow": ["b"]}, {"allow": ["b"], "within": ["a"]}),
        ({"suites": ["a", "b"]}, {"suites": ["b", "c"]}, {"suites": ["b"]}),
        ({"tokens": 5, "requests": 9}, {"tokens": 9}, {"tokens": 5, "requests": 9}),
        ({"headers": {"A": "b"}}, {"write": True}, {"headers": {"A": "b"}, "write": True}),
        ({"pins": {"r": "1"}}, {"refs": ["*"]}, {"pins": {"r": "1"}, "refs": ["*"], "within": ["r"]}),
        ({"refs": ["a"]}, {"pins": {"b": "2"}}, {"refs": ["a"], "pins": {"b": "2"}, "within": ["a"]}),
    ],
)
def test_a_policys_options_only_narrow_the_definitions(
    own: dict[str, Any], given: dict[str, Any], both: dict[str, Any]
) -> None:
    accepts = list(PermissionOptions.__struct_fields__)
    registry = Registry({"mine": Definition(gateway="pypi", options=own, accepts=accepts)}, {"pypi": ("pypi.dsec",)})
    policy = compile_policy({"mine": PermissionOptions(**given)}, registry)
    assert [dict(each.options) for each in policy.gateways] == [both]
