"""The run directory: records that survive crashes, resumes and full disks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.messages import Json
from pipeline.records.curve import how_sampled
from pipeline.records.recorder import (
    Recorder,
    all_samples,
    find_sample,
    last_metrics,
    plot_curve,
    read_metrics,
    tail_samples,
)
from pipeline.run.record import as_status, read_record
from tests.groups import make_prompt, make_scored


def recorder(run_dir: Path) -> Recorder:
    return Recorder(run_dir, "trainer", clock=lambda: 1000.0)


def test_each_step_is_one_line_of_json(tmp_path: Path) -> None:
    recorder(tmp_path / "run").metrics(3, {"reward_mean": 0.5, "loss": float("nan")})
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 3, "time": 1000.0, "role": "trainer", "reward_mean": 0.5, "loss": None}


def test_records_of_one_step_are_read_as_one(tmp_path: Path) -> None:
    records = recorder(tmp_path)
    records.metrics(1, {"reward_mean": 0.5})
    records.metrics(1, {"eval_reward": 0.7})
    records.metrics(2, {"reward_mean": 0.6})
    steps = read_metrics(tmp_path)
    assert [step["step"] for step in steps] == [1, 2]
    assert (steps[0]["reward_mean"], steps[0]["eval_reward"]) == (0.5, 0.7)


def test_steps_that_a_resumed_run_does_again_replace_the_lost_ones(tmp_path: Path) -> None:
    records = recorder(tmp_path)
    for step in (1, 2, 3, 4):
        records.metrics(step, {"reward_mean": 0.1, "eval_reward": 0.1})
    records.metrics(2, {"reward_mean": 0.9})
    records.metrics(3, {"reward_mean": 0.9})
    assert [(step["step"], step["reward_mean"]) for step in read_metrics(tmp_path)] == [(1, 0.1), (2, 0.9), (3, 0.9)]
    assert "eval_reward" not in read_metrics(tmp_path)[1]


def test_a_run_that_resumes_has_one_row_for_each_step_and_keeps_what_it_lost_elsewhere(tmp_path: Path) -> None:
    records = recorder(tmp_path)
    records.metrics(0, {"eval_reward": 0.0, "eval_weight_version": 0})
    for step in (1, 2, 3, 4):
        records.metrics(step, {"reward_mean": 0.1, "weight_version": step})
    records.metrics(4, {"eval_reward": 0.2, "eval_weight_version": 2})
    records.metrics(4, {"eval_reward": 0.4, "eval_weight_version": 4})
    assert recorder(tmp_path).rewind(2) == 3
    recorder(tmp_path).metrics(3, {"reward_mean": 0.9, "weight_version": 5})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("reward_mean"), row.get("eval_reward")) for row in rows] == [
        (0, None, 0.0),
        (1, 0.1, None),
        (2, 0.1, None),
        (2, None, 0.2),
        (3, 0.9, None),
    ], "what was measured of weights that go on stays"
    lost = [json.loads(line) for line in (tmp_path / "metrics_lost.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lost] == [3, 4, 4]
    assert recorder(tmp_path).rewind(3) == 0
    assert recorder(tmp_path).rewind(0) == 5, "a run that begins anew measures its first weights again"
    assert read_metrics(tmp_path) == []


ODD_LINES = [
    b'{"step": NaN}',
    b'{"step": 1e999}',
    b'{"step": true, "reward_mean": 9}',
    b'{"step": -3, "reward_mean": 9}',
    b'{"step": "2", "reward_mean": 9}',
    b'{"step": ' + b"9" * 400 + b"}",
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"reward_mean": 9}',
    b'{"eval_weight_version": 1}',
    b'{"step": ' + b"[" * 100_000,
    b"[1, 2]",
    b"\xff\xfe not text",
    b'{"step": 2, "rew',
]


@pytest.mark.parametrize("odd", ODD_LINES, ids=lambda line: line[:40].decode(errors="replace"))
def test_what_is_no_record_of_a_step_is_set_aside_as_it_is_and_ends_nothing(odd: bytes, tmp_path: Path) -> None:
    records = recorder(tmp_path)
    records.metrics(1, {"reward_mean": 0.1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(odd)
    recorder(tmp_path).metrics(2, {"reward_mean": 0.2})
    assert [step["reward_mean"] for step in read_metrics(tmp_path)] == [0.1, 0.2]
    assert last_metrics(tmp_path, ["reward_mean"])["step"] == 2
    whole = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert recorder(tmp_path).rewind(2) == 1
    assert (tmp_path / "metrics_lost.jsonl").read_bytes() == odd + b"\n"
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines() == [whole[0], whole[2]]
    assert recorder(tmp_path).rewind(2) == 0


ODD_VALUES = ("NaN", "-Infinity", "1e999", '"x"', "[]", "{}", "null", "true", '""', "9" * 400)


@pytest.mark.parametrize("values", [ODD_VALUES, ODD_VALUES[::-1]], ids=["forwards", "backwards"])
@pytest.mark.parametrize("name", ["weight_version", "eval_weight_version", "reward_mean", "time"])
def test_records_with_odd_values_can_be_kept_moved_and_set_aside(
    name: str, values: Sequence[str], tmp_path: Path
) -> None:
    """One a step; those that the one order sets aside are kept in the other."""
    run_dir = tmp_path / "run"
    records = recorder(run_dir)
    for step, value in enumerate(values, start=1):
        records.metrics(step, {"reward_mean": 0.1, "weight_version": step})
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "eval_weight_version": 1, "{name}": {value}}}\n')
    middle = len(values) // 2
    records.rewind(middle)
    assert [row["step"] for row in read_metrics(run_dir)] == list(range(1, middle + 1))
    for row in read_metrics(run_dir):
        json.dumps(row, allow_nan=False)
    plot_curve(run_dir, run_dir / "curve.png")
    record = read_record(run_dir)
    assert record is not None
    assert (record.step, as_status(record).step) == (middle, middle)


def test_samples_with_odd_numbers_among_them_are_read_all_the_same(tmp_path: Path) -> None:
    records = recorder(tmp_path)
    records.samples(1, [make_scored(make_prompt(0), [1.0, 0.0])])
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"group_id": "odd", "step": NaN}\n' + b"9" * 5000 + b"\n")
    records.samples(2, [make_scored(make_prompt(1), [1.0, 0.0])])
    assert [sample["step"] for sample in all_samples(tmp_path)] == [1, None, 2]
    assert [sample["group_id"] for sample in tail_samples(tmp_path, 2)] == ["odd", "00000001"]


def test_records_that_find_no_place_to_be_set_aside_do_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    loop = tmp_path / "metrics_lost.jsonl"
    loop.symlink_to(loop)
    with capture_logs() as logs:
        assert recorder(tmp_path).rewind(2) == 1
    assert [entry["event"] for entry in logs] == ["record_not_written"]


def test_a_line_cut_off_by_a_crash_spoils_neither_itself_nor_the_next(tmp_path: Path) -> None:
    recorder(tmp_path).metrics(1, {"reward_mean": 0.1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    recorder(tmp_path).metrics(2, {"reward_mean": 0.2})
    assert [step["reward_mean"] for step in read_metrics(tmp_path)] == [0.1, 0.2]


def test_a_sample_shows_completions_rewards_and_versions(tmp_path: Path) -> None:
    group = make_scored(make_prompt(7, columns={"answer": "x"}), [1.0, None], version=3)
    recorder(tmp_path).samples(5, [group])
    sample = find_sample(tmp_path, "00000007")
    assert sample is not None
    assert (sample["step"], sample["prompt"], sample["columns"]) == (5, "prompt 7", {"answer": "x"})
    assert (sample["generator"], sample["scorer"]) == ("generator-test", "scorer-test")
    first, second = sample["completions"]
    assert first == {
        "text": "abc",
        "reward": 1.0,
        "rewards": {"test": 1.0},
        "outcomes": {"test": "ok"},
        "num_tokens": 4,
        "finish_reason": "stop",
        "versions": [[3, 0]],
    }
    assert (second["reward"], second["outcomes"]) == (None, {"test": "none"})


def test_the_tail_is_the_newest_samples_oldest_first(tmp_path: Path) -> None:
    records = recorder(tmp_path)
    # Long columns, so that the tail spans several of the blocks in which the file is read.
    for ordinal in range(40):
        records.samples(ordinal, [make_scored(make_prompt(ordinal, columns={"long": "é" * 5000}), [1.0, 0.0])])
    assert [sample["step"] for sample in tail_samples(tmp_path, 30)] == list(range(10, 40))
    assert len(tail_samples(tmp_path, 1000)) == 40
    assert tail_samples(tmp_path, 0) == []
    assert find_sample(tmp_path, "00000001") is not None


def test_the_newest_sample_of_a_group_is_found(tmp_path: Path) -> None:
    records = recorder(tmp_path)
    records.samples(1, [make_scored(make_prompt(0), [0.0, 0.0])])
    records.samples(9, [make_scored(make_prompt(0), [1.0, 1.0])])
    sample = find_sample(tmp_path, "00000000")
    assert sample is not None
    assert sample["step"] == 9


def test_a_run_without_records_is_empty_not_an_error(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    assert tail_samples(tmp_path, 5) == []
    assert find_sample(tmp_path, "x") is None
    assert plot_curve(tmp_path, tmp_path / "curve.png") is None


def test_text_that_is_no_unicode_is_still_recorded(tmp_path: Path) -> None:
    recorder(tmp_path).samples(1, [make_scored(make_prompt(0, columns={"odd": "\ud800"}), [0.0, 0.0])])
    assert len(tail_samples(tmp_path, 1)) == 1


def test_columns_that_json_cannot_say_become_null(tmp_path: Path) -> None:
    columns: dict[str, Json] = {"a": float("nan"), "b": [{"c": float("inf")}]}
    recorder(tmp_path).samples(1, [make_scored(make_prompt(0, columns=columns), [0.0, 0.0])])
    assert tail_samples(tmp_path, 1)[0]["columns"] == {"a": None, "b": [{"c": None}]}


def test_a_full_disk_is_logged_once_counted_and_survived(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    records = recorder(tmp_path)
    with capture_logs() as logs:
        for step in range(3):
            records.metrics(step, {"reward_mean": 0.1})
        records.samples(1, [make_scored(make_prompt(0), [0.0, 0.0])])
    assert [entry["event"] for entry in logs] == ["record_not_written"]
    assert "No space left" in logs[0]["error"]
    assert records.num_lost == 3
    assert len(tail_samples(tmp_path, 5)) == 1
    (tmp_path / "metrics.jsonl").unlink()
    records.metrics(4, {"reward_mean": 0.1})
    assert [step["step"] for step in read_metrics(tmp_path)] == [4]


def test_the_legend_says_how_each_reward_was_sampled() -> None:
    assert (how_sampled(0.0), how_sampled(0.7)) == ("greedy", "sampled at temperature 0.7")


def test_the_learning_curve_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = recorder(tmp_path)
    for step in range(10):
        records.metrics(step, {"reward_mean": step / 10, "staleness_mean": 1.0, "staleness_max": 2.0})
    records.metrics(9, {"eval_reward": 0.9})
    picture = plot_curve(tmp_path, tmp_path / "deep" / "curve.png")
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_dropped_group_is_named_with_the_reason(tmp_path: Path) -> None:
    recorder(tmp_path).dropped(7, ["00000001", "00000002"], "unscored")
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [(line["step"], line["group_id"], line["reason"]) for line in lines] == [
        (7, "00000001", "unscored"),
        (7, "00000002", "unscored"),
    ]
