"""Which rank a process is, and what is said where that cannot be."""

from __future__ import annotations

import pytest
import torch

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.ranks import world
from pipeline.ranks.place import Place, check_settings, place_of
from pipeline.ranks.world import World, device_of

TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_a_process_that_nobody_counts_is_alone() -> None:
    for environ in ({}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "1"}, {"RANK": "3"}):
        assert place_of(environ) == Place()
    assert Place().leads


def test_torchrun_says_which_one_it_is() -> None:
    place = place_of(TORCHRUN)
    assert (place.rank, place.size, place.local_rank, place.leads) == (3, 4, 1, False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": ""}, "WORLD_SIZE = 4, but RANK not set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT not set: start it with `torchrun"),
        ({"RANK": "4"}, "RANK = 4 and LOCAL_RANK = 1 do not fit"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE = 'many' is no number"),
    ],
)
def test_variables_that_make_no_sense_are_named(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_of(TORCHRUN | changed)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"generation": {"engine": "scripted"}}, 'generation.engine = "scripted" has no model that 4 ranks'),
        ({"run": {"topology": "colocated"}}, 'set trainer.parallel = "ddp"'),
    ],
)
def test_what_ranks_cannot_do_is_refused(sections: dict[str, dict[str, str]], message: str) -> None:
    config = Config.model_validate(sections)
    with pytest.raises(ConfigError, match=message):
        check_settings(config, place_of(TORCHRUN))
    check_settings(config, Place())
    with pytest.raises(ConfigError):
        check_settings(Config.model_validate(sections | {"trainer": {"num_ranks": 4}}), Place())


def test_ranks_need_a_torch_that_lets_them_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    settings = Config.model_validate({"trainer": {"device": "cpu"}}).trainer
    with pytest.raises(ConfigError, match=r"needs torch\.distributed with Gloo, which torch"):
        World.join(Place(rank=1, size=2), settings)


def test_each_rank_has_a_gpu_of_its_own_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(Place(rank=5, size=8, local_rank=1), "auto") == torch.device("cuda:1")
    assert device_of(Place(rank=5, size=8, local_rank=1), "cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"trainer\.device = 'cuda:1' is one GPU, and the trainer has 8 ranks"):
        device_of(Place(rank=5, size=8, local_rank=1), "cuda:1")
    with pytest.raises(ConfigError, match="rank 2 of the trainer has no GPU: torch sees 2, and this is number 3"):
        device_of(Place(rank=2, size=4, local_rank=2), "auto")
    assert world.World.alone().is_alone
