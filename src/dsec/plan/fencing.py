"""Who speaks for a node: claims, and the end of those that are lost.

Pure; the record is kept where a compare-and-set can be had (one key a node). Invariants: at most one incarnation of a
node is valid at any time; incarnations only grow; sandboxes of a fenced incarnation are never served again by anybody:
the edge that comes back ends them, because the cluster has said that they are lost and may have made them anew.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from dsec.errors import Conflict
from dsec.spec.cluster import EdgeNumber, Natural


class Claim(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a node."""

    edge: EdgeNumber
    incarnation: Natural
    instance: str
    """The process."""
    host: str = ""
    """The machine and its boot: on the same one a lock says that the process before is dead."""
    kept_from: Natural = 1
    """Sandboxes of this incarnation and the later ones go on; those of earlier ones were declared lost."""
    lost: bool = False
    """This incarnation is fenced."""
    lost_at: float = 0.0
    """Wall clock of who fenced it; to be read by people."""


Free = Literal["", "new", "lost"]
"""Which numbers are free for a node that has none: those that nobody ever had, or those of lost nodes. Empty: it has
this one."""


class Return(Enum):
    """What an edge does with what it finds on its disk."""

    READOPT = "its sandboxes go on"
    END_ALL = "its sandboxes were declared lost: it ends them before it serves"


def claim(
    record: Claim | None,
    *,
    edge: int,
    instance: str,
    host: str,
    had: int | None,
    alive: bool,
    free: Free = "",
) -> tuple[Claim, Return]:
    """An edge joins. `had`: the incarnation under which it served before, from its own disk (None: it never did);
    `alive`: whether another process answers as this node right now. The claim must be put by compare-and-set against
    `record`.

    Raises `Conflict` where the node's number is another's."""
    if record is None:
        return Claim(edge=edge, incarnation=1, instance=instance, host=host), Return.READOPT
    if free and (free == "new" or not record.lost):
        raise Conflict(f"the number {edge} isn't free", remedy="Ask for another.", edge=edge)
    if alive and record.host != host:
        raise Conflict(
            f"edge {edge} is served by another machine",
            remedy="Give this node a number and credentials of its own; a copied state directory can't join.",
            edge=edge,
        )
    number = record.incarnation + 1
    if record.lost or had is None or not record.kept_from <= had <= record.incarnation:
        new = Claim(edge=edge, incarnation=number, instance=instance, host=host, kept_from=number)
        return new, Return.END_ALL
    new = Claim(edge=edge, incarnation=number, instance=instance, host=host, kept_from=record.kept_from)
    return new, Return.READOPT


def fence(record: Claim, incarnation: int, now: float) -> Claim | None:
    """Declare an incarnation lost; None where it is so already, or is over."""
    if record.lost or record.incarnation != incarnation:
        return None
    return replace(record, lost=True, lost_at=now)


def serves(record: Claim | None, incarnation: int) -> bool:
    """Whether this incarnation may speak for its node: the edge asks before it goes on, the apiserver before it
    routes."""
    return record is not None and record.incarnation == incarnation and not record.lost


def over(record: Claim, incarnation: int) -> bool:
    """Whether what was made under this incarnation is gone for certain."""
    return incarnation < record.kept_from or (record.lost and incarnation <= record.incarnation)
