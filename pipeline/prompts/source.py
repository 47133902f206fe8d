"""Groups in feeding order, and groups for evaluation.

In: rows, their order, a tokeniser's encode. Out: one `PromptGroup` at a time. A group's id is its
position in the order, rows that are too long keep theirs, so ids never depend on what happened
before and a cursor restores everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pipeline.config import EvaluationSettings
from pipeline.errors import DataError
from pipeline.messages import PromptGroup, SamplingParams, TokenIds
from pipeline.prompts.dataset import Dataset
from pipeline.prompts.encoding import Encode
from pipeline.prompts.order import Order

_CACHED_PROMPTS = 4096


class PromptSource:
    """The training prompts, one group after another.

    cursor: position of the next group in the order; set it to go on from there.
    num_skipped: positions passed over because their prompt is too long.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: Order,
        *,
        encode: Encode,
        sampling: SamplingParams,
        max_prompt_tokens: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.cursor = 0
        self.num_skipped = 0
        self._dataset = dataset
        self._order = order
        self._sampling = sampling
        self._max_prompt_tokens = max_prompt_tokens
        self._clock = clock
        self._token_ids = lru_cache(maxsize=_CACHED_PROMPTS)(lambda index: _token_ids(dataset, index, encode))
        self._too_long: set[int] = set()

    def next_group(self, fed_version: int, min_version: int) -> PromptGroup | None:
        """The group at the cursor, which moves on; None at the end of the data.

        Raises DataError when every row is too long.
        """
        while (place := self._order.at(self.cursor)) is not None:
            ordinal, (epoch, index) = self.cursor, place
            self.cursor += 1
            if self._fits(index):
                row = self._dataset[index]
                return PromptGroup(
                    group_id=f"{ordinal:08d}",
                    ordinal=ordinal,
                    dataset_index=index,
                    epoch=epoch,
                    prompt=row.prompt,
                    prompt_token_ids=self._token_ids(index),
                    columns=row.columns,
                    sampling=self._sampling,
                    fed_version=fed_version,
                    min_version=min_version,
                    hops={"fed": self._clock()},
                )
            self.num_skipped += 1
        return None

    def _fits(self, index: int) -> bool:
        if index in self._too_long:
            return False
        if len(self._token_ids(index)) <= self._max_prompt_tokens:
            return True
        self._too_long.add(index)
        if len(self._too_long) == len(self._dataset):
            raise _all_too_long(self._dataset, self._max_prompt_tokens)
        return False


def evaluation_groups(
    dataset: Dataset,
    encode: Encode,
    settings: EvaluationSettings,
    weight_version: int,
    *,
    sampling: SamplingParams,
    max_prompt_tokens: int,
    clock: Callable[[], float] = time.time,
) -> list[PromptGroup]:
    """Held-out prompts for one version, in the order of the file; too long ones are left out.

    sampling: as in training; group size and temperature come from `settings`. Raises DataError
    when none is left.
    """
    number = settings.num_prompts or len(dataset)
    sampling = _sampling_of_evaluation(sampling, settings)
    encoded = ((index, _token_ids(dataset, index, encode)) for index in range(min(number, len(dataset))))
    groups = [
        PromptGroup(
            group_id=f"eval-{weight_version}-{index}",
            ordinal=index,
            dataset_index=index,
            epoch=0,
            prompt=dataset[index].prompt,
            prompt_token_ids=token_ids,
            columns=dataset[index].columns,
            sampling=sampling,
            fed_version=weight_version,
            min_version=weight_version,
            is_evaluation=True,
            hops={"fed": clock()},
        )
        for index, token_ids in encoded
        if len(token_ids) <= max_prompt_tokens
    ]
    if not groups:
        raise _all_too_long(dataset, max_prompt_tokens)
    return groups


def _sampling_of_evaluation(sampling: SamplingParams, settings: EvaluationSettings) -> SamplingParams:
    """Nothing is kept for a replay: these completions are never trained on."""
    return replace(
        sampling,
        group_size=settings.group_size,
        temperature=settings.temperature,
        keep_sampling_mask=False,
        keep_routed_experts=False,
    )


def prompt_lengths(dataset: Dataset, encode: Encode) -> list[int]:
    """Tokens of every prompt, in the order of the file. Raises DataError, ConfigError."""
    return [len(_token_ids(dataset, index, encode)) for index in range(len(dataset))]


def _token_ids(dataset: Dataset, index: int, encode: Encode) -> TokenIds:
    try:
        token_ids = encode(dataset[index].prompt)
    except DataError as error:
        raise DataError(f"{dataset.where(index)}: {error}") from error
    if not token_ids:
        raise DataError(f"{dataset.where(index)}: the prompt has no tokens; remove the row")
    return np.array(token_ids, dtype=np.uint32)


def _all_too_long(dataset: Dataset, max_prompt_tokens: int) -> DataError:
    return DataError(
        f"{dataset.name}: every prompt is longer than {max_prompt_tokens} tokens, nothing is left to generate from; "
        "raise data.max_prompt_tokens or model.max_context, lower generation.max_tokens, or shorten the prompts"
    )
