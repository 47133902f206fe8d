"""`rollstream config check`: everything that the settings name is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import zmq

from pipeline.checks.config import MAX_ROWS, Report, check, check_quickly
from pipeline.cli import run
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.settings.files import load_config
from tests.tiny import VOCABULARY, make_tiny_model, make_tokenizer

KEY = "a" * 40  # a public key, of a secret that nobody knows


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


@pytest.fixture
def settings(model_dir: Path, tmp_path: Path) -> list[str]:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "ab", "answer": "ba"}) + "\n" for _ in range(3)))
    return [
        f"model.path='{model_dir}'",
        f"data.path='{data}'",
        "generation.max_tokens=8",
        "scoring.rewards=[{function='exact_match'}]",
    ]


def load(settings: list[str], *more: str) -> Config:
    return load_config([], environ={}, overrides=[*settings, *more])


def complaint(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def rows_in(folder: Path, *rows: dict[str, object]) -> str:
    """A setting that names a file with these rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path='{file}'"


def facts(report: Report, subject: str) -> str:
    return "\n".join(text for seen, text in report.facts if seen == subject)


def test_good_settings_pass(settings: list[str]) -> None:
    check(load(settings))


def test_what_was_looked_at_is_said(settings: list[str]) -> None:
    report = check(load(settings, "lora.rank=2"))
    assert "3 rows; columns besides the prompt: answer" in facts(report, "data")
    assert facts(report, "rewards") == "exact_match (weight 1)"
    assert "2 to 2 tokens, up to 120 fit" in facts(report, "prompts")
    assert "context 128 tokens" in facts(report, "model")
    assert "rank 2" in facts(report, "adapter")
    assert "private" in facts(report, "server")
    assert report.warnings == []


