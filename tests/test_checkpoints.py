"""Checkpoints: whole or absent, whatever happens while one is written or deleted."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from pipeline.checkpoints import Checkpoints
from pipeline.config import CheckpointSettings
from pipeline.disk import write_whole
from pipeline.errors import CheckpointError, DiskFullError, TrainerReplacedError
from pipeline.messages import Json


class CountingLearner:
    """A learner whose whole state is one tensor; `problem` is raised while its model is written."""

    def __init__(self, value: float = 0.0, problem: Exception | None = None) -> None:
        self.weights = torch.full((4,), value)
        self.problem = problem

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "schedule": {"step": 3, "betas": (0.9, 0.95)}, "rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]

    def save_model(self, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "shard").mkdir()
        (directory / "shard" / "model.safetensors").write_bytes(self.weights.numpy().tobytes())
        if self.problem is not None:
            raise self.problem


def checkpoints(tmp_path: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", CheckpointSettings(keep=keep), clock=lambda: 1000.0)


def steps(tmp_path: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints(tmp_path).list()]


def test_a_checkpoint_brings_learner_and_state_back(tmp_path: Path) -> None:
    state: dict[str, Json] = {"cursor": 3, "version": 50, "ids": ["a"]}
    path = checkpoints(tmp_path).save(50, learner=CountingLearner(7.0), state=state)
    assert path == tmp_path / "checkpoints" / "step_000050"
    assert sorted(entry.name for entry in path.iterdir()) == ["COMPLETE", "model", "optimizer.pt", "state.json"]
    latest = checkpoints(tmp_path).latest()
    assert latest is not None
    assert (latest.step, latest.path, latest.saved_at) == (50, path, 1000.0)
    assert latest.state == state
    learner = CountingLearner()
    latest.restore(learner)
    assert torch.equal(learner.weights, torch.full((4,), 7.0))
    assert (latest.model_dir / "config.json").exists()
    assert (
        latest.num_bytes
        == sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) - (path / "COMPLETE").stat().st_size
    )


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        checkpoints(tmp_path, keep=2).save(step, learner=CountingLearner(), state={})
    assert steps(tmp_path) == [30, 40]
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["step_000030", "step_000040"]


def test_the_newest_is_the_one_written_last_not_the_one_with_the_highest_step(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(500, learner=CountingLearner(), state={})
    checkpoints(tmp_path, keep=1).save(10, learner=CountingLearner(), state={})
    latest = checkpoints(tmp_path).latest()
    assert latest is not None
    assert latest.step == 10
    assert steps(tmp_path) == [10]


def test_a_step_that_is_saved_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        checkpoints(tmp_path).save(10, learner=CountingLearner(value), state={"value": value})
    (only,) = checkpoints(tmp_path).list()
    assert only.state == {"value": 2.0}
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step_000010"]


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).latest() is None
    (tmp_path / "checkpoints").mkdir()
    assert checkpoints(tmp_path).list() == []


@pytest.mark.parametrize("missing", ["COMPLETE", "optimizer.pt", "state.json", "model/shard/model.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_not_found(tmp_path: Path, missing: str) -> None:
    checkpoints(tmp_path).save(10, learner=CountingLearner(), state={})
    path = checkpoints(tmp_path).save(20, learner=CountingLearner(), state={})
    (path / missing).unlink()
    assert steps(tmp_path) == [10]


def test_a_checkpoint_with_a_file_cut_short_is_not_found(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(10, learner=CountingLearner(), state={})
    path = checkpoints(tmp_path).save(20, learner=CountingLearner(), state={})
    os.truncate(path / "optimizer.pt", 10)
    assert steps(tmp_path) == [10]


@pytest.mark.parametrize("marker", ["", "[]", "{}", '{"files": {"state.json": 2}}', '{"files": 3}'])
def test_a_marker_that_makes_no_sense_is_no_checkpoint(tmp_path: Path, marker: str) -> None:
    path = checkpoints(tmp_path).save(10, learner=CountingLearner(), state={})
    (path / "COMPLETE").write_text(marker)
    assert steps(tmp_path) == []


def test_what_a_crash_left_is_neither_found_nor_in_the_way_and_is_cleared(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    path = checkpoints(tmp_path).save(10, learner=CountingLearner(), state={})
    shutil.copytree(path, directory / ".writing-step_000020")
    shutil.copytree(path, directory / ".deleting-step_000005")
    (directory / "step_000030").mkdir()
    assert steps(tmp_path) == [10]
    checkpoints(tmp_path).save(20, learner=CountingLearner(), state={})
    checkpoints(tmp_path).save(30, learner=CountingLearner(), state={})
    assert steps(tmp_path) == [20, 30]
    assert sorted(entry.name for entry in directory.iterdir()) == ["step_000020", "step_000030"]


def test_a_crash_between_the_two_renames_of_a_replacement_leaves_the_old_one(tmp_path: Path) -> None:
    path = checkpoints(tmp_path).save(10, learner=CountingLearner(), state={"value": 1})
    path.rename(path.parent / ".replaced-step_000010")
    (old,) = checkpoints(tmp_path).list()
    assert old.state == {"value": 1}
    checkpoints(tmp_path, keep=1).save(20, learner=CountingLearner(), state={"value": 2})
    assert steps(tmp_path) == [20]


def test_a_failure_while_writing_leaves_the_older_checkpoint_and_no_rest(tmp_path: Path) -> None:
    checkpoints(tmp_path, keep=1).save(10, learner=CountingLearner(), state={})
    with pytest.raises(CheckpointError, match=r"step 20 .* the model is stuck. The checkpoint of step 10 is intact."):
        checkpoints(tmp_path, keep=1).save(
            20, learner=CountingLearner(problem=RuntimeError("the model is stuck")), state={}
        )
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step_000010"]


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_says_so_and_what_to_do(tmp_path: Path, problem: Exception) -> None:
    with pytest.raises(DiskFullError, match=r"no space left .* lower checkpoint.keep. There is no older checkpoint."):
        checkpoints(tmp_path).save(20, learner=CountingLearner(problem=problem), state={})
    checkpoints(tmp_path).save(30, learner=CountingLearner(), state={})
    assert steps(tmp_path) == [30]


def test_a_state_that_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class Odd(CountingLearner):
        def state_dict(self) -> dict[str, Any]:
            return {"schedule": [object()]}

    with pytest.raises(TypeError, match=r"state_dict\['schedule'\]\[0\] is object"):
        checkpoints(tmp_path).save(10, learner=Odd(), state={})
    assert steps(tmp_path) == []


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
            return os.system, (f"touch {tmp_path}/ran",)

    path = checkpoints(tmp_path).save(10, learner=CountingLearner(), state={})
    evil = pickle.dumps(Runs(), protocol=2)
    (path / "optimizer.pt").write_bytes(evil)
    marker = json.loads((path / "COMPLETE").read_text())
    marker["files"]["optimizer.pt"] = len(evil)
    (path / "COMPLETE").write_text(json.dumps(marker))
    latest = checkpoints(tmp_path).latest()
    assert latest is not None
    with pytest.raises(CheckpointError, match="cannot be read"):
        latest.learner_state()
    assert not (tmp_path / "ran").exists()


KILLED_WHILE_SAVING = """
import os, sys
from pathlib import Path
from tests.test_checkpoints import CountingLearner, checkpoints

