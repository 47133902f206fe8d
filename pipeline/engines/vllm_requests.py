"""What a request to vLLM says, whether it is in this process or at the other end of a connection.

In: a prompt group and which of its completions is meant. Out: plain values of vLLM's
`SamplingParams`. Both engines draw with the same values, and from the same seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.errors import EngineError
from pipeline.messages import PromptGroup


def sampling_values(
    prompt: PromptGroup, index: int, *, so_far: int, max_tokens: int, end_ids: Sequence[int]
) -> dict[str, Any]:
    """Arguments of `SamplingParams` for completion `index`, of which `so_far` tokens are there."""
    sampling = prompt.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": max_tokens,
        "seed": _seed(sampling.seed, prompt.ordinal, index, so_far) if sampling.temperature > 0 else None,
        "stop": list(sampling.stop),
        "stop_token_ids": list(end_ids),
        "logprobs": 0,  # of the token that was drawn, and of no other
        "detokenize": bool(sampling.stop),
    }


def token_limit(prompt: PromptGroup, context: int) -> int:
    """Tokens that a completion may have. Raises EngineError where the context leaves none."""
    num_prompt_tokens = len(prompt.prompt_token_ids)
    room = context - num_prompt_tokens
    if not num_prompt_tokens or room < 1:
        raise EngineError(
            f"group {prompt.group_id}: a prompt of {num_prompt_tokens} tokens leaves nothing to generate "
            f"in a context of {context}"
        )
    return min(prompt.sampling.max_tokens, room)


def completion_text(tokenizer: Any, token_ids: Sequence[int], stop_text: str) -> str:
    """What the tokens say, up to the text that ended them."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.partition(stop_text)[0] if stop_text else text


def _seed(seed: int, ordinal: int, index: int, so_far: int) -> int:
    """A seed of 63 bits for one request, different for each."""
    state = np.random.SeedSequence([seed & (2**64 - 1), ordinal, index, so_far]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
