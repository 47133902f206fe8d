"""What a demo run sets out from: words, tokeniser, data, a model with something left to learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.checks.config import check
from pipeline.demo.cold_start import cold_start, exact_match, sequences
from pipeline.demo.prepare import Prepared, prepare
from pipeline.demo.settings import demo_config
from pipeline.demo.summary import num_steps_of_a_part
from pipeline.demo.task import ASK, VOCABULARY, WORD_LENGTH, make_words, save_tokenizer
from pipeline.records.recorder import Recorder
from pipeline.run.data import load_run_data


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("demo"), seed=0)


@pytest.fixture(scope="module")
def start(prepared: Prepared) -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(prepared.model)
    assert isinstance(model, LlamaForCausalLM)
    return model


def test_no_word_serves_two_purposes() -> None:
    words = make_words(seed=3)
    together = [*words.held_out, *words.supervised, *words.training]
    assert len(set(together)) == len(together)


def test_every_seed_has_its_own_prompts_and_the_same_questions() -> None:
    first, second = make_words(seed=0), make_words(seed=1)
    assert (first.held_out, first.supervised) == (second.held_out, second.supervised)
    assert first.training != second.training
    assert make_words(seed=1) == second


def test_tokeniser_has_one_token_for_each_character(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    ids = tokenizer.encode("zebra" + ASK)
    assert ids == [VOCABULARY[letter] for letter in "zebra" + ASK]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "zebra" + ASK


def test_start_answers_some_but_not_most_held_out_words(start: LlamaForCausalLM) -> None:
    held_out = sequences(make_words(seed=0).held_out)
    assert 0.25 < exact_match(start, held_out) < 0.7


def test_exact_match_is_what_greedy_decoding_gives(start: Any) -> None:
    rows = sequences(make_words(seed=0).held_out[:50])
    prompts = rows[:, : WORD_LENGTH + 1]
    decoded = start.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=WORD_LENGTH + 1
    )
    padded = torch.nn.functional.pad(decoded, (0, rows.shape[1] - decoded.shape[1]))
    assert exact_match(start, rows) == pytest.approx((padded == rows).all(dim=1).float().mean().item())


def test_start_is_the_same_whatever_the_seed_of_the_process(tmp_path: Path) -> None:
    words = make_words(seed=0).supervised[:1024]
    files = []
    for name, seed in (("first", 1), ("second", 2)):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        cold_start(tmp_path / name, words, enough=0.0)
        assert torch.equal(torch.get_rng_state(), state)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_settings_of_the_demo_pass_the_check_and_fit_the_data(prepared: Prepared, tmp_path: Path) -> None:
    config = demo_config(prepared, run_dir=tmp_path, name="demo", seed=5, steps=3, max_staleness=0)
    check(config)
    assert (config.trainer.max_steps, config.staleness.max_staleness, config.run.seed) == (3, 0, 5)
    data = load_run_data(config)
    group = data.source.next_group(0, 0)
    assert group is not None
    assert group.columns["answer"] == str(group.prompt).removesuffix(ASK)[::-1]
    assert len(group.prompt_token_ids) == WORD_LENGTH + 1
    assert len(data.evaluation_groups(0)) == len(make_words(seed=0).held_out)


def test_data_of_the_demo_are_plain_rows(prepared: Prepared) -> None:
    rows = [json.loads(line) for line in prepared.held_out.read_text(encoding="utf-8").splitlines()]
    assert all(row["prompt"] == row["answer"][::-1] + ASK for row in rows)


def test_a_demo_that_was_stopped_is_not_summed_up(prepared: Prepared, tmp_path: Path) -> None:
    config = demo_config(prepared, run_dir=tmp_path, name="demo", seed=0, steps=2, max_staleness=0)
    assert num_steps_of_a_part(config) == 0
    records = Recorder(config.run_dir, "trainer")
    records.metrics(1, {"reward_mean": 0.5})
    assert num_steps_of_a_part(config) == 1
    records.metrics(2, {"reward_mean": 0.5})
    assert num_steps_of_a_part(config) == 2, "without an evaluation"
    records.metrics(2, {"eval_reward": 0.5})
    assert num_steps_of_a_part(config) is None
