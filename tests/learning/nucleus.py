"""Completions sampled by top-p, with the sampler written here."""

from __future__ import annotations

import math

import torch
from transformers import LlamaForCausalLM

from pipeline.messages import ScoredGroup
from tests.learning.builders import Row, make_group, with_mask_of


def nucleus_group(model: LlamaForCausalLM, *, is_replayed: bool) -> ScoredGroup:
    """Two completions of 6 tokens by top-p 0.8 at temperature 0.6; with or without the sampling mask."""
    random = torch.Generator().manual_seed(0)
    rows = []
    for reward in (0.0, 1.0):
        ids, logprobs, kept = [1, 5, 3], [], []
        for _ in range(6):
            probabilities = (model(input_ids=torch.tensor([ids])).logits[0, -1] / 0.6).softmax(-1).detach()
            values, order = probabilities.sort(descending=True)
            nucleus = order[: int((values.cumsum(0) - values < 0.8).sum())]
            renormalised = probabilities[nucleus] / probabilities[nucleus].sum()
            drawn = int(torch.multinomial(renormalised, 1, generator=random))
            ids.append(int(nucleus[drawn]))
            logprobs.append(math.log(renormalised[drawn]))
            kept.append(nucleus.tolist())
        row = Row(token_ids=ids[3:], reward=reward, generator_logprobs=logprobs)
        rows.append(with_mask_of(row, kept) if is_replayed else row)
    return make_group(rows, temperature=0.6, top_p=0.8)
