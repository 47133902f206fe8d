"""A reward model in this process: its logits against a plain pass, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from pipeline.config import Config
from pipeline.errors import MessageError, ModelError, UsageError
from pipeline.judges import Judges
from pipeline.messages import Outcome, Prompt, RolloutGroup, Score
from tests.learning.builders import Row, make_group
from tests.tiny import SPECIAL, VOCABULARY, make_tiny_model, make_tokenizer

TEXTS = ("four", "it is 4!", "no")


def make_reward_model(directory: Path, *, num_labels: int = 1) -> Path:
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        num_labels=num_labels,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForSequenceClassification(config).save_pretrained(directory)
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward"))


def judges_of(model: Path, **judge: object) -> Judges:
    settings = {"model": str(model), "device": "cpu", "dtype": "float32", **judge}
    return Judges(Config.model_validate({"scoring": {"judges": [settings]}}))


def rollout_of(*texts: str, prompt: Prompt = "2+2?") -> RolloutGroup:
    rollout = make_group([Row(token_ids=[4]) for _ in texts]).rollout
    completions = tuple(replace(item, text=text) for item, text in zip(rollout.completions, texts, strict=True))
    return replace(rollout, prompt=replace(rollout.prompt, prompt=prompt), completions=completions)


def plain(model: Path, said: str) -> float:
    ids = AutoTokenizer.from_pretrained(model)(said, add_special_tokens=False)["input_ids"]
    loaded = LlamaForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        return float(loaded(torch.tensor([ids])).logits[0, 0])


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
async def test_the_reward_is_the_logit_of_the_conversation_in_the_models_own_template(
    model: Path, batch_tokens: int
) -> None:
    judges = judges_of(model, batch_tokens=batch_tokens, name="rm", weight=0.5)
    await judges.start()
    scores = await judges.judge(rollout_of(*TEXTS), (Score(reward=1.0),) * 3)
    for score, text in zip(scores, TEXTS, strict=True):
        logit = plain(model, "2+2?" + text)  # which is what the tiny template makes of a question and an answer
        assert score.parts[0].name == "rm"
        assert score.parts[0].value == pytest.approx(logit, abs=1e-4)
        assert score.reward == pytest.approx(1 + 0.5 * logit, abs=1e-4)


async def test_a_conversation_is_judged_with_all_its_messages(model: Path) -> None:
    judges = judges_of(model)
    await judges.start()
    prompt = [{"role": "system", "content": "be brief."}, {"role": "user", "content": "2+2?"}]
    (score,) = await judges.judge(rollout_of("4", prompt=prompt), (Score(reward=None),))
    assert score.reward == pytest.approx(plain(model, "be brief.2+2?4"), abs=1e-4)


async def test_what_is_no_reward_model_is_refused_by_its_setting(tmp_path: Path, model: Path) -> None:
    several = make_reward_model(tmp_path / "several", num_labels=3)
    causal = make_tiny_model(tmp_path / "causal")
    for path, said in (
        (several, "has 3 labels"),
        (causal, "labels|lacks weights"),
        (tmp_path / "none", "does not exist"),
    ):
        with pytest.raises(UsageError, match=rf"scoring.judges\[0\].model = .*({said})") as caught:
            await judges_of(path).start()
        assert isinstance(caught.value, ModelError)
    judges = judges_of(model)
    await judges.start()
    with pytest.raises(MessageError, match=r"104 tokens, the context of scoring.judges\[0\].model"):
        await judges.judge(rollout_of("a" * 100), (Score(reward=None),))


async def test_a_conversation_that_the_template_refuses_is_set_aside_and_no_number_is_a_failure(
    tmp_path: Path,
) -> None:
    model = make_reward_model(tmp_path)
    judges = judges_of(model)
    await judges.start()
    for template in ("{{ raise_exception('no system message') }}", "{{ messages[0] + 1 }}"):
        judges._judges[0]._tokenizer.chat_template = template
        with pytest.raises(MessageError, match=r"scoring.judges\[0\].model.* chat template does not take"):
            await judges.judge(rollout_of("4"), (Score(reward=None),))
    judges._judges[0]._tokenizer.chat_template = None
    torch.nn.init.constant_(judges._judges[0]._model.score.weight, torch.nan)
    (score,) = await judges.judge(rollout_of("4"), (Score(reward=0.5),))
    assert (score.reward, score.parts[0].outcome) == (None, Outcome.ERROR)
    assert "gave the logit nan" in score.parts[0].problem
