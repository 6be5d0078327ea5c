"""Which addresses are anybody's on the internet, and which are somebody's own.

Owns the classes. Invariant: an address that means another one (IPv4 within IPv6) is of that one's class.
"""

from __future__ import annotations

import functools
import ipaddress

from dsec.spec.network import Address, Block

METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "fd00:ec2::254")
)
"""Where clouds keep their machines' credentials."""
_STAND_INS = ipaddress.ip_network("198.18.0.0/15")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.ip_network("2002::/16")
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL: tuple[Block, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
        *("224.0.0.0/3", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
)


def plain(address: Address) -> Address:
    """IPv4 within IPv6 (mapped, NAT64, 6to4) as the IPv4 address that it means."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address in _SIX_TO_FOUR:
            return ipaddress.IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
    return address


@functools.lru_cache(4096)
def public(address: Address) -> bool:
    """Whether an address (made `plain`) is anybody's on the internet: not private, shared (carriers'), loopback,
    link-local, multicast, reserved, a metadata service's or a stand-in."""
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not (isinstance(address, ipaddress.IPv6Address) and (address.is_site_local or address.teredo is not None))
        and address not in METADATA
    )


def reachable(address: Address) -> bool:
    """Whether a grant of private addresses includes this one (made `plain`)."""
    return not (
        address in METADATA
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
        or address in _STAND_INS
    )


def covers(block: Block) -> tuple[bool, bool]:
    """Whether a block has public addresses, and whether it has others."""
    if isinstance(block, ipaddress.IPv6Network):
        if not block.subnet_of(_GLOBAL_V6):
            return block.overlaps(_GLOBAL_V6), True
        special = [each for each in _SPECIAL if isinstance(each, ipaddress.IPv6Network)]
        return not any(block.subnet_of(each) for each in special), any(block.overlaps(each) for each in special)
    ranges = [each for each in _SPECIAL if isinstance(each, ipaddress.IPv4Network)]
    return not any(block.subnet_of(each) for each in ranges), any(block.overlaps(each) for each in ranges)
