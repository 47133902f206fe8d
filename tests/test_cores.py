"""Dividing a machine among workers."""

from __future__ import annotations

from pathlib import Path

from pipeline.local.cores import available_cores, gpu_environ, thread_environ, visible_gpus


def test_there_is_at_least_one_core() -> None:
    assert available_cores() >= 1


def test_a_worker_gets_at_least_one_thread() -> None:
    assert thread_environ(0, {})["OMP_NUM_THREADS"] == "1"
    assert set(thread_environ(3, {}).values()) == {"3"}


def test_threads_that_the_user_has_chosen_stay() -> None:
    assert thread_environ(3, {"OMP_NUM_THREADS": "7"}) == {}


def test_gpus_are_those_the_user_allows(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "2", "10"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,4"}, tmp_path) == ["3", "4"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_the_trainer_has_a_gpu_of_its_own_and_generators_share_the_others() -> None:
    gpus = ["0", "1", "2"]
    assert [gpu_environ(gpus, index, 3)["CUDA_VISIBLE_DEVICES"] for index in range(4)] == ["0", "1", "0", "2"]


def test_each_rank_of_the_trainer_has_a_gpu_of_its_own() -> None:
    gpus = ["0", "1", "2", "3"]
    chosen = [gpu_environ(gpus, index, 3, 2)["CUDA_VISIBLE_DEVICES"] for index in range(4)]
    assert chosen == ["0", "1", "0", "2,3"]
    assert gpu_environ(gpus, 3, 3, 4) == {}


def test_one_gpu_is_shared_by_all() -> None:
    assert gpu_environ(["0"], 0, 1) == {}
