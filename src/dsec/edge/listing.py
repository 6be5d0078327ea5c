"""Pages of sandboxes: live ones from memory, ended ones from disk, merged in the order of their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsec.edge.client import Page
from dsec.edge.lives import Lives
from dsec.edge.sandbox import info_of
from dsec.errors import InvalidRequest
from dsec.journal.records import Journal, Record
from dsec.spec.sandbox import State

MAX_LIMIT = 1000
_READ = 1000


async def list_page(
    lives: Lives,
    journal: Journal,
    project: str,
    *,
    states: Sequence[State],
    run: str | None,
    labels: Mapping[str, str],
    limit: int,
    after: str | None,
) -> Page:
    """See `EdgeClient.list_sandboxes`."""
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"limit is 1 to {MAX_LIMIT}", field="limit")
    start = after or ""
    wanted = frozenset(states)

    def matches(record: Record) -> bool:
        return all(record.spec.labels.get(name) == value for name, value in labels.items())

    found: dict[str, Record] = {}
    for sandbox in lives.sandboxes.values():
        record = sandbox.record
        if (
            record.project == project
            and record.id > start
            and (run is None or record.run == run)
            and (record.state in wanted if wanted else record.state is not State.ENDED)
            and (not labels or matches(record))
        ):
            found[record.id] = record
    if State.ENDED in wanted:
        for record in await _ended(journal, project, run=run, labels=labels, after=start, count=limit + 1):
            found.setdefault(record.id, record)
    ids = sorted(found)
    page = ids[:limit]
    return Page(
        sandboxes=[info_of(found[sandbox_id]) for sandbox_id in page], next=page[-1] if len(ids) > limit else None
    )


async def _ended(
    journal: Journal, project: str, *, run: str | None, labels: Mapping[str, str], after: str, count: int
) -> list[Record]:
    """The first `count` ended records that match."""
    found: list[Record] = []
    while len(found) < count:
        records = await journal.ended(project, run=run, after=after, limit=_READ if labels else count)
        found += [
            record for record in records if all(record.spec.labels.get(name) == value for name, value in labels.items())
        ]
        if not records or len(records) < (_READ if labels else count):
            break
        after = records[-1].id
    return found[:count]
