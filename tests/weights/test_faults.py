"""From publisher to subscriber when something breaks: bits, lines, processes, peers."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from urllib.parse import urlparse

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from pipeline.errors import ServiceUnavailableError
from pipeline.weights import Endpoints, WeightPublisher, WeightSubscriber
from pipeline.weights.codec import Encoder
from pipeline.weights.protocol import ErrorCode, Header, Kind
from tests.weights.proxy import proxied
from tests.weights.states import FAST, at, make_state, next_within, same, until

SIZE = 400_000  # bytes of a state here, 98 tiles
CALM = FAST.model_copy(update={"poll_s": 0.5})


async def test_a_flipped_byte_is_found_and_its_tile_ordered_again() -> None:
    with WeightPublisher(CALM) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1, num_bytes=SIZE))
        async with (
            proxied(endpoints.tiles, flip_at=(100_000, 200_000)) as proxy,
            WeightSubscriber(CALM, resolve=at(replace(endpoints, tiles=proxy.address))) as subscriber,
        ):
            old = await next_within(subscriber, None)
            assert same(old, make_state(1, num_bytes=SIZE))
            assert proxy.num_flipped == 2
            assert subscriber.stats.num_corrupt_tiles == 2


async def test_a_transfer_cut_at_nine_tenths_goes_on_where_it_was_and_leaves_the_old_state_alone() -> None:
    with WeightPublisher(CALM) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1, num_bytes=SIZE))
        async with (
            proxied(endpoints.tiles, cut_at=SIZE + 9 * SIZE // 10) as proxy,
            WeightSubscriber(CALM, resolve=at(replace(endpoints, tiles=proxy.address))) as subscriber,
        ):
            old = await next_within(subscriber, None)
            served = publisher.stats.server.num_tiles
            publisher.publish(make_state(2, num_bytes=SIZE))
            new = await next_within(subscriber, 1)
            stats = subscriber.stats
            assert same(new, make_state(2, num_bytes=SIZE))
            assert same(old, make_state(1, num_bytes=SIZE))
            assert proxy.num_connections > 1
            # Either the line came back by itself and what was on it was ordered again, or we connected anew.
            assert stats.num_lost_tiles or stats.num_resumed_tiles >= 50
            # What is sent twice is at most a window of orders and what the sockets held at the cut.
            assert publisher.stats.server.num_tiles - served <= 98 + CALM.credits + 40


async def test_a_version_that_is_gone_after_a_cut_gives_way_to_the_newest() -> None:
    with WeightPublisher(CALM) as publisher:
        endpoints = publisher.start()
        async with (
            proxied(endpoints.tiles, cut_at=SIZE // 2) as proxy,
            WeightSubscriber(CALM, resolve=at(replace(endpoints, tiles=proxy.address))) as subscriber,
        ):
            publisher.publish(make_state(1, num_bytes=SIZE))
            waiting = asyncio.create_task(next_within(subscriber, None))
            await until(lambda: publisher.stats.server.num_tiles >= 20)
            for version in range(2, 5):
                publisher.publish(make_state(version, num_bytes=SIZE))
            first = await waiting
            second = first if first.weight_version == 4 else await next_within(subscriber, first.weight_version)
            assert same(first, make_state(first.weight_version, num_bytes=SIZE))
            assert same(second, make_state(4, num_bytes=SIZE))


async def test_a_receiver_that_connects_anew_holds_one_version_and_not_another_with_its_old_connection() -> None:
    with WeightPublisher(CALM) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1, num_bytes=SIZE))
        async with (
            proxied(endpoints.tiles, cut_at=SIZE // 2) as proxy,
            WeightSubscriber(CALM, resolve=at(replace(endpoints, tiles=proxy.address))) as subscriber,
        ):
            await next_within(subscriber, None)
            assert proxy.num_connections > 1
            async with asyncio.timeout(10):  # a receiver that asks for nothing is forgotten after 30 s
                await until(lambda: publisher.stats.num_receivers == 0)
            publisher.publish(make_state(2))
            assert publisher.stats.num_held == 1


async def test_a_restarted_publisher_is_found_through_its_new_address() -> None:
    current: list[Endpoints] = []

    async def resolve() -> Endpoints:
        return current[-1]

    async with WeightSubscriber(FAST, resolve=resolve) as subscriber:
        with WeightPublisher(FAST) as first:
            current.append(first.start())
            first.publish(make_state(3))
            assert same(await next_within(subscriber, None), make_state(3))
        waiting = asyncio.create_task(next_within(subscriber, 3))
        with WeightPublisher(FAST) as second:
            current.append(second.start())
            second.publish(make_state(4))
            assert same(await waiting, make_state(4))
            assert subscriber.stats.num_silences + subscriber.stats.num_moves > 0


async def test_a_publisher_that_left_and_came_back_elsewhere_is_found_without_waiting_for_the_old_address() -> None:
    patient = FAST.model_copy(update={"poll_s": 60.0})
    current: list[Endpoints | None] = [None]

    async def resolve() -> Endpoints | None:
        return current[-1]

    with capture_logs() as logs:
        async with WeightSubscriber(patient, resolve=resolve) as subscriber:
            with WeightPublisher(FAST) as first:
                current.append(first.start())
                first.publish(make_state(3))
                assert same(await next_within(subscriber, None), make_state(3))
                waiting = asyncio.create_task(next_within(subscriber, 3))
                current.append(None)
                await until(lambda: subscriber.stats.num_moves == 1)
            with WeightPublisher(FAST) as second:
                current.append(second.start())
                second.publish(make_state(4))
                assert same(await waiting, make_state(4))
            assert subscriber.stats.num_silences == 0
    assert [entry["log_level"] for entry in logs if entry["event"].startswith("weight_publisher")] == ["debug"]


async def test_an_address_book_that_cannot_be_read_ends_no_connection_that_works() -> None:
    with WeightPublisher(FAST) as publisher:
        answers: list[Endpoints] = [publisher.start()]
        failed = asyncio.Event()

        async def resolve() -> Endpoints:
            if answers:
                return answers.pop()
            failed.set()
            raise ServiceUnavailableError("the registry is away")

        async with WeightSubscriber(FAST, resolve=resolve) as subscriber:
            waiting = asyncio.create_task(next_within(subscriber, None))
            await failed.wait()
            publisher.publish(make_state(1))
            assert same(await waiting, make_state(1))


async def test_a_publisher_restarted_in_mid_transfer_never_mixes_two_objects() -> None:
    current: list[Endpoints] = []

    async def resolve() -> Endpoints:
        return current[-1]

    async with WeightSubscriber(FAST, resolve=resolve) as subscriber:
        with WeightPublisher(FAST) as first:
            current.append(first.start())
            first.publish(make_state(3, num_bytes=4_000_000))
            waiting = asyncio.create_task(next_within(subscriber, None))
            await until(lambda: first.stats.server.num_tiles >= 100)
        assert not waiting.done()
        with WeightPublisher(FAST) as second:
            current.append(second.start())
            other = replace(make_state(8, num_bytes=4_000_000), weight_version=3)
            second.publish(other)
            assert same(await waiting, other)


async def test_another_publisher_on_the_same_port_is_not_listened_to() -> None:
    with WeightPublisher(FAST) as ours:
        endpoints = ours.start()
    ports = [urlparse(address).port for address in (endpoints.tiles, endpoints.announce)]
    settings = FAST.model_copy(update={"port": ports[0], "announce_port": ports[1]})
    with WeightPublisher(settings) as stranger:
        stranger.start()
        stranger.publish(make_state(9))
        async with WeightSubscriber(FAST, resolve=at(endpoints)) as subscriber:
            with capture_logs() as logs:
                waiting = asyncio.create_task(next_within(subscriber, None))
                await until(lambda: bool(logs))
            assert "another session than the endpoints name" in logs[0]["may_be"]
            assert subscriber.stats.num_ignored > 0
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait([waiting])
        async with WeightSubscriber(FAST, resolve=at(replace(endpoints, session=""))) as subscriber:
            assert same(await next_within(subscriber, None), make_state(9))


def nonsense(version: int, root: bytes) -> list[list[bytes]]:
    """Messages that are none, or ask for what there is not."""
    tile = Header(kind=Kind.GET_TILE, version=version, root=root, index=0)
    return [
        [b""],
        [b"x" * 64],
        [b"RSW2" + b"\xff" * 60],
        [tile.pack(), b"more"],
        [tile.pack()[:-1]],
        [replace(tile, kind=Kind.TILE).pack()],
        [replace(tile, index=2**32 - 1).pack()],
        [replace(tile, version=2**63 - 1).pack()],
        [replace(tile, root=bytes(16)).pack()],
    ]


async def test_nonsense_harms_only_its_sender() -> None:
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    try:
        with WeightPublisher(FAST) as publisher:
            endpoints = publisher.start()
            manifest = publisher.publish(make_state(1))
            for peer in sockets:
                peer.linger = 0
                peer.connect(endpoints.tiles)
            for message in nonsense(1, manifest.root):
                sockets[0].send_multipart(message)
            sockets[1].send(b"x" * 1_000_000)
            with socket.create_connection(("127.0.0.1", urlparse(endpoints.tiles).port)) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            codes = [Header.parse(sockets[0].recv()).code for _ in range(3)]  # type: ignore[union-attr]
            assert codes == [ErrorCode.NO_SUCH_TILE, ErrorCode.GONE, ErrorCode.GONE]
            await until(lambda: publisher.stats.server.num_malformed == 7)  # of two connections
            async with WeightSubscriber(FAST, resolve=at(endpoints)) as subscriber:
                assert same(await next_within(subscriber, None), make_state(1))
    finally:
        for peer in sockets:
            peer.close(linger=0)
        context.term()


class Liar:
    """A publisher that answers every request with the next of `answers`, in turn."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        self._answers = answers
        self.num_answered = 0

    async def run(self, router: zmq.asyncio.Socket) -> None:
        """Answer until cancelled."""
        while True:
            peer, frame = await router.recv_multipart()
            request = Header.parse(frame)
            assert request is not None
            head, *rest = self._answers[self.num_answered % len(self._answers)]
            parsed = Header.parse(head)
            if parsed is not None:
                head = replace(parsed, request=request.request).pack()
            self.num_answered += 1
            await router.send_multipart([peer, head, *rest])


