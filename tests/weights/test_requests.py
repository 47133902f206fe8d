"""Whatever a peer asks for, in the words of the protocol: it is answered, or counted, and the others are served."""

from __future__ import annotations

import itertools

import zmq

from pipeline.weights import WeightPublisher, WeightSubscriber
from pipeline.weights.protocol import MAX_VERSION, NO_ROOT, NOTHING, Header, Kind
from tests.weights.drift import drifted
from tests.weights.states import FAST, at, next_within, same, until


async def test_no_request_ends_the_publisher_whatever_it_names() -> None:
    states = [drifted(version) for version in range(4)]
    settings = FAST.model_copy(update={"encoding": "delta"})
    with WeightPublisher(settings) as publisher, zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        endpoints = publisher.start()
        async with (
            WeightSubscriber(settings, resolve=at(endpoints)) as first,
            WeightSubscriber(settings, resolve=at(endpoints)) as second,
        ):
            manifests = [publisher.publish(states[0])]
            for subscriber in (first, second):
                await next_within(subscriber, None)
            for version, state in enumerate(states[1:3]):
                manifests.append(publisher.publish(state))
                assert same(await next_within(first, version), state)
            assert same(await next_within(second, 0), states[2])  # there are steps, and a set folded of them
            assert second.stats.num_patched == 1
            peer.linger = 0
            peer.connect(endpoints.tiles)
            number, roots = 0, [NO_ROOT, *(manifest.root for manifest in manifests)]
            for kind, version, index, root in itertools.product(
                Kind, (NOTHING, 0, 1, 2, 3, MAX_VERSION), (0, 1, 2**32 - 1), roots
            ):
                number += 1
                peer.send(Header(kind=kind, request=number, version=version, index=index, root=root).pack())
            peer.send(b"the last one")
            malformed = sum(kind >= Kind.ANNOUNCE for kind in Kind) * number // len(Kind) + 1
            await until(lambda: publisher.stats.server.num_malformed >= malformed)
            assert publisher.is_serving
            publisher.publish(states[3])
            assert same(await next_within(first, 2), states[3])
