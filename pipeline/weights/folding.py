"""Patches over several versions, made in small steps by the thread that serves.

In: requests for the way from an older version to the newest. Out: the same requests, once what they ask for is
there, or will never be. Of a large model it takes seconds: after each tile all others are served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.weights.patches import Fold
from pipeline.weights.protocol import Header
from pipeline.weights.shelf import Shelf, Way

_MAX_ASKING = 4096  # receivers that wait for one set; the first of more has gone without a word


@dataclass(slots=True, kw_only=True)
class _Asked:
    """What is being made, and for whom: who asks again has given the earlier request up."""

    way: Way
    work: Fold
    asking: dict[bytes, Header] = field(default_factory=dict)


class Folding:
    """What is asked of `shelf` and has to be made first."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._folds: dict[tuple[bytes, bytes], _Asked] = {}  # by roots of the base and of the newest

    @property
    def is_under_way(self) -> bool:
        """Whether there is something to go on with."""
        return bool(self._folds)

    def ask(self, way: Way, peer: bytes, request: Header) -> None:
        """`go_on` gives this request back when the steps of `way` are one."""
        ends = way.steps[0].table.base_root, way.newest.manifest.root
        if ends not in self._folds:
            self._folds[ends] = _Asked(way=way, work=Fold(way.steps, way.newest.manifest))
        asking = self._folds[ends].asking
        asking[peer] = request
        if len(asking) > _MAX_ASKING:
            del asking[next(iter(asking))]

    def go_on(self) -> Iterator[tuple[bytes, Header, bool]]:
        """One tile more. Yields requests that need wait no longer, and whether the shelf has what they ask for.

        It has not where a newer version has come meanwhile. What is folded next might be overtaken as well:
        a snapshot ends that.
        """
        newest = self._shelf.newest()
        ended = [ends for ends, asked in self._folds.items() if asked.way.newest is not newest]
        is_there = False
        if not ended and self._folds:
            ends, first = next(iter(self._folds.items()))
            folded = first.work.go_on()
            if folded is not None:
                ended, is_there = [ends], self._shelf.keep_folded(first.way.newest, folded)
        for ends in ended:
            for peer, request in self._folds.pop(ends).asking.items():
                yield peer, request, is_there