async def test_lies_of_a_publisher_are_refused_and_the_true_one_is_found() -> None:
    item = Encoder(session=bytes(16), tile_bytes=4096).encode(make_state(5, num_bytes=20_000_000))
    true = Header(kind=Kind.MANIFEST, version=5, root=item.manifest.root)
    liar = Liar(
        [
            [b"nonsense"],
            [true.pack(), b"no manifest"],
            [true.pack()],
            [replace(true, version=6).pack(), item.payload],
            [true.pack(), item.payload],  # larger than max_model_bytes
            [replace(true, kind=Kind.ERROR).pack()],
            [true.pack(), b"a", b"b"],
        ]
    )
    settings = FAST.model_copy(update={"max_model_bytes": 10_000_000, "poll_s": 0.05})
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    current = [Endpoints(announce="tcp://127.0.0.1:9", tiles=f"tcp://127.0.0.1:{port}", session="")]

    async def resolve() -> Endpoints:
        return current[-1]

    lying = asyncio.create_task(liar.run(router))
    try:
        async with WeightSubscriber(settings, resolve=resolve) as subscriber:
            waiting = asyncio.create_task(next_within(subscriber, None))
            await until(lambda: liar.num_answered >= 14)
            assert subscriber.stats.num_refused >= 3
            assert subscriber.stats.num_ignored >= 2
            lying.cancel()
            with WeightPublisher(settings) as publisher:
                current.append(publisher.start())
                publisher.publish(make_state(6))
                assert same(await waiting, make_state(6))
    finally:
        lying.cancel()
        router.close(linger=0)
        context.term()


