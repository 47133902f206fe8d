"""Patches over several versions: made tile by tile, for all who ask, until they are there or were overtaken."""

from __future__ import annotations

from itertools import pairwise

from pipeline.weights.codec import Encoder, WeightObject
from pipeline.weights.folding import Folding
from pipeline.weights.protocol import Header, Kind
from pipeline.weights.shelf import Shelf, Way
from tests.weights.drift import drifted

ENCODER = Encoder(session=bytes(16), tile_bytes=4096)
OBJECTS = [ENCODER.encode(drifted(version)) for version in range(4)]


def shelf_of(objects: list[WeightObject]) -> Shelf:
    """Has the steps between them."""
    shelf = Shelf(keep=2)
    shelf.put(objects[0])
    for pair in pairwise(objects):
        shelf.put(pair[1], ENCODER.compare(*pair))
    return shelf


def way_from(base: int, shelf: Shelf) -> Way:
    way = shelf.way_to_newest(base, OBJECTS[base].manifest.root)
    assert way is not None
    return way


def request(number: int) -> Header:
    return Header(kind=Kind.GET_MANIFEST, request=number)


def test_all_who_ask_are_answered_once_when_the_last_tile_is_folded_and_others_are_served_after_each() -> None:
    shelf = shelf_of(OBJECTS[:3])
    folding = Folding(shelf)
    for peer, number in ((b"a", 1), (b"b", 2), (b"a", 3)):
        folding.ask(way_from(0, shelf), peer, request(number))
    num_tiles = len(OBJECTS[2].tiles)
    assert num_tiles > 1
    assert [list(folding.go_on()) for _ in range(num_tiles)] == [[]] * num_tiles
    assert list(folding.go_on()) == [(b"a", request(3), True), (b"b", request(2), True)]
    assert not folding.is_under_way
    direct = ENCODER.compare(OBJECTS[0], OBJECTS[2])
    assert direct is not None
    way = way_from(0, shelf)
    assert [step.parcels for step in way.steps] == [direct.parcels]
    assert way.newest is OBJECTS[2]


def test_who_is_overtaken_by_a_newer_version_gets_a_snapshot_and_who_asks_after_it_the_way_to_that() -> None:
    shelf = shelf_of(OBJECTS[:3])
    folding = Folding(shelf)
    folding.ask(way_from(0, shelf), b"a", request(1))
    assert not list(folding.go_on())
    shelf.put(OBJECTS[3], ENCODER.compare(OBJECTS[2], OBJECTS[3]))
    folding.ask(way_from(1, shelf), b"b", request(2))
    assert list(folding.go_on()) == [(b"a", request(1), False)]
    answered = [answer for _ in range(len(OBJECTS[3].tiles) + 1) for answer in folding.go_on()]
    assert answered == [(b"b", request(2), True)]
    assert shelf.start_transfer(b"a", 0) is OBJECTS[3]


def test_what_was_folded_for_a_version_that_is_the_newest_no_more_is_not_kept() -> None:
    shelf = shelf_of(OBJECTS[:3])
    way = way_from(0, shelf)
    shelf.put(OBJECTS[3], ENCODER.compare(OBJECTS[2], OBJECTS[3]))
    assert not shelf.keep_folded(way.newest, way.steps[0])
