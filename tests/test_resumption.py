"""What the directory of a run says before a server is asked: the checkpoint to go on from, or that all is done."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError, RunConflictError
from pipeline.learner.scripted import ScriptedLearner
from pipeline.run.resumption import already_over, checkpoint_to_go_on_from, run_checkpoints
from pipeline.settings.files import fingerprint, load_config
from tests.conftest import Answer


def config_of(tmp_path: Path, *overrides: str) -> Config:
    words = ["run.name=there", f"run.dir='{tmp_path}'", "generation.engine=scripted", "trainer.max_steps=5"]
    return load_config([], environ={}, overrides=[*words, *overrides])


def leave(
    config: Config, *, step: int, cursor: int = 40, ended: str | None = "it has ended", without: str = ""
) -> None:
    """What a run of these settings has left at its end. without: a setting that it did not know."""
    learner = ScriptedLearner(config.trainer, config.staleness)
    settings = {name: value for name, value in fingerprint(config).items() if name != without}
    state = {"step": step, "version": step, "cursor": cursor, "committed": [], "settings": settings}
    run_checkpoints(config).save(step, learner=learner, state=state)
    (config.run_dir / "run.json").write_text(json.dumps({"run": "there", "run_id": "abc", "ended": ended}))


def ending_of(config: Config) -> str | None:
    ending = already_over(config, checkpoint_to_go_on_from(config))
    return None if ending is None else ending.reason


def test_a_run_that_was_never_started_begins_at_the_beginning(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert checkpoint_to_go_on_from(config) is None
    assert already_over(config, None) is None
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_other_settings_is_refused_with_every_way_out(tmp_path: Path) -> None:
    leave(config_of(tmp_path), step=3)
    with pytest.raises(RunConflictError) as caught:
        checkpoint_to_go_on_from(config_of(tmp_path, "generation.group_size=2", "lora.rank=4"))
    said = str(caught.value)
    assert "step_000003 was written with other settings: lora.rank = 4 here, 0 there; generation.group_size = 2" in said
    assert f"`rollstream reset --run there --with-records`, which moves {tmp_path / 'there'} aside" in said
    assert 'checkpoint.resume = "never"' in said
    assert checkpoint_to_go_on_from(config_of(tmp_path, "lora.rank=4", "checkpoint.resume=never")) is None


def test_teachers_and_judges_stay_those_of_the_run_under_any_address(tmp_path: Path) -> None:
    teacher, column = "{name='big',model='models/b',url='http://%s'}", "scoring.teacher_column=by"
    judge = "scoring.judges=[{model='fair',weight=0.5}]"
    leave(config_of(tmp_path, f"scoring.teachers=[{teacher % 'a'}]", column, judge), step=3)
    assert checkpoint_to_go_on_from(config_of(tmp_path, f"scoring.teachers=[{teacher % 'b'}]", column, judge))
    other = "scoring.teachers=[{model='b'}]"
    for settings, said in {
        (judge,): 'scoring.teacher_column = "" here, "by" there; scoring.teachers = none here, big (b) there',
        (other, column): "scoring.teachers = b here, big (b) there; scoring.judges = none here, 0.5 x fair there",
    }.items():
        with pytest.raises(RunConflictError, match=re.escape(said)):
            checkpoint_to_go_on_from(config_of(tmp_path, *settings))


def test_a_checkpoint_from_before_a_setting_was_there_is_gone_on_from_where_that_is_not_used(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    leave(config, step=3, without="scoring.teachers")
    assert checkpoint_to_go_on_from(config) is not None
    with pytest.raises(RunConflictError, match=r"scoring.teachers = m here, none there"):
        checkpoint_to_go_on_from(config_of(tmp_path, "scoring.teachers=[{model='m'}]"))


def test_a_checkpoint_of_another_run_is_refused_without_touching_this_one(tmp_path: Path) -> None:
    other = config_of(tmp_path / "other")
    leave(other, step=3)
    place = run_checkpoints(other).list()[0].path
    fitting = config_of(tmp_path, f"checkpoint.resume='{place}'")
    found = checkpoint_to_go_on_from(fitting)
    assert found is not None
    assert found.step == 3
    assert already_over(config_of(tmp_path, "trainer.max_steps=2", f"checkpoint.resume='{place}'"), found) is None
    with pytest.raises(RunConflictError, match="or take another checkpoint with"):
        checkpoint_to_go_on_from(config_of(tmp_path, "lora.rank=4", f"checkpoint.resume='{place}'"))
    with pytest.raises(ConfigError, match="nowhere"):
        checkpoint_to_go_on_from(config_of(tmp_path, "checkpoint.resume=nowhere"))


@pytest.mark.parametrize("damage", ["cut off", "gone", "not mounted"])
def test_a_damaged_checkpoint_is_not_passed_over_in_silence(tmp_path: Path, damage: str) -> None:
    config = config_of(tmp_path)
    for step in (3, 5):
        leave(config, step=step)
    older, newest = (item.path for item in run_checkpoints(config).list())
    match damage:
        case "cut off":
            (newest / "state.json").write_text("{}")
        case "gone":
            (newest / "COMPLETE").unlink()
        case "not mounted":
            newest.rename(tmp_path / "elsewhere")
            newest.symlink_to(tmp_path / "a disk that is away")
    with pytest.raises(ConfigError, match=f"{newest} is no complete checkpoint.*move it away to go on from {older};"):
        checkpoint_to_go_on_from(config)
    assert checkpoint_to_go_on_from(config_of(tmp_path, "checkpoint.resume=never")) is None
    newest.rename(tmp_path / "away")
    found = checkpoint_to_go_on_from(config)
    assert found is not None
    assert found.path == older
    (newest.parent / "step_000002").mkdir()
    assert checkpoint_to_go_on_from(config) == found, "an older one is of no importance"


def test_a_run_is_over_when_its_steps_are_done_and_its_end_was_said(tmp_path: Path) -> None:
    leave(config_of(tmp_path), step=5)
    assert ending_of(config_of(tmp_path)) == "all 5 steps are done"
    assert ending_of(config_of(tmp_path, "trainer.max_steps=3")) == "all 5 steps are done"
    assert ending_of(config_of(tmp_path, "trainer.max_steps=6")) is None
    assert ending_of(config_of(tmp_path, "checkpoint.resume=never")) is None
    leave(config_of(tmp_path), step=5, ended=None)
    assert ending_of(config_of(tmp_path)) is None, "the evaluation of its end may be missing"


def test_a_run_whose_data_has_ended_is_over_until_there_are_more_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n' * 20)
    config = config_of(tmp_path, f"data.path='{rows}'", "data.epochs=2", "trainer.max_steps=0")
    leave(config, step=5, cursor=40)
    assert ending_of(config) == "the data has ended"
    rows.write_text('{"prompt": "a"}\n' * 21)
    assert ending_of(config) is None


def test_reset_leaves_the_directory_and_says_what_that_means(ask, tmp_path: Path, run_name: str) -> None:
    run_dir = tmp_path / "runs" / run_name
    assert "there is no directory of it" in ask("reset", "--yes").out
    run_dir.mkdir(parents=True)
    assert ask("reset", "--yes").out.rstrip().endswith(f"its directory runs/{run_name} stays")
    leave(config_of(run_dir.parent, f"run.name={run_name}"), step=5)
    said = ask("reset", "--yes").out
    assert f"started again, the run goes on from runs/{run_name}/checkpoints/step_000005" in said
    assert f"`rollstream reset --run {run_name} --with-records` moves runs/{run_name} aside" in said


def test_reset_with_records_gives_the_directory_another_name(ask, tmp_path: Path, run_name: str) -> None:
    for name in ("old", "old-2"):
        run_dir = tmp_path / "runs" / run_name
        run_dir.mkdir(parents=True)
        (run_dir / "metrics.jsonl").write_text(name)
        answer = ask("reset", "--yes", "--with-records")
        assert (answer.code, answer.err) == (0, "")
        assert f"its directory runs/{run_name} is now runs/{run_name}.{name}" in answer.out
        assert not run_dir.exists()
        assert (tmp_path / "runs" / f"{run_name}.{name}" / "metrics.jsonl").read_text() == name


@pytest.mark.parametrize("typed", ["", "n\n"], ids=["nobody", "no"])
def test_reset_without_a_yes_says_that_nothing_was_removed(
    ask, typed: str, tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "runs" / run_name
    run_dir.mkdir(parents=True)
    answer = asked_with(ask, typed, monkeypatch)
    assert answer.code == 2
    assert f"move runs/{run_name} aside?" in answer.out
    assert answer.err == "error: nothing was removed; with --yes nobody is asked\n"
    assert run_dir.exists()


def test_reset_does_what_was_said_yes_to(ask, tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / run_name).mkdir(parents=True)
    answer = asked_with(ask, "y\n", monkeypatch)
    assert (answer.code, answer.err) == (0, "")
    assert (tmp_path / "runs" / f"{run_name}.old").exists()


def asked_with(ask, typed: str, monkeypatch: pytest.MonkeyPatch) -> Answer:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    answer: Answer = ask("reset", "--with-records")
    return answer
