"""Versions of which only what changed is sent: exact, whatever happens on the way."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import zmq.asyncio

from pipeline.errors import WeightError
from pipeline.weights import Endpoints, WeightPublisher, WeightState, WeightSubscriber
from pipeline.weights.choice import Choice
from pipeline.weights.codec import Encoder
from pipeline.weights.delta import Method
from pipeline.weights.manifest import tile_widths
from pipeline.weights.patches import PatchSet, decode_table, fold
from pipeline.weights.protocol import Header, Kind
from pipeline.weights.sealed import seal
from tests.weights.drift import drifted
from tests.weights.proxy import proxied
from tests.weights.states import FAST, at, channel, make_state, next_within, same, tensor, until
from tests.weights.test_faults import Liar

DELTA = FAST.model_copy(update={"encoding": "delta", "tile_bytes": 16_384})
# Takes nobody for silent whom a busy machine keeps standing for a moment: what is asked for once is counted once.
PATIENT = DELTA.model_copy(update={"poll_s": 2.0})


async def followed(publisher: WeightPublisher, subscriber: WeightSubscriber, *versions: int) -> list[WeightState]:
    """Each version, published once the one before is there."""
    received: list[WeightState] = []
    for version in versions:
        publisher.publish(drifted(version))
        received.append(await next_within(subscriber, received[-1].weight_version if received else None))
    return received


async def test_only_what_changed_is_sent_and_arrives_bit_for_bit() -> None:
    async with channel(DELTA) as (publisher, subscriber):
        received = await followed(publisher, subscriber, *range(5))
        stats = subscriber.stats
    assert all(same(state, drifted(version)) for version, state in enumerate(received)), "old ones stay as they are"
    assert (stats.num_versions, stats.num_patched) == (5, 4)
    size = received[0].num_bytes
    assert stats.num_bytes >= 5 * size
    assert stats.num_received_bytes < 1.2 * size


async def test_the_publisher_counts_how_long_each_version_took_to_encode_and_to_send() -> None:
    async with channel(PATIENT) as (publisher, subscriber):
        await followed(publisher, subscriber, *range(3))
        await until(lambda: publisher.stats.server.num_transfers == 3)  # the last word comes after the version
        stats = publisher.stats
    assert stats.num_versions == 3
    assert stats.encode_s > 0
    assert stats.server.transfer_s > 0


async def test_a_receiver_that_is_behind_gets_one_set_for_all_that_it_missed() -> None:
    async with channel(PATIENT) as (publisher, subscriber):
        await followed(publisher, subscriber, 0, 1)
        before = subscriber.stats.num_received_bytes
        for version in range(2, 6):
            publisher.publish(drifted(version))
        state = await next_within(subscriber, 1)
        stats = subscriber.stats
        assert same(state, drifted(5))
        assert (stats.num_patched, stats.num_skipped) == (2, 3)
        assert publisher.stats.server.num_patch_tables == 2
        assert 0 < stats.num_received_bytes - before < 0.3 * state.num_bytes


async def test_a_version_without_a_change_needs_no_parcel() -> None:
    async with channel(PATIENT) as (publisher, subscriber):
        await followed(publisher, subscriber, 0, 1)
        publisher.publish(replace(drifted(1), weight_version=2))
        state = await next_within(subscriber, 1)
        assert same(state, replace(drifted(1), weight_version=2))
        assert subscriber.stats.num_patched == 2
        assert publisher.stats.server.num_parcels == 1


def scrambled(state: WeightState) -> WeightState:
    """The same layout with nothing in common."""
    generator = np.random.default_rng(0)
    tensors = {
        name: replace(item, data=memoryview(generator.bytes(item.data.nbytes))) for name, item in state.tensors.items()
    }
    return replace(state, tensors=tensors)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(drifted(2, name="renamed"), id="other tensors"),
        pytest.param(make_state(2), id="another layout"),
        pytest.param(scrambled(drifted(2)), id="everything changed"),
    ],
)
async def test_what_cannot_be_patched_or_not_with_profit_comes_whole(other: WeightState) -> None:
    async with channel(DELTA) as (publisher, subscriber):
        await followed(publisher, subscriber, 0, 1)
        publisher.publish(other)
        assert same(await next_within(subscriber, 1), other)
        assert subscriber.stats.num_patched == 1


async def test_a_restarted_publisher_knows_no_base_and_sends_everything() -> None:
    current: list[Endpoints] = []

    async def resolve() -> Endpoints:
        return current[-1]

    async with WeightSubscriber(DELTA, resolve=resolve) as subscriber:
        with WeightPublisher(DELTA) as first:
            current.append(first.start())
            await followed(first, subscriber, 0, 1)
        with WeightPublisher(DELTA) as second:
            current.append(second.start())
            second.publish(drifted(2))
            assert same(await next_within(subscriber, 1), drifted(2))
            assert subscriber.stats.num_patched == 1
            second.publish(drifted(3))
            assert same(await next_within(subscriber, 2), drifted(3))
            assert subscriber.stats.num_patched == 2


async def test_an_engine_that_asks_for_what_it_had_gets_everything_anew() -> None:
    async with channel(DELTA) as (publisher, subscriber):
        await followed(publisher, subscriber, 0, 1)
        assert same(await next_within(subscriber, 0), drifted(1))
        assert subscriber.stats.num_patched == 1


async def test_a_base_that_was_changed_in_memory_is_found_out_and_replaced() -> None:
    async with channel(DELTA) as (publisher, subscriber):
        received = await followed(publisher, subscriber, 0, 1)
        np.frombuffer(received[1].tensors["embed"].data, dtype=np.uint8)[5] ^= 1
        publisher.publish(drifted(2))
        assert same(await next_within(subscriber, 1), drifted(2))
        assert (subscriber.stats.num_refused, subscriber.stats.num_patched) == (1, 1)


@pytest.mark.parametrize("sends", ["snapshot", "delta"])
async def test_either_end_alone_can_do_without_deltas(sends: str) -> None:
    publishing = DELTA.model_copy(update={"encoding": sends})
    receiving = DELTA.model_copy(update={"encoding": "snapshot" if sends == "delta" else "delta"})
    with WeightPublisher(publishing) as publisher:
        async with WeightSubscriber(receiving, resolve=at(publisher.start())) as subscriber:
            received = await followed(publisher, subscriber, 0, 1, 2)
            assert same(received[2], drifted(2))
            assert subscriber.stats.num_patched == 0
            assert publisher.stats.server.num_patch_tables == 0


async def test_flipped_bytes_and_cuts_of_parcels_are_mended() -> None:
    with WeightPublisher(DELTA) as publisher:
        endpoints = publisher.start()
        size = drifted(0).num_bytes
        async with (
            proxied(endpoints.tiles, flip_at=(size + 6_000,), cut_at=size + 12_000) as proxy,
            WeightSubscriber(DELTA, resolve=at(replace(endpoints, tiles=proxy.address))) as subscriber,
        ):
            received = await followed(publisher, subscriber, *range(12))
            assert all(same(state, drifted(version)) for version, state in enumerate(received))
            assert proxy.num_flipped == 1
            assert proxy.num_connections > 1
            assert subscriber.stats.num_patched >= 9


def patch_sets(*versions: int) -> list[PatchSet]:
    encoder = Encoder(session=bytes(16), tile_bytes=16_384)
    items = [encoder.encode(drifted(version)) for version in versions]
    sets = [encoder.compare(before, after) for before, after in itertools.pairwise(items)]
    return [found for found in sets if found is not None]


async def test_patches_that_lie_are_refused_and_never_served() -> None:
    encoder = Encoder(session=bytes(16), tile_bytes=16_384)
    first, second = (encoder.encode(drifted(version)) for version in (0, 1))
    patches = encoder.compare(first, second)
    assert patches is not None
    (elsewhere,) = patch_sets(1, 2)
    manifest = Header(kind=Kind.MANIFEST, version=0, root=first.manifest.root)
    tiles = [[Header(kind=Kind.TILE, version=0, root=first.manifest.root).pack(), bytes(tile)] for tile in first.tiles]
    head = Header(kind=Kind.PATCHES, version=1, root=second.manifest.root)
    wrong = [
        [head.pack(), second.payload, b"no table"],
        [head.pack(), second.payload],
        [head.pack(), second.payload, elsewhere.payload],
        [replace(head, version=9).pack(), second.payload, patches.payload],
    ]
    liar = Liar([[manifest.pack(), first.payload], *tiles, [b"done has no answer"], *wrong])
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    endpoints = Endpoints(announce="tcp://127.0.0.1:9", tiles=f"tcp://127.0.0.1:{port}", session="")
    serving = asyncio.create_task(liar.run(router))
    settings = DELTA.model_copy(update={"poll_s": 0.02, "credits": 1})
    async with WeightSubscriber(settings, resolve=at(endpoints)) as subscriber:
        assert same(await next_within(subscriber, None), drifted(0))
        waiting = asyncio.create_task(subscriber.next(0))
        async with asyncio.timeout(180):
            while liar.num_answered < 2 * (len(tiles) + 6):  # noqa: ASYNC110  a peer sets no event
                await asyncio.sleep(0.01)
        assert not waiting.done()
        assert subscriber.stats.num_refused >= 3
        waiting.cancel()
        await asyncio.wait([waiting])
    serving.cancel()
    router.close(linger=0)
    context.term()


def test_a_table_is_read_as_it_was_written_and_must_fit_its_manifest() -> None:
    encoder = Encoder(session=bytes(16), tile_bytes=16_384)
    items = [encoder.encode(drifted(version)) for version in (0, 1, 2)]
    patches = encoder.compare(items[0], items[1])
    assert patches is not None
    table = decode_table(patches.payload, items[1].manifest)
    assert (table.identity, table.bounds) == (patches.table.identity, patches.table.bounds)
    assert table.num_parcels < len(table.methods), "small patches share a parcel"
    with pytest.raises(WeightError, match="does not lead to"):
        decode_table(patches.payload, items[2].manifest)
    for position in range(0, len(patches.payload), 97):
        spoilt = bytearray(patches.payload)
        spoilt[position] ^= 4
        with pytest.raises(WeightError):
            decode_table(bytes(spoilt), items[1].manifest)
    fields = msgpack.unpackb(patches.payload[16:])
    for name in fields.keys() - {"schema", "base_version", "encode_us"}:
        for lie in (1 << 62, [0] * 16, "0" * 16, None):  # a number is no size to allocate
            with pytest.raises(WeightError, match="malformed"):
                decode_table(seal({**fields, name: lie}), items[1].manifest)


def test_a_folded_chain_is_the_difference_of_its_ends() -> None:
    encoder = Encoder(session=bytes(16), tile_bytes=16_384)
    items = [encoder.encode(drifted(version)) for version in range(5)]
    chain = patch_sets(*range(5))
    folded, direct = fold(chain, items[4].manifest), encoder.compare(items[0], items[4])
    assert direct is not None
    assert (folded.table.base_root, folded.table.root) == (items[0].manifest.root, items[4].manifest.root)
    assert folded.parcels == direct.parcels
    assert folded.num_bytes < sum(step.num_bytes for step in chain)


def test_numbers_of_a_tile_are_as_wide_as_the_narrowest_in_it() -> None:
    state = WeightState(
        weight_version=0,
        kind=drifted(0).kind,
        tensors={
            "a": tensor(np.zeros(1024, np.float32), "float32"),
            "b": tensor(np.zeros(2048, np.float64), "float64"),
            "c": tensor(np.zeros(1024, np.complex64), "complex64"),
            "d": tensor(np.zeros(3, np.uint8), "uint8"),
        },
    )
    manifest = Encoder(session=bytes(16), tile_bytes=4096).encode(state).manifest
    assert tile_widths(manifest) == [4, 8, 8, 8, 8, 4, 4, 1]
    assert Method.UNCHANGED == 0


def choose(choice: Choice, costs: dict[bool, float], times: int) -> list[bool]:
    """What is chosen when transfers cost that much."""
    chosen = []
    for _ in range(times):
        chosen.append(choice.wants_patches)
        choice.note(is_patches=chosen[-1], seconds=costs[chosen[-1]], num_bytes=1)
    return chosen


@pytest.mark.parametrize(("costs", "better"), [({True: 1.0, False: 8.0}, True), ({True: 1.2, False: 1.0}, False)])
def test_the_faster_way_is_found_and_the_other_is_tried_now_and_then(costs: dict[bool, float], better: bool) -> None:
    choice = Choice("auto")
    choice.note(is_patches=False, seconds=costs[False], num_bytes=1)
    chosen = choose(choice, costs, 400)
    share = chosen.count(better) / len(chosen)
    assert 0.9 < share < 1.0
    spent = sum(costs[way] for way in chosen)
    assert spent / (len(chosen) * min(costs.values())) < 1.1
    assert choose(choice, {better: 10.0, not better: 1.0}, 400)[-20:].count(better) <= 2, "the line has changed"


def test_what_the_first_transfer_costs_with_fresh_memory_decides_nothing() -> None:
    choice = Choice("auto")
    for is_patches in (False, True):
        choice.note(is_patches=is_patches, seconds=100.0, num_bytes=1)
    assert choose(choice, {True: 1.0, False: 8.0}, 10).count(True) == 9, "the second of each counts"


def test_a_choice_that_is_made_in_the_settings_stays() -> None:
    for encoding in ("delta", "snapshot"):
        choice = Choice(encoding)
        assert set(choose(choice, {True: 1.0, False: 1.0}, 30)) == {encoding == "delta"}