async def test_an_object_whose_tiles_are_never_right_is_given_up() -> None:
    item = Encoder(session=bytes(16), tile_bytes=4096).encode(make_state(5))
    manifest = Header(kind=Kind.MANIFEST, version=5, root=item.manifest.root)
    wrong = Header(kind=Kind.TILE, version=5, root=item.manifest.root)
    liar = Liar([[manifest.pack(), item.payload], *[[wrong.pack(), b"\0" * 4096]] * 300])
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    endpoints = Endpoints(announce="tcp://127.0.0.1:9", tiles=f"tcp://127.0.0.1:{port}", session="")
    lying = asyncio.create_task(liar.run(router))
    try:
        async with WeightSubscriber(FAST, resolve=at(endpoints)) as subscriber:
            waiting = asyncio.create_task(subscriber.next(None))
            await until(lambda: subscriber.stats.num_refused > 0)
            assert subscriber.stats.num_corrupt_tiles > 0
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait([waiting])
    finally:
        lying.cancel()
        router.close(linger=0)
        context.term()


@pytest.mark.parametrize(("field", "value"), [("tiles", "nowhere"), ("session", "run-7"), ("session", "abcd")])
async def test_an_address_that_is_none_is_waited_out(field: str, value: str) -> None:
    with WeightPublisher(FAST) as publisher:
        endpoints = publisher.start()
        publisher.publish(make_state(1))
        answers = [replace(endpoints, **{field: value}), endpoints]

        async def resolve() -> Endpoints:
            return answers.pop(0) if len(answers) > 1 else answers[0]

        async with WeightSubscriber(FAST, resolve=resolve) as subscriber:
            assert same(await next_within(subscriber, None), make_state(1))
            assert subscriber.stats.num_refused == 1


async def test_what_resolve_raises_reaches_the_caller() -> None:
    async def resolve() -> Endpoints:
        raise ServiceUnavailableError("the registry is closed")

    async with WeightSubscriber(FAST, resolve=resolve) as subscriber:
        with pytest.raises(ServiceUnavailableError, match="registry"):
            await next_within(subscriber, None)