@pytest.mark.parametrize(
    ("more", "unread"),
    [
        (["generation.vllm={max_model_len=64}"], "generation.vllm is not read"),
        (["generation.openai.urls=['http://gpu1:8000']"], "generation.openai is not read"),
        (["generation.merge_lora=true"], "lora.rank = 0 trains all weights"),
        (["generation.merge_lora=true", "lora.rank=2"], "generation.merge_lora = true is not read"),
        (
            ["scoring.teachers=[{model='m', url='http://h', top_k=4}]", "algorithm.distillation_coef=0.5"],
            "their top_k ids are sent and not read",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_named(more: list[str], unread: str, settings: list[str]) -> None:
    (warning,) = check(load(settings, *more)).warnings
    assert unread in warning


def test_a_variable_with_one_underscore_too_few_is_named(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_STALENESS_MAX_STALENESS", "4")
    monkeypatch.setenv("ROLLSTREAM_WORKER_PORT", "tcp://10.0.0.1:80")
    (warning,) = check(load(settings)).warnings
    assert "write ROLLSTREAM_STALENESS__MAX_STALENESS" in warning


def test_rewards_are_called_where_that_is_asked_for(settings: list[str]) -> None:
    own = "scoring.rewards=[{function='tests.rewards.samples:num_letters'}, {function='exact_match'}]"
    report = check(load(settings, own, "generation.group_size=3"), calls_rewards=True)
    assert "num_letters gave 7, 7, 7 to made-up completions" in facts(report, "rewards")
    assert "exact_match gave 0, 0, 0" in facts(report, "rewards")


def test_rewards_that_never_give_a_number_are_named(settings: list[str], tmp_path: Path) -> None:
    own = "scoring.rewards=[{function='tests.rewards.samples:judges_tokens'}]"
    rows = rows_in(tmp_path, {"prompt": "ab", "answer": "ba", "what": "steps"})
    with pytest.raises(ConfigError, match="none gave a number for a completion"):
        check(load(settings, own, rows), calls_rewards=True)


def test_a_tokenizer_that_knows_more_than_the_model_is_named(settings: list[str], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    make_tokenizer(model, VOCABULARY + "ABC")
    found = complaint(load(settings, f"model.path='{model}'", rows_in(tmp_path, {"prompt": "aC", "answer": "ba"})))
    assert "its tokenizer makes token" in found
    assert "embeddings for" in found


@pytest.mark.parametrize(
    ("function", "more", "problem"),
    [
        ("raises", "", "KeyError"),
        ("hangs", ", timeout_s=0.3", "took longer than 0.3 s"),
    ],
)
def test_a_reward_that_fails_its_trial_is_named_with_what_it_did(
    function: str, more: str, problem: str, settings: list[str]
) -> None:
    own = f"scoring.rewards=[{{function='tests.rewards.samples:{function}'{more}}}]"
    check(load(settings, own))
    with pytest.raises(ConfigError, match=rf"scoring\.rewards: {function}.*{problem}.*data\.jsonl"):
        check(load(settings, own), calls_rewards=True)


@pytest.mark.parametrize(
    ("function", "lacking"),
    [("tests.rewards.samples:is_right", "answer"), ("tests.rewards.samples:sees", "seen"), ("exact_match", "answer")],
)
def test_a_column_that_a_reward_asks_for_and_the_data_lack_is_named(
    function: str, lacking: str, settings: list[str], tmp_path: Path
) -> None:
    data = rows_in(tmp_path, {"prompt": "ab", "solution": "ba"})
    text = complaint(load(settings, data, f"scoring.rewards=[{{function='{function}'}}]"))
    assert f"'{function}'" in text
    assert "rows.jsonl, row 1" in text
    assert f"'{lacking}'" in text
    assert "solution" in text
    assert "completion_ids" not in text


def test_a_column_that_the_settings_stand_in_for_may_be_lacking(settings: list[str], tmp_path: Path) -> None:
    data = rows_in(tmp_path, {"prompt": "ab"})
    check_quickly(load(settings, data, "scoring.rewards=[{function='tests.rewards.samples:scaled'}]"))


def test_a_reward_of_the_user_is_not_called(settings: list[str]) -> None:
    check_quickly(load(settings, "scoring.rewards=[{function='tests.rewards.samples:dies'}]"))


def test_a_row_that_lacks_what_a_reward_asks_for_is_named(settings: list[str], tmp_path: Path) -> None:
    data = rows_in(tmp_path, {"prompt": "a", "answer": "a"}, {"prompt": "b", "answer": "b"}, {"prompt": "c"})
    assert "row 3" in complaint(load(settings, data))


def test_rows_with_other_columns_are_a_warning_where_rewards_do_without(settings: list[str], tmp_path: Path) -> None:
    data = rows_in(tmp_path, {"prompt": "a", "answer": "a"}, {"prompt": "b"})
    (warning,) = check_quickly(load(settings, data, "scoring.rewards=[{function='length'}]")).warnings
    assert "row 2 lacks answer" in warning


def test_a_choice_that_is_known_to_fail_is_a_warning_with_the_way_out(settings: list[str]) -> None:
    changes = ("algorithm.correction=importance", "staleness.max_staleness=4")
    (warning,) = check_quickly(load(settings, *changes)).warnings
    assert "variance grows with age; set it to 'tis'" in warning


def test_parts_of_an_algorithm_that_cancel_each_other_are_refused_before_anything_starts(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"counts the same ratio twice.*; set algorithm\.proximal"):
        load(settings, "algorithm.proximal=generator", "algorithm.correction=tis")


def test_held_out_rows_are_tried_too(settings: list[str], tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "ab"}\n')
    assert "held_out.jsonl, row 1" in complaint(load(settings, f"data.eval_path='{held_out}'"))


def test_chat_prompts_need_a_chat_template(settings: list[str], model_dir: Path, tmp_path: Path) -> None:
    mute = shutil.copytree(model_dir, tmp_path / "mute")
    (mute / "chat_template.jinja").unlink()
    data = rows_in(tmp_path, {"prompt": [{"role": "user", "content": "ab"}], "answer": "ba"})
    check(load(settings, data))
    assert "chat template" in complaint(load(settings, data, f"model.path='{mute}'"))


def test_prompts_of_which_none_fits_are_found_and_some_are_a_warning(settings: list[str], tmp_path: Path) -> None:
    long, short = {"prompt": "a" * 125, "answer": ""}, {"prompt": "a", "answer": ""}
    (warning,) = check(load(settings, rows_in(tmp_path, short, long))).warnings
    assert "1 of 2 prompts" in warning
    assert "row 2" in warning
    assert "every prompt is longer than 120 tokens" in complaint(load(settings, rows_in(tmp_path, long, long)))


def test_a_big_file_is_looked_at_where_it_begins(settings: list[str], tmp_path: Path) -> None:
    data = rows_in(tmp_path, *[{"prompt": "ab", "answer": "ba"}] * (MAX_ROWS + 2))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("no row at all\n")
    assert f"the first {MAX_ROWS} rows" in facts(check_quickly(load(settings, data)), "data")


def test_a_server_that_does_not_answer_is_a_warning(settings: list[str]) -> None:
    (warning,) = check(load(settings, "redis.url='redis://user:hunter2@127.0.0.1:1'")).warnings
    assert "does not answer" in warning
    assert "hunter2" not in warning


def test_the_server_that_answers_is_named(settings: list[str], valkey_url: str) -> None:
    assert "Valkey" in facts(check(load(settings, f"redis.url='{valkey_url}'")), "server")


def test_the_quick_check_downloads_nothing(settings: list[str]) -> None:
    check_quickly(load(settings, "data.path='someone/some-data'"))


def test_the_command_prints_what_was_looked_at(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    assert run(["config", "check", *options]) == 0
    out = capsys.readouterr().out
    assert out.endswith("OK\n")
    assert {"data", "rewards", "prompts", "model", "server"} <= {line.split()[0] for line in out.splitlines()}


def test_a_directory_for_weights_that_is_not_here_may_be_elsewhere(settings: list[str], tmp_path: Path) -> None:
    report = check(load(settings, f"weights.store='{tmp_path}/nowhere'"))
    assert any("nowhere is no directory here" in warning for warning in report.warnings)
    assert "through files" in facts(report, "weights")
    assert not check(load(settings, f"weights.store='{tmp_path}'")).warnings


def test_an_unknown_preset_is_found_before_a_worker_is_started(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        check_quickly(load(settings, "algorithm.preset=grppo"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("scoring.rewards=[]", "scoring.rewards"),
        ("scoring.rewards=[{function='nowhere:nothing'}]", "nowhere"),
        ("algorithm.preset=grppo", "algorithm.preset"),
        ("data.path='nowhere.jsonl'", "nowhere.jsonl"),
        ("model.path='./nowhere'", "model.path"),
        ("generation.max_tokens=1000000", "generation.max_tokens"),
        ("generation.replay_routing=true", "'llama' has no router"),
        ("weights.server_secret_key_file='nowhere.key'", "weights.server_secret_key_file"),
        ("weights.server_public_key=abc", "weights.server_public_key"),
        (f"weights.server_public_key={'#' * 40}", "weights.server_public_key"),
        ("weights.allowed_keys=['']", "weights.allowed_keys = ''"),
        (f"weights.allowed_keys=['{'#' * 40}']", "weights.allowed_keys"),
        (f"weights.allowed_keys=['{KEY}']", "without weights.server_secret_key_file nobody is asked"),
        ("weights.store=ftp://host/folder", "weights.store = 'ftp://host/folder': no store is known"),
        ("weights.store=gs://bucket/folder", "needs gcsfs: pip install gcsfs"),
        ("generation.engine=vllm generation.vllm={dtype='half'}", "generation.vllm.dtype = 'half' is decided by"),
        ("tracking.trackers=['trackio']", "trackio"),
        ("lora.rank=2 lora.target_modules=['nothing']", "lora.target_modules"),
        ("model.attention=nonsense", "model.attention = 'nonsense'"),
        ("generation.device='cuda:99'", "generation.device"),
        ("trainer.device='nowhere'", "trainer.device"),
        ("trainer.max_steps=0 data.epochs=1 trainer.schedule=cosine", "trainer.schedule"),
    ],
)
def test_what_is_missing_is_named_with_its_setting(override: str, said: str, settings: list[str]) -> None:
    assert said in complaint(load(settings, *override.split()))


def test_a_public_key_of_another_secret_is_refused_and_one_without_its_secret_is_for_generators(
    settings: list[str], tmp_path: Path
) -> None:
    public, secret = zmq.curve_keypair()
    (tmp_path / "weights.key").write_bytes(secret)
    named = f"weights.server_secret_key_file='{tmp_path}/weights.key'"
    assert not check(load(settings, named, f"weights.server_public_key='{public.decode()}'")).warnings
    assert "is not the public key of weights.server_secret_key_file" in complaint(
        load(settings, named, f"weights.server_public_key='{KEY}'")
    )
    (warning,) = check(load(settings, f"weights.server_public_key='{KEY}'")).warnings
    assert "is for generators alone" in warning


def test_a_model_without_weights_is_found(settings: list[str], model_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model_dir.iterdir():
        if not file.name.endswith(".safetensors"):
            (bare / file.name).write_bytes(file.read_bytes())
    assert "weights" in complaint(load(settings, f"model.path='{bare}'"))


def test_a_broken_row_names_file_and_row(settings: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "ab"}\n{"prompt": \n')
    text = complaint(load(settings, f"data.path='{broken}'"))
    assert "broken.jsonl" in text
    assert "2" in text


def test_all_problems_are_said_at_once(settings: list[str]) -> None:
    config = load(settings, "scoring.rewards=[]", "data.path='nowhere.jsonl'", "model.path='./nowhere'")
    assert len(complaint(config).splitlines()) >= 3


@pytest.mark.parametrize(
    ("scoring", "said"),
    [
        ("teachers=[{model='/none'}]", r"scoring.teachers\[0\].model = '/none' does not exist"),
        ("teachers=[{model='m', url='ftp://h'}]", r"scoring.teachers\[0\].url = 'ftp://h' must look like"),
        (
            "judges=[{model='m', url='http://h', prompt='/none'}]",
            r"scoring.judges\[0\].prompt = '/none' cannot be read",
        ),
        ("judges=[{model='/none'}]", r"scoring.judges\[0\].model = '/none' does not exist"),
        ("teacher_column='nope'", "scoring.teacher_column = 'nope': no row of .* columns that there are: answer"),
        ("teacher_column='answer'", "data.jsonl, row 1: column 'answer' .* names the teacher 'ba'; there are: big"),
    ],
)
def test_teachers_and_judges_that_cannot_begin_are_refused_by_their_setting(
    settings: list[str], scoring: str, said: str
) -> None:
    teacher = ["scoring.teachers=[{name='big', model='m', url='http://h'}]"] if "column" in scoring else []
    with pytest.raises(ConfigError, match=said) as caught:
        check_quickly(load_config([], environ={}, overrides=[*settings, *teacher, f"scoring.{scoring}"]))
    assert "\n" not in str(caught.value)
