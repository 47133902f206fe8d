"""The learner without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import Config
from pipeline.errors import MessageError
from pipeline.learner import ScriptedLearner, load_learner
from tests.learning.builders import Row, make_group

CONFIG = Config.model_validate({"generation": {"engine": "scripted"}, "trainer": {"scripted_step_s": 0.5}})


def test_step_takes_its_time_and_reports_on_the_groups() -> None:
    waited: list[float] = []
    learner = ScriptedLearner(CONFIG.trainer, CONFIG.staleness, sleep=waited.append)
    rows = [Row(token_ids=[4, 4], reward=1.0), Row(token_ids=[4, 4, 4, 4], reward=None)]

    metrics = learner.step([make_group(rows, ordinal=1), make_group(rows, ordinal=0)], trainer_version=3)

    assert waited == [0.5]
    assert metrics["tokens"] == 12
    assert metrics["staleness_mean"] == metrics["staleness_max"] == 3
    assert metrics["corrected_tokens"] == 12
    assert (metrics["reward_mean"], metrics["completion_length_mean"]) == (1.0, 3.0)
    assert (metrics["unscored_completions"], metrics["zero_variance_groups"]) == (2, 2)


def test_token_from_the_future_is_an_error_here_too() -> None:
    learner = ScriptedLearner(CONFIG.trainer, CONFIG.staleness)

    with pytest.raises(MessageError):
        learner.step([make_group([Row(token_ids=[4], spans=((2, 0),))])], trainer_version=1)


def test_weights_hold_the_version_and_state_goes_round(tmp_path: Path) -> None:
    learner = load_learner(CONFIG)
    state = learner.export_weights(41)

    again = load_learner(CONFIG)
    again.load_state_dict(learner.state_dict())
    again.save_model(tmp_path / "model")

    assert np.frombuffer(state.tensors["version"].data, dtype="<i8").tolist() == [41]
    assert state.weight_version == 41
    assert again.state_dict() == learner.state_dict()
    assert list((tmp_path / "model").iterdir())


def test_nothing_of_it_imports_torch() -> None:
    program = (
        "import sys\n"
        "from pipeline.config import Config\n"
        "from pipeline.learner import load_learner\n"
        "import pipeline.filters, pipeline.staleness\n"
        "load_learner(Config.model_validate({'generation': {'engine': 'scripted'}}))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=280)
