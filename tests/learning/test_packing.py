"""Micro-batches without padding, with prompts that are shared: the numbers of each completion alone, for any split."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import peft
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipeline.batching import Layout, MicroBatch, Sample, arrange, make_samples, split
from pipeline.config import StalenessSettings
from pipeline.messages import ScoredGroup
from pipeline.models.routing import RoutingReplay
from pipeline.packing import describe_layout
from pipeline.policy import CausalModel, Policy
from pipeline.staleness import assess
from tests.learning.builders import (
    VOCABULARY_SIZE,
    Row,
    exact_norms,
    gradients,
    make_group,
    plain_logprobs,
    tiny_llama,
    with_mask_of,
)
from tests.learning.test_policy import small, with_adapter
from tests.learning.test_routing_replay import recorded_groups
from tests.moe import noisy, tiny_moe

# Of each group the length of its prompt and of its completions.
LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=5)
SHAPES = st.lists(st.tuples(st.integers(1, 9), LENGTHS), min_size=1, max_size=4)

ENDS = {"eos_token_id": 1, "bos_token_id": 2}
WINDOW = 4


def llama(**options: object) -> PreTrainedModel:
    return tiny_llama(num_hidden_layers=2, **options)


def qwen3() -> PreTrainedModel:
    return exact_norms(small(Qwen3Config, Qwen3ForCausalLM, num_hidden_layers=2, **ENDS))


def gemma3() -> PreTrainedModel:
    """A layer with a window that most completions exceed, and one without."""
    kinds = ["sliding_attention", "full_attention"]
    options = {"num_hidden_layers": 2, "sliding_window": WINDOW, "layer_types": kinds, **ENDS}
    return small(Gemma3TextConfig, Gemma3ForCausalLM, **options)


def phi() -> PreTrainedModel:
    return small(PhiConfig, PhiForCausalLM, num_hidden_layers=2, **ENDS)


def gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=VOCABULARY_SIZE, n_embd=16, n_layer=2, n_head=2, n_positions=64, **ENDS)
    return GPT2LMHeadModel(config).double().eval()


def mamba() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    return MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, **ENDS)).double().eval()


def groups_of(shapes: Sequence[tuple[int, Sequence[int]]], seed: int = 0) -> list[ScoredGroup]:
    """For each group the length of its prompt and of its completions."""
    random = np.random.default_rng(seed)
    groups = []
    for ordinal, (num_prompt, lengths) in enumerate(shapes):
        rows = [Row(token_ids=random.integers(1, VOCABULARY_SIZE, length).tolist()) for length in lengths]
        prompt = random.integers(1, VOCABULARY_SIZE, num_prompt).tolist()
        groups.append(make_group(rows, ordinal=ordinal, prompt=prompt, temperature=0.7))
    return groups


MIXED = groups_of([(5, [1, 9, 3, 3]), (1, [2, 12]), (7, [4, 4, 4]), (3, [6])])


def samples_of(groups: Sequence[ScoredGroup]) -> list[Sample]:
    return make_samples(groups, [assess(group, 0, StalenessSettings()) for group in groups])


def with_holes(samples: Sequence[Sample], seed: int = 1) -> list[Sample]:
    """Some tokens are not trained on, ends of completions and whole completions among them."""
    random = np.random.default_rng(seed)
    masks = [sample.mask & (random.random(len(sample.mask)) < 0.6) for sample in samples]
    masks[0][:] = False
    return [replace(sample, mask=mask) for sample, mask in zip(samples, masks, strict=True)]


def batches_of(samples: Sequence[Sample], budget: int, layout: Layout) -> list[tuple[list[int], MicroBatch]]:
    found = []
    for rows in split(samples, budget, layout):
        chosen = [samples[row] for row in rows]
        found.append((rows, arrange(chosen, torch.ones(len(rows)), torch.ones(len(rows)), layout)))
    return found


def weights_of(index: int, length: int) -> Tensor:
    return torch.cos(torch.arange(length, dtype=torch.float64) * 3 + index)


def ours(policy: Policy, samples: Sequence[Sample], budget: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs of each sample, 0 outside its mask, and the gradient of a weighted sum of them."""
    policy.model.zero_grad()
    found = [torch.zeros(len(sample.mask)) for sample in samples]
    for rows, batch in batches_of(samples, budget, policy.layout):
        logprobs = policy.logprobs(batch)
        loss = torch.zeros((), dtype=logprobs.dtype)
        for row, values in zip(rows, logprobs, strict=True):
            own = values[: len(samples[row].mask)]
            found[row] = own.detach()
            loss = loss + (own * weights_of(row, len(own)).to(own.dtype)).sum()
        loss.backward()
    return found, gradients(policy.model)


