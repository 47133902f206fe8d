"""What the user got wrong ends a worker with exit code 2 and one line that names it and the way out."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.harness import SCRIPTED, running
from tests.tiny import make_tiny_model

ROWS = ('{"prompt": "first"}\n', '{"prompt": "second"}\n')


def complaint(output: str) -> str:
    """The one line in which a worker says what is wrong."""
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in output
    return line


def data_file(directory: Path, *rows: str) -> str:
    """A setting that names a file with these rows."""
    path = directory / "prompts.jsonl"
    path.write_text("".join(rows))
    return f"data.path={json.dumps(str(path))}"


@pytest.mark.parametrize(
    ("role", "setting", "said"),
    [
        ("trainer", "trainer.max_stepps=3", ("trainer.max_stepps", "did you mean trainer.max_steps?")),
        ("generator", "generation.group_size='many'", ("generation.group_size", "many")),
        ("trainer", "data.path='nowhere.jsonl'", ("nowhere.jsonl", "no such file")),
        ("trainer", "data.max_prompt_tokens=3", ("every prompt is longer than 3 tokens", "data.max_prompt_tokens")),
        ("trainer", "model.max_context=32", ("generation.max_tokens = 64", "32 tokens", "model.max_context")),
        ("trainer", "weights.host='0.0.0.0'", ("weights.host", "weights.insecure")),
        ("scorer", "scoring.rewards=[{function='nowhere:nothing'}]", ("scoring.rewards", "nowhere")),
        (
            "scorer",
            "scoring.rewards=[{function='tests.integration.rewards:Sequence'}]",
            ("scoring.rewards", "Sequence"),
        ),
        ("scorer", "scoring.rewards=[]", ("scoring.rewards",)),
        ("scorer", "redis.url='embedded'", ("redis.url", "rollstream up")),
    ],
    ids=lambda value: value.partition("=")[0] if isinstance(value, str) else "",
)
async def test_a_wrong_setting_is_named(
    role: str, setting: str, said: Sequence[str], tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED) as run:
        worker = run.start(role, setting, may_fail=True)
        assert await run.until_exit(worker) == [2], worker.output
        line = complaint(worker.output)
        assert all(words in line for words in said), line


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((ROWS[0], '{"prompt": \n'), ("prompts.jsonl", "2")),
        ((ROWS[0], '{"text": "second"}\n'), ("prompts.jsonl", "2", "data.prompt_column", "text")),
        ((ROWS[0], '{"prompt": 3}\n'), ("prompts.jsonl", "2")),
        ((ROWS[0], '{"prompt": ""}\n'), ("prompts.jsonl", "2")),
        ((), ("prompts.jsonl",)),
    ],
    ids=["broken row", "missing column", "prompt of the wrong type", "empty prompt", "empty file"],
)
async def test_a_bad_row_is_named_with_its_file(
    rows: Sequence[str], said: Sequence[str], tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, data_file(tmp_path, *rows)) as run:
        trainer = run.start("trainer", may_fail=True)
        assert await run.until_exit(trainer) == [2], trainer.output
        line = complaint(trainer.output)
        assert all(words in line for words in said), line
        assert (await run.ledger()).fed == 0


@pytest.mark.parametrize(
    ("role", "setting"),
    [("generator", "worker.port"), ("exporter", "exporter.port"), ("trainer", "weights.port")],
)
async def test_a_port_in_use_is_named(role: str, setting: str, tmp_path: Path, valkey_url: str, run_name: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        async with running(tmp_path, valkey_url, run_name, *SCRIPTED) as run:
            worker = run.start(role, f"{setting}={port}", may_fail=True)
            assert await run.until_exit(worker) == [2], worker.output
            assert f"{setting} = {port}" in complaint(worker.output)


async def test_a_model_directory_without_weights_is_named(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    make_tiny_model(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    model = f"model.path={json.dumps(str(tmp_path / 'model'))}"
    settings = (model, data_file(tmp_path, *ROWS), "generation.engine='transformers'")
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        trainer = run.start("trainer", may_fail=True)
        assert await run.until_exit(trainer) == [2]
        line = complaint(trainer.output)
        assert "model.path" in line
        assert "weights" in line


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("one_number", "one_number returned float; expected a list, with a number or None for each of the 4 "),
        ("one_value", "one_value returned 1 values for 4 completions"),
        ("needs_answers", "needs_answers needs the data column 'answer'; the data set has: level"),
    ],
)
async def test_a_reward_that_no_group_can_satisfy_ends_its_scorer(
    function: str, said: str, tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    """Also where evaluation comes first, whose groups of one completion make a list of one value look right."""
    settings = (
        f"scoring.rewards=[{{function='tests.integration.rewards:{function}'}}]",
        data_file(tmp_path, '{"prompt": "first", "level": 1}\n'),
        data_file(tmp_path, '{"prompt": "first", "level": 1}\n').replace("data.path", "data.eval_path"),
    )
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, *settings) as run:
        run.start("generator")
        scorer = run.start("scorer", may_fail=True)
        run.start("trainer")
        assert await run.until_exit(scorer) == [2]
        assert f"scoring.rewards: {said}" in complaint(scorer.output)
        assert (await run.ledger()).trained == 0
