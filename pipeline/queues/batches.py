"""Many groups in few calls, none of which holds up the server for long.

In: entries and leases. Out: the same in batches, and the columns of a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pipeline.keys import Stream
from pipeline.queues.leases import Entry, Lease

_Item = TypeVar("_Item")

# One call holds up everyone's: these bound for how long.
BATCH_GROUPS, BATCH_BYTES = 256, 64 * 1024 * 1024


def num_bytes(entry: Entry) -> int:
    """Of its payload."""
    return len(entry.payload)


def _nothing(_: object) -> int:
    return 0


def batches(items: Sequence[_Item], size_of: Callable[[_Item], int] = _nothing) -> Iterator[Sequence[_Item]]:
    """The items in calls that are short enough. size_of: bytes that an item adds to one."""
    if len(items) <= BATCH_GROUPS and sum(map(size_of, items)) <= BATCH_BYTES:
        if items:
            yield items
        return
    start, size = 0, 0
    for position, item in enumerate(items):
        size += size_of(item)
        is_full = position - start == BATCH_GROUPS or size > BATCH_BYTES
        if is_full and position > start:
            yield items[start:position]
            start, size = position, size_of(item)
    if start < len(items):
        yield items[start:]


def by_stream(leases: Sequence[Lease]) -> Iterator[tuple[Stream, Sequence[Lease]]]:
    """The leases in calls, each of one stream."""
    for stream, group in itertools.groupby(leases, lambda lease: lease.stream):
        for batch in batches(list(group)):
            yield stream, batch


def entry_ids(leases: Sequence[Lease]) -> list[bytes]:
    """What the server calls them."""
    return [lease.entry_id for lease in leases]


def ids_and_versions(entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """Two columns of a call."""
    return [entry.group_id for entry in entries], [str(entry.weight_version) for entry in entries]


def unheld(leases: Sequence[Lease], held: Sequence[bool]) -> list[Lease]:
    """Those that the server said were lost."""
    return [lease for lease, is_held in zip(leases, held, strict=True) if not is_held]
