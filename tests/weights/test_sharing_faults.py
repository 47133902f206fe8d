"""Generators of one machine that cannot meet: each receives for itself, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.weights import WeightPublisher, WeightSubscriber, create_subscriber
from pipeline.weights.sharing import CURRENT, SharedSubscriber
from tests.weights.states import FAST, at, make_state, next_within, same


async def test_a_receiver_that_cannot_tell_serves_itself_and_the_others_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.weights.sharing._LOST_AFTER_S", 0.1)
    (tmp_path / CURRENT).mkdir()  # cannot be written, as on a disk that is full
    with WeightPublisher(FAST) as publisher, capture_logs() as logs:
        where = at(publisher.start())
        async with (
            SharedSubscriber(FAST, resolve=where, folder=tmp_path) as receiver,
            SharedSubscriber(FAST, resolve=where, folder=tmp_path) as other,
        ):
            for version in (0, 1):
                publisher.publish(make_state(version))
                for one in (receiver, other):
                    assert same(await next_within(one, version - 1), make_state(version))
            assert receiver.is_receiving
            assert other.is_receiving
    told = {entry["event"]: entry for entry in logs if entry["log_level"] == "warning"}
    assert set(told) == {"shared_weights_unreadable", "weights_not_shared", "weights_received_alone"}
    assert "TMPDIR" in told["weights_not_shared"]["way_out"]


def test_without_a_folder_to_meet_in_a_generator_receives_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with capture_logs() as logs:
        made = create_subscriber(FAST, at(None), run_id="0")
    assert type(made) is WeightSubscriber
    made.close()
    assert [entry["event"] for entry in logs] == ["weights_not_shared"]
