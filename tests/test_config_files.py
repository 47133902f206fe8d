"""Settings: where they come from, what is said about mistakes, what is shown."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import Config
from pipeline.config.base import LONGEST_S
from pipeline.errors import ConfigError
from pipeline.settings.files import fingerprint, load_config, masked, render_reference, schema, show
from pipeline.settings.reference import settings, to_toml

ROOT = Path(__file__).parent.parent
MISSING = object()
LISTS = {"scoring.rewards", "scoring.teachers", "scoring.judges"}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def complaint(
    *, toml: str = "", environ: dict[str, str] | None = None, overrides: tuple[str, ...] = (), tmp_path: Path
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([write(tmp_path / "run.toml", toml)], environ=environ or {}, overrides=overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_without_sources_all_settings_have_their_defaults() -> None:
    assert load_config([], environ={}) == Config()


def test_the_reference_file_is_what_the_settings_render() -> None:
    assert (ROOT / "config.toml").read_text(encoding="utf-8") == render_reference()


def test_the_reference_loads_to_the_defaults() -> None:
    assert load_config([ROOT / "config.toml"], environ={}) == Config()


def test_the_reference_names_every_setting_with_its_default() -> None:
    written = tomllib.loads(render_reference())
    for path, setting in settings().items():
        here: Any = written
        for part in path.split("."):
            here = here.get(part, MISSING) if isinstance(here, dict) else MISSING
        assert here is not MISSING or path in LISTS, path
        assert setting.field.description, f"{path} does not say why it exists"


def test_later_files_win_and_tables_merge(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.toml",
        """
        [trainer]
        max_steps = 3
        groups_per_step = 7
        [lora]
        target_modules = ["q_proj", "k_proj"]
        """,
    )
    second = write(tmp_path / "b.toml", 'trainer.max_steps = 4\nlora.target_modules = ["v_proj"]\n')
    config = load_config([first, second], environ={})
    assert (config.trainer.max_steps, config.trainer.groups_per_step) == (4, 7)
    assert config.lora.target_modules == ["v_proj"], "lists replace, they do not grow"


def test_environment_beats_files_and_flags_beat_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "staleness.max_staleness = 1\n")
    environ = {"ROLLSTREAM_STALENESS__MAX_STALENESS": "4"}
    assert load_config([file], environ={}).staleness.max_staleness == 1
    assert load_config([file], environ=environ).staleness.max_staleness == 4
    config = load_config([file], environ=environ, overrides=["staleness.max_staleness=9"])
    assert config.staleness.max_staleness == 9


def test_nested_sections_are_reached_from_the_environment() -> None:
    config = load_config([], environ={"ROLLSTREAM_GENERATION__SCRIPTED__TOKENS_PER_S": "12.5"})
    assert config.generation.scripted.tokens_per_s == 12.5


def test_redis_url_of_the_environment_is_taken() -> None:
    environ = {"REDIS_URL": "redis://host:1/0"}
    assert load_config([], environ=environ).redis.url.get_secret_value() == "redis://host:1/0"
    environ["ROLLSTREAM_REDIS__URL"] = "redis://other:1/0"
    assert load_config([], environ=environ).redis.url.get_secret_value() == "redis://other:1/0"


def test_variables_that_kubernetes_makes_for_a_service_are_no_settings() -> None:
    assert load_config([], environ={"ROLLSTREAM_PORT": "tcp://10.0.0.1:80", "ROLLSTREAM_PARENT_PID": "1"}) == Config()


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("run.name=7", "run.name", "7"),
        ("run.name='seven'", "run.name", "seven"),
        ("run.dir=some where", "run.dir", Path("some where")),
        ("trainer.learning_rate=1e-5", "trainer.learning_rate", 1e-5),
        ("trainer.schedule=cosine", "trainer.schedule", "cosine"),
        ("data.shuffle=false", "data.shuffle", False),
        ("tracking.trackers=tensorboard,wandb", "tracking.trackers", ["tensorboard", "wandb"]),
        ('lora.target_modules=["a", "b"]', "lora.target_modules", ["a", "b"]),
        ("data.system_prompt=a = b", "data.system_prompt", "a = b"),
    ],
)
def test_flags_take_toml_and_plain_words(override: str, path: str, value: object) -> None:
    section, key = path.split(".")
    assert getattr(getattr(load_config([], environ={}, overrides=[override]), section), key) == value


def test_rewards_can_be_given_as_a_flag() -> None:
    config = load_config([], environ={}, overrides=["scoring.rewards=[{function = 'a:b', weight = 2}]"])
    assert [(reward.function, reward.weight) for reward in config.scoring.rewards] == [("a:b", 2.0)]


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("staleness.max_stalenes = 4", "did you mean staleness.max_staleness?"),
        ("generation.max_staleness = 4", "did you mean staleness.max_staleness?"),
        ("max_staleness = 4", "did you mean staleness.max_staleness?"),
        ("trainer.lr = 4", "did you mean trainer.learning_rate?"),
        ("[stalenes]\nmax = 4", "did you mean [staleness]?"),
        ("generation.scripted.tokens_per_sec = 4", "did you mean generation.scripted.tokens_per_s?"),
        ("[[scoring.rewards]]\nfunction = 'a:b'\nweigth = 2", "did you mean weight?"),
        ("trainer.qqq = 4", "`rollstream config show --reference` lists all"),
    ],
)
def test_an_unknown_setting_names_the_nearest_known_one(toml: str, said: str, tmp_path: Path) -> None:
    text = complaint(toml=toml, tmp_path=tmp_path)
    assert text.startswith("unknown setting ")
    assert said in text
    assert f"({tmp_path / 'run.toml'})" in text


def test_an_unknown_setting_names_variable_or_flag(tmp_path: Path) -> None:
    text = complaint(
        environ={"ROLLSTREAM_TRAINER__MAX_STEP": "3"}, overrides=("trainer.max_stepps=3",), tmp_path=tmp_path
    )
    assert "trainer.max_step (environment ROLLSTREAM_TRAINER__MAX_STEP)" in text
    assert "trainer.max_stepps (--set trainer.max_stepps)" in text


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("generation.group_size = 'eight'", 'generation.group_size = "eight"'),
        ("generation.group_size = 0", "greater than or equal to 1"),
        ("generation.group_size = true", "should be a valid integer"),
        ("generation.group_size = '8'", "should be a valid integer"),
        ("staleness.policy = 'corect'", "'correct', 'mask' or 'drop'"),
        ("redis = 3", "should be a table"),
        ("lora.target_modules = 'all'", "should be a list"),
        ("trainer.learning_rate = inf", "finite"),
        ("weights.poll_s = 1e300", "less than or equal to 604800"),
        ("weights.store_grace_s = 1e12", "less than or equal to 604800"),
        ("[[scoring.rewards]]\nweight = 2", "scoring.rewards[0].function is missing"),
    ],
)
def test_a_wrong_value_names_setting_value_source_and_way_out(toml: str, said: str, tmp_path: Path) -> None:
    text = complaint(toml=toml, tmp_path=tmp_path)
    assert said in text
    assert str(tmp_path / "run.toml") in text
    assert "default" in text or "table" in text


def test_every_setting_of_seconds_has_a_bound_that_a_timer_takes() -> None:
    sections = schema()["$defs"].values()
    seconds = {
        name: setting
        for section in sections
        for name, setting in section["properties"].items()
        if name.endswith("_s") and not name.endswith("_per_s")
    }
    assert {"poll_s", "lease_s", "scripted_step_s"} <= seconds.keys()
    assert {name for name, setting in seconds.items() if setting.get("maximum", math.inf) > LONGEST_S} == set()


def test_all_problems_are_said_at_once_one_a_line(tmp_path: Path) -> None:
    toml = "trainer.max_stepps = 1\ntrainer.groups_per_step = 0\nrun.seed = -1\nstaleness.policy = 'x'\n"
    lines = complaint(toml=toml, overrides=("run.nam=x",), tmp_path=tmp_path).splitlines()
    assert len(lines) == 5
    assert len({line.split("(")[0] for line in lines}) == 5


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    text = complaint(toml="[run]\nname = 'a'\nseed = \n", tmp_path=tmp_path)
    assert str(tmp_path / "run.toml") in text
    assert "line 3" in text
    for value in ("9" * 5000, "[" * 5000):
        assert "not valid TOML" in complaint(toml=f"run.seed = {value}\n", tmp_path=tmp_path)


def test_a_byte_order_mark_is_no_setting_and_another_encoding_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run.toml", "\ufeff[run]\nname = 'marked'\n")
    assert load_config([path], environ={}).run.name == "marked"
    path.write_text("run.name = 'marked'", encoding="utf-16")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0; save the file as UTF-8"):
        load_config([path], environ={})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: there is no such file"):
        load_config([tmp_path / "nowhere.toml"], environ={})


def test_a_flag_without_a_value_says_how_to_write_it(tmp_path: Path) -> None:
    assert "section.key=value" in complaint(overrides=("run.name",), tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("run.name = 'a b'", "run.name = 'a b'"),
        ("redis.url = 'localhost:6379'", "should be"),
        ("weights.host = '0.0.0.0'", "weights.insecure"),
        ("lora.quantization = 'nf4'", "set rank, 16 is usual"),
        ("lora = {rank = 8, quantization = 'nf4'}\ntrainer.num_ranks = 2", "set trainer.num_ranks = 1"),
        ("trainer.compile = true\ngeneration.replay_routing = true", "set one of them to false"),
        ("weights.port = 5\nweights.announce_port = 5", "weights.announce_port = 5"),
        ("weights.store = 's3://b/w'\nweights.relay = true", "weights.relay = true"),
        ("queues.max_length = 10", "queues.max_length = 10"),
        ("evaluation.every_steps = 5", "data.eval_path"),
        ("data.curriculum = true\ndata.shuffle = false", "data.shuffle"),
        ("data.curriculum = true\ndata.epochs = 1", "data.epochs = 1"),
        ('generation.group_size = 1\nalgorithm.preset = "dapo"', "algorithm.drop_zero_variance = true"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(toml: str, said: str, tmp_path: Path) -> None:
    assert said in complaint(toml=toml, tmp_path=tmp_path)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:se/cr:et@host:1/0",
        "rediss://:hunter2@host:1/0",
        "redis://host:1/0?password=hunter2&db=1",
        "unix://user:hunter2@/tmp/redis.sock",
    ],
)
def test_passwords_are_never_shown(url: str) -> None:
    config = load_config([], environ={"REDIS_URL": url})
    for text in (show(config), json.dumps(masked(config)), repr(config), json.dumps(fingerprint(config))):
        assert "hunter2" not in text
        assert "se/cr" not in text
    assert "***" in show(config)


def test_passwords_are_not_in_complaints(tmp_path: Path) -> None:
    text = complaint(environ={"REDIS_URL": "reds://user:hunter2@host:1"}, tmp_path=tmp_path)
    assert "hunter2" not in text
    assert "user:***@host" in text


def test_what_is_shown_loads_again(tmp_path: Path) -> None:
    config = load_config(
        [],
        environ={},
        overrides=[
            "scoring.rewards=[{function = 'a:b', kwargs = {words = ['x', 'y'], n = 3}}]",
            'data.system_prompt="Zwei\\nZeilen \\"so\\" \\u00fc"',
            "trainer.learning_rate=3e-7",
        ],
    )
    assert load_config([write(tmp_path / "shown.toml", show(config))], environ={}) == config


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",))))
def test_any_text_survives_as_toml(text: str) -> None:
    assert tomllib.loads(f"value = {to_toml(text)}")["value"] == text


def test_the_fingerprint_holds_what_workers_must_agree_on() -> None:
    base = fingerprint(load_config([], environ={}))
    agreed = ["lora.rank=8", "model.path=x", "algorithm.clip_low=0.1", "staleness.max_staleness=3", "data.path=x"]
    scoring = ["scoring.rewards=[{function='a:b'}]", "scoring.judges=[{model='m'}]"]
    for override in [*agreed, *scoring, "generation.top_p=0.9"]:
        changed = fingerprint(load_config([], environ={}, overrides=[override]))
        assert {key for key in base if base[key] != changed[key]} == {override.split("=")[0]}


def test_the_fingerprint_holds_nothing_of_one_machine_nor_how_patient_a_trainer_is() -> None:
    base = fingerprint(load_config([], environ={}))
    for override in [
        "worker.port=9",
        "generation.device=cpu",
        "generation.num_threads=3",
        "run.dir=x",
        "weights.port=4",
        "algorithm.max_refill=20",
    ]:
        assert fingerprint(load_config([], environ={}, overrides=[override])) == base


def test_the_schema_accepts_the_reference_and_refuses_a_typing_error() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    validator.validate(tomllib.loads(render_reference()))
    assert not validator.is_valid({"staleness": {"max_stalenes": 1}})


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["worker.heartbeat_s=8", "queues.lease_s=10"], "worker.heartbeat_s = 8"),
        (["generation.replay_routing=true", "generation.engine=scripted"], "generation.replay_routing = true"),
        (["staleness.max_staleness=0", "weights.publish_every=3"], "weights.publish_every = 3"),
        (["run.topology=colocated", "generation.engine=openai"], "run.topology = .colocated.: generation.engine"),
        (["run.topology=colocated", "generation.engine=vllm", "trainer.device=cuda:1"], "are not one device"),
        (["generation.engine=vllm", "generation.temperature=0.001"], "generation.temperature = 0.001: vLLM samples"),
        (["generation.engine=openai", "evaluation.temperature=2.5"], "evaluation.temperature = 2.5: vLLM samples"),
        (["generation.stop=['']"], r"generation.stop"),
        (["queues.lease_s=0.0001"], "queues.lease_s"),
        (["queues.lease_s=1e300"], "queues.lease_s"),
        (["run.seed=100000000000000000000000"], "run.seed"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config([], environ={}, overrides=overrides)


def test_keys_of_a_free_table_may_be_set_one_by_one() -> None:
    config = load_config(
        [],
        environ={"ROLLSTREAM_GENERATION__VLLM__MAX_MODEL_LEN": "64"},
        overrides=["generation.vllm.tensor_parallel_size=2", "generation.vllm.quantization=fp8"],
    )
    assert config.generation.vllm == {"max_model_len": 64, "tensor_parallel_size": 2, "quantization": "fp8"}
