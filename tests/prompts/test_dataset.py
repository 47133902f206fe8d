"""Reading data: what comes through unchanged, and what mistakes are called."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import DataSettings
from pipeline.errors import ConfigError, DataError
from pipeline.prompts import Dataset
from pipeline.prompts.values import json_value
from tests.prompts.rows import write

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def load(path: str, **settings: str) -> Dataset:
    return Dataset.load(path, "train", DataSettings.model_validate(settings))


def test_rows_are_prompt_and_columns_and_know_their_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        '\ufeff{"prompt": "one", "answer": "1", "extra": {"deep": [1, null]}}',
        "",
        '{"prompt": [{"role": "user", "content": "two"}], "answer": 2.5}',
    )
    rows = load(path)
    assert [(row.number, row.prompt, row.columns) for row in (rows[0], rows[1])] == [
        (1, "one", {"answer": "1", "extra": {"deep": [1, None]}}),
        (3, [{"role": "user", "content": "two"}], {"answer": 2.5}),
    ]
    assert rows.where(1) == f"{path}, row 3"


def test_the_prompt_column_can_have_another_name(tmp_path: Path) -> None:
    rows = load(write(tmp_path / "a.jsonl", '{"question": "?", "prompt": "kept"}'), prompt_column="question")
    assert (rows[0].prompt, rows[0].columns) == ("?", {"prompt": "kept"})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "not JSON"),
        ("[1, 2]", "a JSON list; each line is one object"),
        ('{"question": "a", "answer": 1}', "no column 'prompt'; there are: answer, question.*data.prompt_column"),
        ("{}", "no column 'prompt'; there are: none"),
        ('{"prompt": ""}', "'prompt' is empty"),
        ('{"prompt": []}', "'prompt' is empty"),
        ('{"prompt": null}', "'prompt' is empty"),
        ('{"prompt": 5}', "'prompt' is a number; give text, or a list of messages"),
        ('{"prompt": false}', "'prompt' is true or false"),
        ('{"prompt": {"role": "user"}}', "'prompt' is an object"),
        ('{"prompt": ["a"]}', "prompt, message 1 is text"),
        ('{"prompt": [{"role": "user", "content": "a"}, {"role": "user"}]}', "message 2 has no 'content'"),
        ('{"prompt": [{"content": "a"}]}', "message 1 has no 'role'"),
        ('{"prompt": [{"role": "user", "content": ["a"]}]}', "message 1: 'content' is a list, expected text"),
        ('{"prompt": "a", "big": 99999999999999999999999}', "column 'big' holds an integer of more than 64 bits"),
        ('{"prompt": "a", "half": "\\ud800"}', "column 'half' holds text that is not valid Unicode"),
        ('{"prompt": "a", "completions": 1}', "a column cannot be called 'completions'"),
        ('{"prompt": "a", "completion_ids": 1}', "a column cannot be called 'completion_ids'"),
        ('{"prompt": "a", "deep": ' + "[" * 600 + "]" * 600 + "}", "column 'deep' is nested too deeply"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_mistake_in_a_row_names_file_row_and_way_out(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path / "bad.jsonl", '{"prompt": "good"}', line)
    with pytest.raises(DataError, match=rf"bad\.jsonl, row 2: .*{problem}"):
        load(path)


def test_bytes_that_are_not_utf8_name_their_row(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"prompt": "a"}\n{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match="row 2: not UTF-8 at byte 12"):
        load(str(file))


def test_a_file_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file; relative paths count from"):
        load(str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match=r"the ending '\.csv' is unknown; use \.jsonl or \.parquet"):
        load(write(tmp_path / "a.csv", "prompt"))
    with pytest.raises(DataError, match="no rows"):
        load(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(DataError, match="looks like name/data"):
        load("./not/a/file")
    with pytest.raises(ConfigError, match=r"data\.path is empty"):
        load("")


def test_a_missing_reader_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    for path in ("some/dataset", "some/dataset:part", str(tmp_path), str(tmp_path / "a.parquet")):
        with pytest.raises(ConfigError, match=r"pip install 'rollstream\[data\]'"):
            load(path)


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "x"}]
    table = pyarrow.table(
        {
            "prompt": [chat, chat[:1]],
            "when": [datetime.date(2024, 5, 1), None],
            "price": [decimal.Decimal("1.50"), decimal.Decimal("2.00")],
            "scores": [[1.0, float("nan")], []],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = load(str(tmp_path / "a.parquet"))
    assert rows[0].prompt == chat
    assert rows[0].columns == {"when": "2024-05-01", "price": "1.50", "scores": [1.0, None]}
    assert (rows[1].number, rows[1].columns["when"]) == (2, None)


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file"):
        load(write(tmp_path / "a.parquet", "PAR1 and nothing else"))


@given(JSON)
def test_json_values_stay_what_they_are(value: object) -> None:
    assert json_value(value) == value


def test_values_from_other_libraries_become_json() -> None:
    converted = json_value(
        {
            "array": np.arange(4).reshape(2, 2),
            "number": np.float32(0.5),
            "flag": np.bool_(True),
            "day": np.datetime64("2024-05-01"),
            "duration": datetime.timedelta(minutes=1),
            "bytes": b"\x00\xff",
            "pair": (1, "a"),
            "infinite": float("inf"),
        }
    )
    assert converted == {
        "array": [[0, 1], [2, 3]],
        "number": 0.5,
        "flag": True,
        "day": "2024-05-01T00:00:00",
        "duration": 60.0,
        "bytes": "AP8=",
        "pair": [1, "a"],
        "infinite": None,
    }


def test_prompts_are_read_without_heavy_libraries(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "a"}')
    program = (
        "import sys; from pipeline.config import DataSettings; from pipeline.prompts import Dataset\n"
        f"Dataset.load({path!r}, 'train', DataSettings())\n"
        "print(*({'torch', 'transformers', 'datasets', 'pyarrow', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=280)
    assert done.stdout.strip() == ""