def alone(model: CausalModel, samples: Sequence[Sample]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same by a plain forward pass over each sequence."""
    model.zero_grad()
    found = []
    for index, sample in enumerate(samples):
        ids = sample.completion.token_ids.tolist()
        logprobs = plain_logprobs(model, sample.prompt_token_ids.tolist(), ids, sample.temperature)
        logprobs = logprobs * torch.from_numpy(sample.mask)
        (logprobs * weights_of(index, len(ids)).to(logprobs.dtype)).sum().backward()
        found.append(logprobs.detach())
    return found, gradients(model)


def check(policy: Policy, plain: CausalModel, samples: Sequence[Sample], budget: int, tolerance: float) -> None:
    logprobs, gradient = ours(policy, samples, budget)
    expected, expected_gradient = alone(plain, samples)
    for index, (row, values) in enumerate(zip(logprobs, expected, strict=True)):
        torch.testing.assert_close(row.to(values), values, rtol=1e-9 if tolerance < 1e-8 else tolerance, atol=tolerance)
        assert samples[index].num_tokens or not row.any()
    for name, value in expected_gradient.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(gradient[name], value, rtol=tolerance, atol=tolerance * largest + 1e-12)


# Norms of these sum in float32 where nothing is said to the contrary (`exact_norms`).
PACKED: dict[str, tuple[Callable[[], CausalModel], float]] = {
    "llama": (llama, 1e-9),
    "tied": (lambda: llama(tie_word_embeddings=True), 1e-9),
    "float32": (lambda: llama(dtype=torch.float32), 1e-5),
    "qwen3": (qwen3, 1e-9),
    "gemma3": (gemma3, 1e-6),
    "phi": (phi, 1e-9),
    "adapter": (lambda: with_adapter(llama()), 1e-9),
}


@pytest.mark.parametrize("budget", [1, 30, 10**6])
@pytest.mark.parametrize("kind", PACKED)
def test_logprobs_and_gradient_are_those_of_each_sequence_alone(kind: str, budget: int) -> None:
    make, tolerance = PACKED[kind]
    policy = Policy(make(), logprob_chunk_tokens=5)

    assert policy.layout is Layout.SHARED
    check(policy, make(), samples_of(MIXED), budget, tolerance)
    check(policy, make(), with_holes(samples_of(MIXED)), budget, tolerance)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 14), min_size=1, max_size=5)), min_size=1, max_size=4
    ),
    st.integers(1, 80),
    st.sampled_from([Layout.PACKED, Layout.SHARED]),
)
def test_any_mix_of_lengths_and_groups_gives_the_same(
    shapes: list[tuple[int, list[int]]], budget: int, layout: Layout
) -> None:
    check(Policy(phi(), logprob_chunk_tokens=100, layout=layout), phi(), samples_of(groups_of(shapes)), budget, 1e-9)


@pytest.mark.parametrize("make", [gpt2, mamba])
def test_model_that_cannot_be_packed_takes_padded_rows_and_says_so_once(make: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)

    with structlog.testing.capture_logs() as logs:
        policy = Policy(model, logprob_chunk_tokens=5)
        check(policy, plain, samples_of(MIXED), 40, 1e-5)

    assert policy.layout is Layout.PADDED
    [event] = [entry for entry in logs if entry["event"] == "micro_batch_layout"]
    assert event["reason"]
    assert event["wanted"] == "shared"


class _Carrying(nn.Module):
    """A layer that sees the token before, whatever sequence that is of."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor, **options: object) -> Tensor:
        answer: Tensor = self.layer(states, **options)
        return answer + 0.1 * answer.roll(1, dims=1)


def test_layer_that_looks_across_segments_is_found_out() -> None:
    model = llama()
    model.model.layers[0] = _Carrying(model.model.layers[0])

    policy = Policy(model, logprob_chunk_tokens=5)

    assert policy.layout is Layout.PADDED
    assert model.config._attn_implementation == "sdpa"


def test_checkpointing_recomputes_the_same_packed_rows() -> None:
    plain, model = llama(), llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(Policy(model, logprob_chunk_tokens=5), plain, samples_of(MIXED), 50, 1e-9)


def test_reference_is_packed_too_and_an_adapter_can_be_switched_off() -> None:
    samples = samples_of(MIXED)
    expected, _ = alone(llama(), samples)
    by_copy = Policy(tiny_llama(3), logprob_chunk_tokens=5, reference=llama())
    by_adapter = Policy(with_adapter(llama()), logprob_chunk_tokens=5)
    for policy in (by_copy, by_adapter):
        for rows, batch in batches_of(samples, 10**6, policy.layout):
            for row, values in zip(rows, policy.reference_logprobs(batch), strict=True):
                torch.testing.assert_close(values[: len(expected[row])], expected[row], rtol=1e-9, atol=1e-9)
    assert isinstance(by_adapter.model, peft.PeftModel)


def test_sampling_masks_belong_to_the_same_tokens_in_every_layout() -> None:
    rows = [with_mask_of(Row(token_ids=[4, 7, 2]), [[4, 6], [7], [1, 2, 3, 12]]), Row(token_ids=[4, 7])]
    samples = samples_of([make_group(rows, prompt=[1, 5, 3, 8], top_p=0.8)])
    policy = Policy(llama(), logprob_chunk_tokens=2)
    values = [policy.logprobs(batch) for layout in Layout for _, batch in batches_of(samples, 100, layout)]
    for other in values[1:]:
        torch.testing.assert_close(other, values[0])


def test_replayed_experts_belong_to_the_same_tokens_in_every_layout() -> None:
    """The trainer's own routers would choose otherwise: they are off by noise."""
    generator = tiny_moe()
    policy = Policy((model := noisy(generator, 0.1)), logprob_chunk_tokens=5, replay=RoutingReplay(model))
    samples = samples_of(recorded_groups(generator, has_logprobs=False))
    found: dict[Layout, list[Tensor]] = {}
    for layout in Layout:
        found[layout] = [torch.zeros(0)] * len(samples)
        for rows, batch in batches_of(samples, 40, layout):
            for row, values in zip(rows, policy.logprobs(batch), strict=True):
                found[layout][row] = values[: len(samples[row].mask)].detach()
    assert policy.layout is Layout.SHARED
    for layout in (Layout.PACKED, Layout.SHARED):
        torch.testing.assert_close(torch.cat(found[layout]), torch.cat(found[Layout.PADDED]), rtol=1e-5, atol=1e-5)


def test_prompts_that_went_to_other_experts_are_not_shared() -> None:
    samples = samples_of(recorded_groups(tiny_moe(), has_logprobs=False))
    routed = samples[0].completion.routed_experts
    assert routed is not None
    other = replace(routed, ids=(routed.ids + 1) % routed.num_experts)
    odd = replace(samples[0], completion=replace(samples[0].completion, routed_experts=other))
    same, mixed = samples[:3], [odd, *samples[1:3]]
    shared = [describe_layout(chosen, [[0, 1, 2]], Layout.SHARED)["shared_prompt_tokens"] for chosen in (same, mixed)]
    assert shared == [2 * len(samples[0].prompt_token_ids), len(samples[0].prompt_token_ids)]


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 30), min_size=1, max_size=5)), min_size=1, max_size=6
    ),
    st.integers(1, 120),
    st.sampled_from([Layout.PACKED, Layout.SHARED]),
)
def test_packed_split_covers_every_sample_once_within_the_budget(
    shapes: list[tuple[int, list[int]]], budget: int, layout: Layout
) -> None:
    samples = samples_of(groups_of(shapes))
    parts = batches_of(samples, budget, layout)

    assert sorted(row for rows, _ in parts for row in rows) == list(range(len(samples)))
    assert all(batch.input_ids.numel() <= budget or len(rows) == 1 for rows, batch in parts)
    described = describe_layout(samples, [rows for rows, _ in parts], layout)
    assert described["forward_tokens"] == sum(batch.input_ids.numel() for _, batch in parts)
    assert described["padding_tokens"] == 0


def test_group_of_equal_lengths_goes_through_the_model_with_one_prompt() -> None:
    samples = samples_of(groups_of([(8, [8] * 8)]))
    [(_, batch)] = batches_of(samples, 1000, Layout.SHARED)
    assert batch.input_ids.shape == (1, 8 + 8 * 7)
    assert describe_layout(samples, [list(range(8))], Layout.PADDED) == {
        "forward_tokens": 128.0,
        "padding_tokens": 0.0,
        "shared_prompt_tokens": 0.0,
    }
