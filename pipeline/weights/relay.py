"""Passing weights on while they come in, so that the trainer sends them once and not to every machine.

In: transfers of a subscriber. Out: the same objects for others, every piece as soon as it is proved.
Who fetches from whom is a tree over the relays in the order in which they have come; whoever is
gone is left out, and its children find another parent and go on with the tiles that they have.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import overload

from pipeline.config import WeightSettings
from pipeline.errors import ConfigError
from pipeline.weights.address_watch import Resolve
from pipeline.weights.codec import WeightObject
from pipeline.weights.patches import PatchSet
from pipeline.weights.protocol import NO_SESSION
from pipeline.weights.publisher import PublisherStats, WeightPublisher
from pipeline.weights.state import Endpoints
from pipeline.weights.transfer import PatchTransfer, Transfer


class Relay:
    """Serves what one subscriber receives."""

    def __init__(self, settings: WeightSettings) -> None:
        own = {"host": settings.relay_host, "advertise": settings.relay_advertise, "port": 0, "announce_port": 0}
        self._publisher = WeightPublisher(settings.model_copy(update=own))

    def start(self) -> Endpoints:
        """Bind and serve. Raises ConfigError."""
        try:
            endpoints = self._publisher.start()
        except ConfigError as error:
            names = str(error).replace("weights.host", "weights.relay_host")
            raise ConfigError(names.replace("weights.advertise", "weights.relay_advertise")) from error
        self._publisher.speak_for(NO_SESSION)
        return endpoints

    def speak_for(self, session: bytes) -> None:
        """Whose weights are to come: until there are some, children are told so in its name. NO_SESSION: not known."""
        if session != NO_SESSION:
            self._publisher.speak_for(session)

    def begin(self, transfer: Transfer, payloads: Sequence[bytes]) -> None:
        """A version is coming in. payloads: its manifest and, if it comes as patches, their table."""
        item = WeightObject(manifest=transfer.manifest, payload=payloads[0], tiles=_Tiles(transfer))
        patches = None
        if isinstance(transfer, PatchTransfer):
            patches = PatchSet(table=transfer.table, payload=payloads[1], parcels=_Parcels(transfer))
        self.withdraw(transfer)  # it may be the same version again, after what came of it was lost
        self._publisher.pass_on(transfer.manifest.session, item, patches)

    def note_pieces(self) -> None:
        """More of it has come."""
        self._publisher.note_pieces()

    def withdraw(self, transfer: Transfer) -> None:
        """The rest of it will not come."""
        self._publisher.withdraw(transfer.manifest.weight_version)

    @property
    def stats(self) -> PublisherStats:
        """Figures since the start."""
        return self._publisher.stats

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        self._publisher.close()


class _Tiles(Sequence[memoryview | None]):
    """The tiles of a transfer, None for those that have not come."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def __len__(self) -> int:
        return self._transfer.manifest.num_tiles

    @overload
    def __getitem__(self, index: int) -> memoryview | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview | None]: ...
    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview | None] | None:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        has = self._transfer.has_tile(index)
        return self._transfer.buffer[self._transfer.manifest.tile_slice(index)] if has else None


class _Parcels(Sequence[bytes | None]):
    """The parcels of a transfer, None for those that have not come."""

    def __init__(self, transfer: PatchTransfer) -> None:
        self._transfer = transfer

    def __len__(self) -> int:
        return self._transfer.table.num_parcels

    @overload
    def __getitem__(self, index: int) -> bytes | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes | None]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes | None] | None:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        return self._transfer.parcel(index)


def resolve_in_tree(
    root: Resolve, relays: Callable[[], Awaitable[Sequence[tuple[str, Endpoints]]]], *, own_id: str, fanout: int
) -> Resolve:
    """Where `own_id` is to fetch from: the trainer, or a relay that has come before it.

    relays: those that are alive, with their ids, the oldest first. The first fetches from the trainer,
    each of the others from one that has at most `fanout` children; who is none is spread over them.
    """

    async def resolve() -> Endpoints | None:
        trainer = await root()
        if trainer is None:
            return None
        there = await relays()
        ids = [worker_id for worker_id, _ in there]
        if own_id in ids:
            position = ids.index(own_id)
            if position == 0:
                return trainer
            parent = there[(position - 1) // fanout][1]
        elif there:
            parent = there[sum(own_id.encode()) % len(there)][1]
        else:
            return trainer
        # A relay speaks in the name of the trainer whose weights it passes on.
        return replace(parent, session=trainer.session)

    return resolve
