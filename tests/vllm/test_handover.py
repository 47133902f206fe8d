"""A generator in front of a real vLLM server is drained in mid-sequence: another goes on from what it had.

Scenario E3. The first weights never draw an end and the second do soon, so that nothing here depends on how fast the
server is: it would have to draw tens of thousands of tokens while one request to break them off is on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from pipeline.config import ModelSettings
from pipeline.engines.openai import OpenAiEngine
from pipeline.messages import FinishReason
from tests.engines.conftest import group_of, load, state_of
from tests.engines.test_interrupted import assert_goes_on, interrupted
from tests.tiny import SPECIAL, VOCABULARY, make_tiny_model
from tests.vllm.answers import assert_drawn_by, config_for
from tests.vllm.server import Server

pytest.importorskip("aiohttp")

CONTEXT, MAX_TOKENS, END = 16_384, 16_000, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    path = make_tiny_model(tmp_path_factory.mktemp("long"), hidden_size=128, max_context=CONTEXT)
    return ModelSettings(path=str(path))


@pytest.fixture(scope="module")
def server(model: ModelSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(model, tmp_path_factory.mktemp("server") / "log")
    try:
        started.wait_until_healthy()
        yield started
    finally:
        started.kill()


def endless(model: ModelSettings) -> torch.nn.Module:
    """It prefers any token to the end by many orders of magnitude."""
    trainer = load(model)
    with torch.no_grad():
        trainer.lm_head.weight.mul_(3)
        trainer.lm_head.weight[END] = 0
    return trainer


def uniform(model: ModelSettings) -> torch.nn.Module:
    """To it all tokens are the same."""
    trainer = load(model)
    with torch.no_grad():
        trainer.model.norm.weight.zero_()
    return trainer


async def test_what_a_drained_generator_had_of_a_server_goes_on_from_the_exact_prefix(
    server: Server, model: ModelSettings
) -> None:
    first, second = (OpenAiEngine(config_for(model, server.url)) for _ in range(2))
    group = group_of([4, 5, 6], max_tokens=MAX_TOKENS)
    try:
        await first.start()
        await first.apply_weights(state_of(endless(model), 0))
        (partial,) = (await interrupted(first, group, after=20)).values()
        await first.close()
        assert [*partial.unfinished] == [0, 1, 2, 3]
        assert partial.num_tokens >= 20
        for begun in partial.unfinished.values():
            assert set(begun.token_versions) == {0}
            # Its logits are three times as large as others, and so is what rounding makes of them.
            assert_drawn_by(endless(model), group, begun, tolerance=3e-4)
        await second.start()
        await second.apply_weights(state_of(uniform(model), 1))
        completions = await second.generate(group, partial)
    finally:
        await first.close()
        await second.close()
    assert_goes_on(partial, completions)
    assert second.num_tokens_generated == sum(map(len, completions)) - partial.num_tokens
    for index, completion in enumerate(completions):
        num_begun = len(partial.unfinished[index])
        assert [(span.weight_version, span.first_token) for span in completion.spans] == [(0, 0), (1, num_begun)]
        assert completion.finish_reason is FinishReason.STOP
        expected = -math.log(len(SPECIAL) + len(VOCABULARY))
        assert completion.generator_logprobs[num_begun:] == pytest.approx(expected, abs=1e-4)
