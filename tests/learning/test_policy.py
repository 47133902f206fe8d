"""Logprobs as the trainer computes them, against one plain forward pass for each completion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import peft
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from pipeline.batching import KeptTokens, Layout, MicroBatch, make_samples, pad, split
from pipeline.config import StalenessSettings
from pipeline.errors import ModelError
from pipeline.messages import ScoredGroup
from pipeline.policy import Policy
from pipeline.policy.logprobs import Targets, chunked_logprobs
from pipeline.staleness import assess
from tests.learning.builders import (
    VOCABULARY_SIZE,
    Row,
    gradients,
    make_group,
    plain_logprobs,
    random_groups,
    tiny_llama,
    with_mask_of,
)


def micro_batches(groups: Sequence[ScoredGroup], budget: int = 10**6) -> list[MicroBatch]:
    samples = make_samples(groups, [assess(group, 0, StalenessSettings()) for group in groups])
    return [
        pad([samples[row] for row in rows], torch.ones(len(rows)), torch.ones(len(rows)))
        for rows in split(samples, budget)
    ]


def expected_rows(model: PreTrainedModel, groups: Sequence[ScoredGroup]) -> list[torch.Tensor]:
    """Plain logprobs of every completion, longest sequence first as `split` has them."""
    rows = []
    for group in groups:
        prompt = group.rollout.prompt
        for completion in group.rollout.completions:
            values = plain_logprobs(
                model,
                prompt.prompt_token_ids.tolist(),
                completion.token_ids.tolist(),
                prompt.sampling.temperature,
            )
            rows.append((len(prompt.prompt_token_ids) + len(completion), values))
    return [values for _, values in sorted(rows, key=lambda row: -row[0])]


def small(config_class: type, model_class: type, **options: object) -> PreTrainedModel:
    settings = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": 0,
        "initializer_range": 0.5,
    } | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class(config_class(**settings)).double().eval()


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 1000])
@pytest.mark.parametrize("budget", [1, 40, 10**6])
def test_logprobs_do_not_depend_on_chunks_padding_or_split(chunk_tokens: int, budget: int) -> None:
    model = tiny_llama()
    groups = random_groups(model, temperature=0.6)
    policy = Policy(model, logprob_chunk_tokens=chunk_tokens)

    rows = [
        row[mask] for b in micro_batches(groups, budget) for row, mask in zip(policy.logprobs(b), b.mask, strict=True)
    ]

    for row, expected in zip(rows, expected_rows(model, groups), strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_gradient_through_chunks_is_that_of_full_logits(chunk_tokens: int, is_frozen: bool) -> None:
    """With an output layer that is trained, and with one that is not."""
    model = tiny_llama()
    model.lm_head.requires_grad_(not is_frozen)
    groups = random_groups(model, temperature=0.6)
    [batch] = micro_batches(groups)
    weights = torch.randn(batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    (Policy(model, logprob_chunk_tokens=chunk_tokens).logprobs(batch) * weights).sum().backward()
    chunked = gradients(model)
    model.zero_grad()
    rows = [w[m] for w, m in zip(weights, batch.mask, strict=True)]
    sum((r * w).sum() for r, w in zip(expected_rows(model, groups), rows, strict=True)).backward()

    assert chunked.keys() == {name for name, value in model.named_parameters() if value.requires_grad}
    for name, value in gradients(model).items():
        torch.testing.assert_close(chunked[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_gradient_is_that_of_a_softmax_over_the_ids_that_could_be_drawn(is_trained: bool) -> None:
    """At temperatures of their own, and of logits far from 0."""
    generator = torch.Generator().manual_seed(1)
    states, weight, slopes = (torch.randn(size, generator=generator).double() for size in ((5, 3), (7, 3), (5,)))
    ids, temperatures = torch.tensor([0, 4, 3, 6, 2]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.75])
    drawable = {1: [2, 4], 3: [0, 6]}
    kept = KeptTokens(
        ids=torch.tensor([*drawable[1], *drawable[3]]),
        rows=torch.tensor([1, 1, 3, 3]),
        is_limited=torch.tensor([row in drawable for row in range(5)]),
    )
    inputs = [states.requires_grad_(), *([weight.requires_grad_()] if is_trained else [])]

    logprobs, _ = chunked_logprobs(
        states,
        Targets(token_ids=ids, temperatures=temperatures, kept=kept),
        lambda some: some @ weight.T + 1000,
        chunk_tokens=2,
        is_trained=is_trained,
    )

    logits = (states @ weight.T + 1000) / temperatures.double()[:, None]
    rows = [logits[row, drawable.get(row, slice(None))].logsumexp(0) for row in range(5)]
    expected = logits[torch.arange(5), ids] - torch.stack(rows)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(
        torch.autograd.grad((logprobs * slopes).sum(), inputs), torch.autograd.grad((expected * slopes).sum(), inputs)
    )


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_an_output_layer_in_float32_adds_no_rounding_to_that_of_the_states(is_frozen: bool) -> None:
    """Over float32 weights under autocast, and over frozen ones in bfloat16 as below an adapter."""
    groups = random_groups(tiny_llama())
    [batch] = micro_batches(groups)
    model = tiny_llama().to(torch.bfloat16 if is_frozen else torch.float32)
    model.lm_head.requires_grad_(not is_frozen)

    wide, narrow = (
        Policy(
            model, logprob_chunk_tokens=4, autocast=torch.bfloat16, layout=Layout.PADDED, float32_head=is_wide
        ).logprobs(batch)
        for is_wide in (True, False)
    )
    wide.sum().backward()
    found = gradients(model)
    model.zero_grad()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = model.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    logits = states.float().flatten(0, 1)[batch.state_index] @ model.lm_head.weight.float().T
    expected = logits.log_softmax(1)[torch.arange(len(logits)), batch.targets]
    torch.testing.assert_close(wide[batch.mask], expected, rtol=0, atol=1e-5)
    assert (narrow[batch.mask] - expected).abs().max() > 1e-3
    expected.sum().backward()
    assert found.keys() == gradients(model).keys()
    if not is_frozen:
        torch.testing.assert_close(found["lm_head.weight"], model.lm_head.weight.grad, rtol=1e-4, atol=1e-5)


def test_entropy_is_that_of_the_sampled_distribution() -> None:
    model = tiny_llama()
    group = make_group([Row(token_ids=[4, 7])], temperature=0.7)
    [batch] = micro_batches([group])

    entropies = Policy(model, logprob_chunk_tokens=1).evaluate(batch).entropies

    logits = model(input_ids=torch.tensor([[1, 5, 3, 4, 7]])).logits[0, 2:4] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropies[0], expected)
    assert not entropies.requires_grad


def test_only_kept_ids_count_where_the_sampling_mask_is_replayed() -> None:
    model = tiny_llama()
    masked = with_mask_of(Row(token_ids=[4, 7, 2]), [[4, 6], [7], [1, 2, 3, 12]])
    plain = Row(token_ids=[4, 7])
    groups = [make_group([masked, plain], top_p=0.8, temperature=0.6)]
    [batch] = micro_batches(groups)

    logprobs = Policy(model, logprob_chunk_tokens=2).logprobs(batch)

    logits = model(input_ids=torch.tensor([[1, 5, 3, 4, 7, 2]])).logits[0, 2:5] / 0.6
    expected = [
        logits[0, [4, 6]].log_softmax(0)[0],
        torch.zeros((), dtype=torch.float64),
        logits[2, [1, 2, 3, 12]].log_softmax(0)[1],
    ]
    torch.testing.assert_close(logprobs[0], torch.stack(expected))
    torch.testing.assert_close(logprobs[1, :2], plain_logprobs(model, [1, 5, 3], [4, 7], 0.6))
    logprobs.sum().backward()
    assert all(torch.isfinite(value.grad).all() for value in model.parameters() if value.grad is not None)


def test_sampling_mask_covers_the_right_tokens_when_some_are_not_trained_on() -> None:
    model = tiny_llama()
    row = Row(token_ids=[4, 7, 2], generator_logprobs=[-1.0, float("nan"), -1.0])
    groups = [make_group([with_mask_of(row, [[4, 6], [7, 8, 9], [1, 2]])], top_p=0.8)]
    [batch] = micro_batches(groups)

    logprobs = Policy(model, logprob_chunk_tokens=10).logprobs(batch)

    logits = model(input_ids=torch.tensor([[1, 5, 3, 4, 7, 2]])).logits[0, 2:5]
    np.testing.assert_array_equal(batch.mask.numpy(), [[True, False, True]])
    torch.testing.assert_close(logprobs[0, 0], logits[0, [4, 6]].log_softmax(0)[0])
    torch.testing.assert_close(logprobs[0, 2], logits[2, [1, 2]].log_softmax(0)[1])
    assert logprobs[0, 1] == 0


@pytest.mark.parametrize(
    "model",
    [
        small(Gemma2Config, Gemma2ForCausalLM, final_logit_softcapping=1.5, eos_token_id=1, bos_token_id=2),
        small(CohereConfig, CohereForCausalLM, logit_scale=0.0625, eos_token_id=1, bos_token_id=2),
        small(GraniteConfig, GraniteForCausalLM, logits_scaling=8.0),
        GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY_SIZE, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=1)
        ).double(),
    ],
    ids=["gemma2", "cohere", "granite", "gpt2"],
)
def test_architectures_that_change_their_logits_are_chunked_too(model: PreTrainedModel) -> None:
    policy = Policy(model, logprob_chunk_tokens=3)
    groups = random_groups(model)
    [batch] = micro_batches(groups)

    logprobs = policy.logprobs(batch)

    assert policy.is_chunked
    for row, mask, expected in zip(logprobs, batch.mask, expected_rows(model, groups), strict=True):
        torch.testing.assert_close(row[mask], expected)


def test_model_with_an_unknown_twist_is_used_whole() -> None:
    class Twisted(type(tiny_llama())):  # type: ignore[misc]
        def forward(self, *arguments: object, **options: object) -> object:
            output = super().forward(*arguments, **options)
            output.logits = output.logits + 0.1 * output.logits.square()
            return output

    plain = tiny_llama()
    model = Twisted(plain.config).double()
    model.load_state_dict(plain.state_dict())
    policy = Policy(model, logprob_chunk_tokens=3)
    groups = random_groups(model)
    [batch] = micro_batches(groups)

    logprobs = policy.logprobs(batch)

    assert not policy.is_chunked
    with pytest.raises(ModelError, match=r"trainer\.head_dtype = 'float32' needs .* Twisted .* set trainer"):
        Policy(model, logprob_chunk_tokens=3, float32_head=True)
    for row, mask, expected in zip(logprobs, batch.mask, expected_rows(model, groups), strict=True):
        torch.testing.assert_close(row[mask], expected)


def with_adapter(model: PreTrainedModel) -> peft.PeftModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        )
    return wrapped.double()


def test_adapter_acts_and_switching_it_off_gives_the_reference() -> None:
    base = tiny_llama()
    groups = random_groups(base)
    before = expected_rows(base, groups)
    model = with_adapter(tiny_llama())
    policy = Policy(model, logprob_chunk_tokens=3)
    [batch] = micro_batches(groups)

    logprobs, reference = policy.logprobs(batch), policy.reference_logprobs(batch)

    assert policy.is_chunked
    for row, mask, expected in zip(logprobs, batch.mask, expected_rows(model, groups), strict=True):
        torch.testing.assert_close(row[mask], expected)
    for row, mask, expected in zip(reference, batch.mask, before, strict=True):
        torch.testing.assert_close(row[mask], expected)
    assert not reference.requires_grad
    assert (logprobs - reference).abs().max().item() > 1e-3


def test_dropout_of_the_architecture_is_off_and_checkpointing_changes_nothing() -> None:
    model = tiny_llama(attention_dropout=0.5).train()
    groups = random_groups(tiny_llama())
    [batch] = micro_batches(groups)
    plain = Policy(model, logprob_chunk_tokens=3).logprobs(batch)
    plain.sum().backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = Policy(model, logprob_chunk_tokens=3).logprobs(batch)
    again.sum().backward()

    assert torch.equal(plain, again)
    assert any(getattr(module, "gradient_checkpointing", False) and module.training for module in model.modules())
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, expected[name])
