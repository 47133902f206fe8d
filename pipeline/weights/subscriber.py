"""Receiving weights: the newest verified version, however long that takes.

In: an address that may change, a network that may lose, cut and corrupt. Out: weight states of
ever higher versions. It never returns a state of which one byte is unproved, and never gives up.

    resolve --> connect --> ask for a newer manifest --> order its pieces, `credits` at a time --> state
       ^                      |  none: wait for an announcement or `poll_s`, ask again
       +-- silence, or moved -+------------------------------+   (what has come is kept)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import zmq
import zmq.asyncio

from pipeline.config import WeightSettings
from pipeline.errors import ConfigError, WeightError
from pipeline.logs import get_logger
from pipeline.weights.address_watch import LOOK_EVERY_S, MovedError, Resolve, unless_moved
from pipeline.weights.link import Answer, Link
from pipeline.weights.manifest import decode_manifest
from pipeline.weights.memory import BufferPool, Pool
from pipeline.weights.orders import Orders
from pipeline.weights.patches import decode_table
from pipeline.weights.protocol import NO_ROOT, NOTHING, WANTS_PATCHES, Kind
from pipeline.weights.reception import Reception, floor_of
from pipeline.weights.relay import Relay
from pipeline.weights.security import Signer, doubt, receiver_keys
from pipeline.weights.subscriber_stats import Phase, SubscriberStats
from pipeline.weights.transfer import Content, PatchTransfer, SnapshotTransfer, Transfer

_SILENT_POLLS = 3  # intervals without an answer after which the publisher may have moved
_BEHIND_POLLS = 3  # answers in a row that name an older version than the one that is here; a relay may lag for one
_MAX_PATIENCE = 8  # so many times longer a slow line is waited for, if it has not moved

log = get_logger()


class _SilenceError(Exception):
    """The publisher does not answer."""


class WeightSubscriber(Reception):
    """One reader of weights, in one event loop. `next` is not to be called twice at a time.

    resolve: where the publisher is now; None while there is none. Asked all the time, so that a new
    publisher is found at once. What it raises passes through `next` where nothing goes on without it:
    at the start, and when the publisher is silent. relay: passes on what comes in, and is closed with
    the subscriber.
    """

    def __init__(
        self,
        settings: WeightSettings,
        *,
        resolve: Resolve,
        make_pool: Callable[[int], Pool] = BufferPool,
        relay: Relay | None = None,
    ) -> None:
        if settings.store:
            raise ConfigError(
                f"weights.store = {settings.store!r}, and WeightSubscriber receives over ZeroMQ: "
                "pipeline.weights.create_subscriber makes the subscriber of either channel"
            )
        super().__init__(settings, make_pool)
        self._keys = receiver_keys(settings)
        self._signer = Signer.load(settings.shared_key_file)
        self._resolve = resolve
        self._context = zmq.asyncio.Context()
        self._receiver = b"r" + uuid.uuid4().bytes  # ZeroMQ keeps names that begin with a zero byte for itself
        self._numbers = itertools.count(1)
        self._link: Link | None = None
        self._transfer: Transfer | None = None
        self._relay = relay
        self._patience = 1

    async def next_content(self, newer_than: int | None) -> Content:
        """The same as it lies in memory."""
        floor = floor_of(newer_than)
        while True:
            try:
                link = await self._connected()
                transfer = await unless_moved(self._received(link, floor), link.endpoints, self._resolve)
            except _SilenceError:
                await self._give_up(link)
            except MovedError:
                log.debug("weight_publisher_moved", waiting_for=str(self._stats.phase))
                self._stats.num_moves += 1
                self._leave()
            except WeightError as error:
                if isinstance(self._transfer, PatchTransfer):
                    self._held = None  # whatever is wrong, it is not wrong in a snapshot
                self._drop()
                self._stats.num_refused += 1
                log.warning("weights_refused", reason=str(error))
                await asyncio.sleep(self._settings.poll_s)
            else:
                return self._finished(transfer)

    @property
    def stats(self) -> SubscriberStats:
        """A copy of the figures."""
        ignored = self._stats.num_ignored + (self._link.num_ignored if self._link else 0)
        return replace(self._stats, num_ignored=ignored)

    def close(self) -> None:
        """Disconnect and free everything, after `next` has returned or was cancelled. Safe to call twice."""
        self._disconnect()
        self._end_warming()
        self._transfer = self._held = None
        if self._relay is not None:
            self._relay.close()
        if not self._context.closed:
            self._context.term()

    # Connection

    async def _connected(self) -> Link:
        while self._link is None:
            self._stats.phase = Phase.ADDRESS
            endpoints = await self._resolve()
            if endpoints is None:
                await asyncio.sleep(min(self._settings.poll_s, LOOK_EVERY_S))
                continue
            self._link = Link(
                self._context,
                endpoints,
                self._settings,
                receiver=self._receiver,
                numbers=self._numbers,
                signer=self._signer,
                keys=self._keys,
            )
            if self._relay is not None:
                self._relay.speak_for(self._link.session)
        return self._link

    async def _answer(self, link: Link) -> Answer:
        """The next answer. Raises _SilenceError when it is time to connect anew."""
        for _ in range(self._patience):
            answer = await link.answer(self._settings.poll_s * _SILENT_POLLS)
            if answer is not None:
                return answer
            if await self._resolve() != link.endpoints:
                break
        raise _SilenceError

    async def _give_up(self, link: Link) -> None:
        """Connect anew, perhaps elsewhere; wait longer then, since the line may just be slow."""
        await link.note_announcements()
        may_be = doubt(self._settings, link.endpoints, is_foreign=link.is_foreign, is_other=link.is_other)
        log.warning(
            "weight_publisher_silent",
            waiting_for=str(self._stats.phase),
            address=link.endpoints.tiles,
            num_unsigned=self._signer.num_unsigned,
            **({"may_be": may_be} if may_be else {}),
        )
        self._stats.num_silences += 1
        self._patience = min(2 * self._patience, _MAX_PATIENCE)
        self._leave()

    def _leave(self) -> None:
        """End the connection and keep what has come over it."""
        self._stats.num_resumed_tiles += self._transfer.num_verified if self._transfer else 0
        self._disconnect()

    def _disconnect(self) -> None:
        if self._link is not None:
            self._stats.num_ignored += self._link.num_ignored
            self._link.close()
        self._link = None

    # Transfer

    async def _received(self, link: Link, floor: int) -> Transfer:
        """A complete transfer of a version above `floor`."""
        while True:
            if self._transfer is None or self._transfer.manifest.weight_version <= floor:
                self._drop()  # frees its buffer before the next is made
                self._transfer = await self._started(link, floor)
            self._stats.phase = Phase.TILES
            started = time.perf_counter()
            try:
                if await self._fetched(link, self._transfer):
                    return self._transfer
            finally:
                self._receive_s += time.perf_counter() - started
            self._drop()

    def _drop(self) -> None:
        """The rest of what is coming in will not come."""
        if self._relay is not None and self._transfer is not None:
            self._relay.withdraw(self._transfer)
        self._transfer = None

    async def _started(self, link: Link, floor: int) -> Transfer:
        """Ask until there is a version above `floor`."""
        has_waited = False
        held = self._held.manifest if self._held and self._held.manifest.weight_version == floor else None
        self._receive_s = 0.0
        while True:
            self._stats.phase = Phase.PUBLISHER
            number = await link.request(
                Kind.GET_MANIFEST,
                version=floor,
                root=held.root if held else NO_ROOT,
                index=WANTS_PATCHES if self._choice.wants_patches else 0,
            )
            answer = await self._answer_to(link, number)
            if answer.header.kind in {Kind.MANIFEST, Kind.PATCHES}:
                await link.note_announcements()
                self._stats.num_missed_announcements += has_waited and link.announced <= floor
                transfer = self._prepared(answer, floor)
                if self._relay is not None:
                    self._relay.begin(transfer, [bytes(payload) for payload in answer.payloads])
                return transfer
            self._doubt_history(link, answer.header.version, floor)
            self._stats.phase = Phase.VERSION
            await link.wait_for_announcement(floor, self._settings.poll_s)
            has_waited = True

    def _doubt_history(self, link: Link, newest: int, floor: int) -> None:
        """Say so once where a publisher stays behind what it is asked for: it may have begun again from below."""
        link.num_behind = link.num_behind + 1 if NOTHING < newest < floor else 0
        if link.num_behind == _BEHIND_POLLS:
            log.warning(
                "weights_behind",
                address=link.endpoints.tiles,
                newest_there=newest,
                newer_than=floor,
                may_be="the publisher began anew: a version is taken once it is above the one that is here",
            )

    async def _answer_to(self, link: Link, number: int) -> Answer:
        """Answers to earlier requests may still be under way and are of no use now."""
        while True:
            answer = await self._answer(link)
            if answer.header.request == number:
                return answer

    def _prepared(self, answer: Answer, floor: int) -> Transfer:
        manifest = decode_manifest(answer.payloads[0], max_model_bytes=self._settings.max_model_bytes)
        version = manifest.weight_version
        if version <= floor or (version, manifest.root) != (answer.header.version, answer.header.root):
            raise WeightError(f"the manifest is of version {version}, not of the one that was asked for")
        table = decode_table(answer.payloads[1], manifest) if answer.header.kind is Kind.PATCHES else None
        buffer = self._borrow(manifest)
        if table is None:
            return SnapshotTransfer(manifest, buffer)
        base = self._held
        if base is None or not base.manifest.is_laid_out_like(manifest) or table.base_root != base.manifest.root:
            raise WeightError(f"patches for a version {table.base_version} that was never here")
        return PatchTransfer(manifest, buffer, table, base, keeps_parcels=self._relay is not None)

    async def _fetched(self, link: Link, transfer: Transfer) -> bool:
        """Order pieces until all are there. False: the publisher no longer has them."""
        if isinstance(transfer, PatchTransfer):
            await transfer.place_unchanged()
            self._pass_on()
        credits, throttle = self._settings.credits, self._throttle
        with contextlib.closing(
            Orders(link, transfer, credits=credits, throttle=throttle, stats=self._stats)
        ) as orders:
            while not transfer.is_complete:
                await orders.top_up()
                answer = await self._answer(link)
                if orders.are_refused_by(answer):
                    return False
                if orders.are_met_by(answer):
                    await orders.take(answer)
                    self._pass_on()
        await link.request(Kind.DONE, version=transfer.manifest.weight_version, root=transfer.manifest.root)
        return True

    def _pass_on(self) -> None:
        if self._relay is not None:
            self._relay.note_pieces()

    def _finished(self, transfer: Transfer) -> Content:
        self._transfer = None
        self._patience = 1
        return self._complete(
            transfer.content(),
            is_patched=isinstance(transfer, PatchTransfer),
            made_s=transfer.table.encode_s if isinstance(transfer, PatchTransfer) else 0.0,
            num_received_bytes=transfer.num_bytes,
            verify_s=transfer.verify_s,
        )
