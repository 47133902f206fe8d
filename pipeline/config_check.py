"""Whether everything that the settings name is really there, without starting anything.

In: a `Config`. Out: nothing, or one ConfigError with a line for each problem. Services are not
asked; `rollstream doctor` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import ConfigError, UsageError


def check(config: Config) -> None:
    """Files, reward functions, algorithm, prompts and model. Raises ConfigError."""
    problems: list[str] = []
    for examine in (_engine, _keys, _rewards, _algorithm, _model, _data, _prompts):
        problems += _complaints(examine, config)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _complaints(examine: Callable[[Config], None], config: Config) -> list[str]:
    try:
        examine(config)
    except UsageError as error:
        return str(error).splitlines()
    return []


def _engine(config: Config) -> None:
    if config.generation.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            'generation.engine = "vllm": vLLM is not installed; pip install "rollstream[vllm]", '
            'or set generation.engine = "transformers"'
        )


def _keys(config: Config) -> None:
    file = config.weights.server_secret_key_file
    if file and not Path(file).is_file():
        raise ConfigError(f"weights.server_secret_key_file = {file!r}: there is no such file")


def _rewards(config: Config) -> None:
    from pipeline.rewards import load_rewards

    if not config.scoring.rewards:
        raise ConfigError("scoring.rewards is empty: name at least one reward function in a [[scoring.rewards]] table")
    load_rewards(config.scoring.rewards)


def _algorithm(config: Config) -> None:
    from pipeline.algorithms import resolve_algorithm

    resolve_algorithm(config.algorithm)


def _model(config: Config) -> None:
    if config.generation.engine == "scripted":
        return
    from pipeline.models import check_model_files

    check_model_files(config.model)
    if config.generation.replay_routing:
        from pipeline.models import load_config
        from pipeline.routing import check_model_type

        check_model_type(load_config(config.model).get_text_config(decoder=True).model_type)


def _data(config: Config) -> None:
    from pipeline.prompts import Dataset

    data = config.data
    named = [(data.path, data.split), (data.eval_path, data.eval_split)]
    for path, split in named:
        if path:
            Dataset.load(path, split, data)


def _prompts(config: Config) -> None:
    from pipeline.run_data import load_run_data

    load_run_data(config)
