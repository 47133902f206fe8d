"""What can be fetched: the newest version, and a bounded number that someone is fetching."""

from __future__ import annotations

import pytest

from pipeline.errors import WeightError
from pipeline.weights.codec import Encoder, WeightObject
from pipeline.weights.protocol import NOTHING
from pipeline.weights.shelf import Shelf
from tests.weights.states import make_state

ENCODER = Encoder(session=bytes(16), tile_bytes=4096)


class Clock:
    """Time that stands until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def weights(version: int) -> WeightObject:
    return ENCODER.encode(make_state(version))


def is_held(shelf: Shelf, item: WeightObject, receiver: bytes) -> bool:
    return shelf.find(receiver, item.manifest.weight_version, item.manifest.root) is item


def test_an_old_version_that_nobody_fetches_is_let_go_at_once() -> None:
    shelf = Shelf(keep=3)
    for version in range(5):
        shelf.put(weights(version))
        assert shelf.num_objects == 1


def test_a_version_stays_until_its_transfer_ends() -> None:
    shelf = Shelf(keep=2)
    first = weights(1)
    shelf.put(first)
    assert shelf.start_transfer(b"a", NOTHING) is first
    for version in range(2, 9):
        shelf.put(weights(version))
        assert shelf.num_objects == 2
    assert is_held(shelf, first, b"a")
    shelf.end_transfer(b"a")
    assert shelf.num_objects == 1
    assert not is_held(shelf, first, b"a")


def test_where_not_all_can_stay_each_receiver_has_its_turn() -> None:
    shelf = Shelf(keep=2)
    items = [weights(version) for version in range(9)]
    shelf.put(items[1])
    shelf.start_transfer(b"a", NOTHING)
    shelf.put(items[2])
    shelf.start_transfer(b"b", NOTHING)
    shelf.put(items[3])
    assert is_held(shelf, items[1], b"a")
    assert not is_held(shelf, items[2], b"b")

    # The first is quick to begin anew, before the second has come back; but now it is the second's turn.
    shelf.end_transfer(b"a")
    assert shelf.start_transfer(b"a", 1) is items[3]
    shelf.put(items[4])
    assert shelf.start_transfer(b"b", NOTHING) is items[4]
    for version in (5, 6):
        shelf.put(items[version])
        assert is_held(shelf, items[4], b"b")
        assert not is_held(shelf, items[3], b"a")
    assert shelf.start_transfer(b"a", 1) is items[6]
    shelf.end_transfer(b"b")
    shelf.put(items[7])
    shelf.start_transfer(b"b", 4)
    shelf.put(items[8])
    assert is_held(shelf, items[6], b"a")
    assert not is_held(shelf, items[7], b"b")


def test_a_receiver_that_asks_for_nothing_any_more_protects_nothing() -> None:
    clock = Clock()
    shelf = Shelf(keep=2, idle_s=30, clock=clock)
    shelf.put(weights(1))
    shelf.start_transfer(b"dead", NOTHING)
    shelf.put(weights(2))
    assert shelf.num_objects == 2
    clock.now = 31
    shelf.sweep()
    assert shelf.num_objects == 1
    assert shelf.num_receivers == 0


def test_a_version_is_published_once_and_never_lower() -> None:
    shelf = Shelf(keep=2)
    shelf.put(weights(4))
    for version in (4, 3):
        with pytest.raises(WeightError, match="not newer than 4"):
            shelf.put(weights(version))


def test_an_object_is_only_found_under_its_own_hash() -> None:
    shelf = Shelf(keep=2)
    shelf.put(weights(1))
    assert shelf.find(b"a", 1, bytes(16)) is None


def test_one_version_is_not_enough_to_receive_and_publish() -> None:
    with pytest.raises(ValueError, match="keep = 1"):
        Shelf(keep=1)


def test_patches_are_wanted_while_someone_asks_for_them_and_not_for_everything_since() -> None:
    clock = Clock()
    shelf = Shelf(keep=2, clock=clock)
    assert not shelf.are_patches_wanted
    for receiver, wants_patches, are_wanted in (
        (b"a", True, True),
        (b"b", False, True),
        (b"b", True, True),
        (b"a", False, True),
        (b"b", False, False),
        (b"a", True, True),
    ):
        shelf.note_wish(receiver, wants_patches=wants_patches)
        assert shelf.are_patches_wanted is are_wanted
    clock.now = 119
    assert shelf.are_patches_wanted
    clock.now = 121
    assert not shelf.are_patches_wanted
