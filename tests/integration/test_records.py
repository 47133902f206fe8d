"""What a run writes into metrics.jsonl is what the documentation says it writes."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.records.fields import FIELDS, render_table
from tests.integration.harness import running
from tests.tiny import make_tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def _settings(directory: Path) -> list[str]:
    make_tiny_model(directory / "model")
    (directory / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "hello"}\n')
    data = json.dumps(str(directory / "prompts.jsonl"))
    return [
        f"model.path={json.dumps(str(directory / 'model'))}",
        f"data.path={data}",
        f"data.eval_path={data}",
        "generation.group_size=4",
        "generation.max_tokens=8",
        "generation.num_threads=1",
        "scoring.rewards=[{function='tests.integration.rewards:vowels'}]",
        "scoring.num_processes=1",
        "trainer.max_steps=2",
        "trainer.groups_per_step=2",
        "trainer.num_threads=1",
        "checkpoint.every_steps=0",
        "worker.heartbeat_s=0.3",
        "worker.log_format='json'",
    ]


async def test_every_field_of_a_record_is_described_and_every_description_has_a_field(
    tmp_path: Path, valkey_url: str, run_name: str
) -> None:
    async with running(tmp_path, valkey_url, run_name, *_settings(tmp_path)) as run:
        assert await run.until_exit(run.start_all(), deadline_s=100) == [0]
        written = set[str]().union(*run.metrics)
    assert written <= {field.name for field in FIELDS}
    assert written >= {field.name for field in FIELDS if not field.is_occasional}


def test_the_table_in_the_documentation_is_the_one_in_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert render_table() in text, "put there what `python -m pipeline.records.fields` prints"
