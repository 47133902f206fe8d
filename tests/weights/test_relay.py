"""Weights that are passed on while they come in: the trainer sends them once, whoever dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import zmq.asyncio

from pipeline.config import Config, WeightSettings
from pipeline.weights import Endpoints, WeightPublisher, WeightState, WeightSubscriber, server
from pipeline.weights.protocol import Header, Kind
from pipeline.weights.relay import Relay, resolve_in_tree
from pipeline.weights.subscriber_stats import Phase
from tests.weights.drift import drifted
from tests.weights.states import FAST, at, make_state, next_within, same, until

SETTINGS = FAST.model_copy(update={"encoding": "delta", "tile_bytes": 16_384, "relay": True})
SIZE = 4_000_000  # bytes of a state that takes a while to come


@dataclass
class Machines:
    """Receivers as on machines of their own, each a relay, and the tree that they make."""

    trainer: Endpoints
    settings: WeightSettings = SETTINGS
    fanout: int = 2
    alive: dict[str, Endpoints] = field(default_factory=dict)
    relays: dict[str, Relay] = field(default_factory=dict)
    subscribers: dict[str, WeightSubscriber] = field(default_factory=dict)

    async def root(self) -> Endpoints:
        return self.trainer

    async def listed(self) -> Sequence[tuple[str, Endpoints]]:
        return list(self.alive.items())

    def join(self, name: str) -> WeightSubscriber:
        relay = self.relays[name] = Relay(self.settings)
        self.alive[name] = relay.start()
        resolve = resolve_in_tree(self.root, self.listed, own_id=name, fanout=self.fanout)
        self.subscribers[name] = WeightSubscriber(self.settings, resolve=resolve, relay=relay)
        return self.subscribers[name]

    def leave(self, name: str) -> None:
        """As if its process were gone and the registry knew."""
        self.alive.pop(name, None)
        self.subscribers.pop(name).close()

    async def follow(self, version: int, last: int | None) -> list[WeightState]:
        """All of them get a version."""
        return list(await asyncio.gather(*(next_within(one, last) for one in self.subscribers.values())))


@asynccontextmanager
async def machines(number: int, trainer: Endpoints, **changes: object) -> AsyncIterator[Machines]:
    made = Machines(trainer, settings=SETTINGS.model_copy(update=changes))
    for index in range(number):
        made.join(f"machine-{index}")
    try:
        yield made
    finally:
        for name in list(made.subscribers):
            made.leave(name)


async def stopped_in_the_middle(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    """It has some tiles of the first version, and fetches no more of them for now."""
    begun = asyncio.create_task(next_within(subscriber, None))
    await until(lambda: publisher.stats.server.num_tiles >= 6)
    begun.cancel()
    await asyncio.wait([begun])
    assert begun.cancelled()


@asynccontextmanager
async def interrupted_relay() -> AsyncIterator[tuple[WeightPublisher, Relay, WeightSubscriber, WeightSubscriber]]:
    """The trainer, a relay that has some of the first version, its subscriber, and one that fetches from it."""
    with WeightPublisher(FAST) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(0, num_bytes=SIZE))
        relay = Relay(SETTINGS)
        where = replace(relay.start(), session=endpoints.session)
        async with (
            WeightSubscriber(FAST.model_copy(update={"credits": 1}), resolve=at(endpoints), relay=relay) as parent,
            WeightSubscriber(FAST, resolve=at(where)) as child,
        ):
            await stopped_in_the_middle(publisher, parent)
            yield publisher, relay, parent, child


async def test_eight_receivers_cost_the_trainer_one_copy_whole_and_as_changes() -> None:
    with WeightPublisher(SETTINGS) as publisher:
        endpoints = publisher.start()
        async with machines(8, endpoints) as fleet:
            sent = []
            for version in range(4):
                before = publisher.stats.server.num_bytes
                publisher.publish(drifted(version))
                states = await fleet.follow(version, version - 1 if version else None)
                assert all(same(state, drifted(version)) for state in states)
                sent.append(publisher.stats.server.num_bytes - before)
            payload = fleet.subscribers["machine-7"].stats
            assert payload.num_patched == 3
            assert sum(sent) < 1.2 * (payload.num_received_bytes + 4 * 1500)  # manifests are sent, and are no content
            assert {one.stats.num_patched for one in fleet.subscribers.values()} == {3}


async def test_pieces_are_passed_on_before_all_are_there() -> None:
    async with interrupted_relay() as (_, relay, parent, child):
        waiting = asyncio.create_task(next_within(child, None))
        await until(lambda: relay.stats.server.num_tiles >= 1)
        assert not waiting.done()
        assert same(await next_within(parent, None), make_state(0, num_bytes=SIZE))
        assert same(await waiting, make_state(0, num_bytes=SIZE))


async def test_receivers_behind_relays_wait_for_the_first_version_and_not_for_a_silence_to_end() -> None:
    with WeightPublisher(SETTINGS) as publisher:
        endpoints = publisher.start()
        async with machines(4, endpoints, poll_s=20.0) as fleet:
            *children, first = reversed(fleet.subscribers.values())
            waiting = [asyncio.create_task(next_within(child, None)) for child in children]
            await until(lambda: all(child.stats.phase is not Phase.ADDRESS for child in children))
            waiting.append(asyncio.create_task(next_within(first, None)))
            await until(lambda: all(one.stats.phase is Phase.VERSION for one in fleet.subscribers.values()))
            publisher.publish(make_state(0))
            assert all(same(state, make_state(0)) for state in await asyncio.gather(*waiting))
            assert not any(one.stats.num_silences for one in fleet.subscribers.values())


async def test_what_waits_for_a_relay_is_answered_once_however_often_it_was_asked_for() -> None:
    relay, context = Relay(SETTINGS), zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(relay.start().tiles)
    for number in (1, 2, 3):
        await dealer.send(Header(kind=Kind.GET_MANIFEST, request=number).pack())
    await dealer.send(b"nonsense")
    await until(lambda: relay.stats.server.num_malformed == 1)
    relay.speak_for(b"\xab" * 16)
    await dealer.send(Header(kind=Kind.GET_MANIFEST, request=4).pack())
    async with asyncio.timeout(180):
        answers = [Header.parse(await dealer.recv()) for _ in (3, 4)]
    assert [answer.request for answer in answers if answer is not None] == [3, 4]
    dealer.close(linger=0)
    context.term()
    relay.close()


async def test_requests_that_wait_for_a_relay_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_WAITING", 10)
    relay, context = Relay(SETTINGS), zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(relay.start().tiles)
    for number in range(50):
        await dealer.send(Header(kind=Kind.GET_TILE, request=number, version=1, index=number).pack())
    await until(lambda: relay.stats.server.num_undelivered == 40)
    relay.speak_for(b"\xab" * 16)
    async with asyncio.timeout(30):
        answers = [Header.parse(await dealer.recv()) for _ in range(10)]
    assert [answer.request for answer in answers if answer is not None] == [*range(40, 50)]
    dealer.close(linger=0)
    context.term()
    relay.close()


async def test_a_relay_that_dies_in_mid_transfer_is_routed_around_and_its_tiles_are_kept() -> None:
    with WeightPublisher(FAST) as publisher:
        endpoints = publisher.start()
        async with machines(3, endpoints, credits=1) as fleet:
            first, child = fleet.subscribers["machine-0"], fleet.subscribers["machine-1"]
            publisher.publish(make_state(0, num_bytes=SIZE))
            await stopped_in_the_middle(publisher, first)
            waiting = asyncio.create_task(next_within(child, None))
            await until(lambda: fleet.relays["machine-0"].stats.server.num_tiles >= 3)
            fleet.leave("machine-0")
            state = await waiting
            assert same(state, make_state(0, num_bytes=SIZE))
            assert child.stats.num_resumed_tiles >= 3
            assert same(await next_within(fleet.subscribers["machine-2"], None), make_state(0, num_bytes=SIZE))


async def test_a_version_that_never_becomes_whole_is_withdrawn() -> None:
    async with interrupted_relay() as (publisher, relay, parent, child):
        waiting = asyncio.create_task(next_within(child, None))
        await until(lambda: relay.stats.server.num_tiles >= 2)
        for version in (1, 2, 3):
            publisher.publish(make_state(version, num_bytes=SIZE))
        # What it has begun with is no longer of use to it: newer than 1 is asked for.
        state = await next_within(parent, 1)
        assert same(state, make_state(3, num_bytes=SIZE))
        assert same(await waiting, make_state(3, num_bytes=SIZE))


async def test_a_restarted_trainer_is_followed_through_the_same_relays() -> None:
    with WeightPublisher(SETTINGS) as first:
        async with machines(4, first.start()) as fleet:
            first.publish(drifted(0))
            await fleet.follow(0, None)
            with WeightPublisher(SETTINGS) as second:
                fleet.trainer = second.start()
                first.close()
                second.publish(drifted(1))
                assert all(same(state, drifted(1)) for state in await fleet.follow(1, 0))


async def test_the_tree_has_every_relay_once_and_no_circle() -> None:
    trainer = Endpoints(announce="", tiles="trainer", session="s")
    there = [(f"w{index}", Endpoints(announce="", tiles=f"w{index}", session="other")) for index in range(20)]

    async def relays() -> Sequence[tuple[str, Endpoints]]:
        return there

    parents = {}
    for name, _ in there:
        found = await resolve_in_tree(at(trainer), relays, own_id=name, fanout=3)()
        assert found is not None
        assert found.session == "s"
        parents[name] = found.tiles
    assert [name for name, parent in parents.items() if parent == "trainer"] == ["w0"]
    assert max(list(parents.values()).count(name) for name in parents) == 3
    for name in parents:
        steps, at_ = 0, name
        while at_ != "trainer":
            at_, steps = parents[at_], steps + 1
        assert steps <= 4
    leaf = await resolve_in_tree(at(trainer), relays, own_id="no relay", fanout=3)()
    assert leaf is not None
    assert leaf.tiles in parents
    assert await resolve_in_tree(at(None), relays, own_id="w3", fanout=3)() is None


def test_a_relay_open_to_the_network_needs_keys() -> None:
    with pytest.raises(ValueError, match=r"weights\.relay_host"):
        Config.model_validate({"weights": {"relay": True, "relay_host": "0.0.0.0"}})
    Config.model_validate({"weights": {"relay": False, "relay_host": "0.0.0.0"}})