class Killed(CountingLearner):
    def save_model(self, directory):
        super().save_model(directory)
        os.kill(os.getpid(), {signal})

checkpoints(Path(sys.argv[1])).save(10, learner=CountingLearner(1.0), state={{}})
checkpoints(Path(sys.argv[1])).save(20, learner=Killed(2.0), state={{}})
"""


def test_a_trainer_killed_while_it_saves_resumes_from_the_checkpoint_before(tmp_path: Path) -> None:
    code = KILLED_WHILE_SAVING.format(signal=int(signal.SIGKILL))
    root = Path(__file__).parents[1]
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    latest = checkpoints(tmp_path).latest()
    assert latest is not None
    assert latest.step == 10
    assert torch.equal(latest.learner_state()["weights"], torch.ones(4))


def test_listing_checkpoints_does_not_import_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from pipeline.checkpoints import Checkpoints; "
        "from pipeline.config import CheckpointSettings; Checkpoints(Path('none'), CheckpointSettings()).list(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_state_without_tensors_needs_no_torch(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from pipeline.checkpoints import Checkpoints
from pipeline.config import CheckpointSettings, StalenessSettings, TrainerSettings
from pipeline.learner import ScriptedLearner

checkpoints = Checkpoints(Path({str(tmp_path)!r}), CheckpointSettings())
learner = ScriptedLearner(TrainerSettings(), StalenessSettings())
checkpoints.save(3, learner=learner, state={{"step": 3}})
latest = checkpoints.latest()
assert latest is not None and latest.learner_state() == {{"num_steps": 0}}
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_trainer_that_was_replaced_while_it_wrote_leaves_nothing(tmp_path: Path) -> None:
    stale, successor = checkpoints(tmp_path), checkpoints(tmp_path)
    stale.take_over()
    stale.save(10, learner=CountingLearner(1.0), state={})

    class Replaced(CountingLearner):
        def save_model(self, directory: Path) -> None:
            super().save_model(directory)
            successor.take_over()

    with pytest.raises(TrainerReplacedError):
        stale.save(20, learner=Replaced(2.0), state={})
    assert steps(tmp_path) == [10]
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["fence.json", "step_000010"]
    successor.save(20, learner=CountingLearner(3.0), state={})
    assert steps(tmp_path) == [10, 20]
    with pytest.raises(TrainerReplacedError):
        stale.save(30, learner=CountingLearner(4.0), state={})


def test_what_a_trainer_completed_after_it_had_been_replaced_does_not_count(tmp_path: Path) -> None:
    stale, successor, third = (checkpoints(tmp_path, keep=10) for _ in range(3))
    stale.take_over()
    stale.save(10, learner=CountingLearner(1.0), state={})
    late = stale.save(20, learner=CountingLearner(2.0), state={})
    late.rename(tmp_path / "not yet")
    successor.take_over()
    (tmp_path / "not yet").rename(late)
    assert steps(tmp_path) == [10]
    successor.save(15, learner=CountingLearner(3.0), state={})
    assert steps(tmp_path) == [10, 15]
    third.take_over()
    assert not late.exists()
    assert steps(tmp_path) == [10, 15]


def test_a_trainer_that_is_replaced_while_it_clears_up_removes_no_checkpoint_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (checkpoints(tmp_path, keep=10) for _ in range(3))
    first.take_over()
    late = first.save(20, learner=CountingLearner(1.0), state={})
    late.rename(tmp_path / "not yet")
    second.take_over()
    second.save(10, learner=CountingLearner(2.0), state={})
    (tmp_path / "not yet").rename(late)

    def write_and_stand_still(path: Path, text: str) -> None:
        write_whole(path, text)
        monkeypatch.undo()
        third.take_over()
        third.save(20, learner=CountingLearner(3.0), state={})

    monkeypatch.setattr("pipeline.checkpoints.fence.write_whole", write_and_stand_still)
    checkpoints(tmp_path, keep=10).take_over()
    assert steps(tmp_path) == [10, 20]
    newest = third.latest()
    assert newest is not None
    assert newest.path == late
    restored = CountingLearner()
    newest.restore(restored)
    assert restored.weights[0] == 3.0


def test_a_spoilt_byte_is_found_by_the_hash_and_named(tmp_path: Path) -> None:
    path = checkpoints(tmp_path).save(10, learner=CountingLearner(1.0), state={})
    whole = checkpoints(tmp_path).find("latest")
    assert whole.verify() == 4
    spoilt = path / "model" / "shard" / "model.safetensors"
    content = bytearray(spoilt.read_bytes())
    content[3] ^= 1
    spoilt.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors is not what was written .* Move .* away"):
        checkpoints(tmp_path).find("10").verify()


def test_a_checkpoint_is_found_by_step_or_directory_and_others_are_named(tmp_path: Path) -> None:
    path = checkpoints(tmp_path).save(10, learner=CountingLearner(), state={})
    there = checkpoints(tmp_path)
    assert [there.find(place).step for place in ("10", "latest", str(path))] == [10, 10, 10]
    with pytest.raises(CheckpointError, match=r"11 is no complete checkpoint; .* has those of steps: 10"):
        there.find("11")


def test_a_place_where_no_checkpoint_can_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, where a folder is to be made")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written: .*File exists"):
        checkpoints(tmp_path).take_over()


def test_a_trainer_that_stood_still_before_its_last_move_puts_nothing_in_the_place_of_its_successors(
    tmp_path: Path,
) -> None:
    class Late(Checkpoints):
        def _put_in_place(self, aside: Path, path: Path) -> Path:
            successor.take_over()
            successor.save(4, learner=CountingLearner(2.0), state={"by": "successor"})
            return super()._put_in_place(aside, path)

    successor = checkpoints(tmp_path)
    stale = Late(tmp_path / "checkpoints", CheckpointSettings())
    stale.take_over()
    with pytest.raises(TrainerReplacedError):
        stale.save(4, learner=CountingLearner(1.0), state={"by": "stale"})
    (found,) = checkpoints(tmp_path).list()
    assert (found.step, found.state) == (4, {"by": "successor"})
    found.verify()
    assert [entry.name for entry in found.path.parent.iterdir() if entry.is_dir()] == ["step_000004"]


def test_a_trainer_that_was_replaced_leaves_alone_what_its_successor_is_writing(tmp_path: Path) -> None:
    class Meanwhile(CountingLearner):
        def save_model(self, directory: Path) -> None:
            super().save_model(directory)
            with pytest.raises(TrainerReplacedError):
                stale.save(4, learner=CountingLearner(1.0), state={"by": "stale"})

    stale, successor = checkpoints(tmp_path), checkpoints(tmp_path)
    stale.take_over()
    successor.take_over()
    successor.save(4, learner=Meanwhile(2.0), state={"by": "successor"})
    (found,) = checkpoints(tmp_path).list()
    assert found.state == {"by": "successor"}
    found.verify()
