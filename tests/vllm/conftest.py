"""Real vLLM engines on tiny models. One takes half a minute to start, so the tests of a module share one.

No test needs another: whichever comes first finds an engine with weights, also after one that ended it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from pipeline.config import Config, LoraSettings, ModelSettings
from pipeline.engines.vllm import VllmEngine
from pipeline.engines.vllm_options import installed_version
from pipeline.errors import EngineError
from pipeline.messages import Completion, PromptGroup
from tests.engines.conftest import group_of, load, plain_logits
from tests.tiny import make_tiny_model
from tests.vllm.history import History

STARTS_S = 300  # one engine on a busy machine


def pytest_itemcollected(item: pytest.Item) -> None:
    """Without vLLM these are skipped; `make setup-vllm` brings it."""
    if Path(__file__).parent in item.path.parents:
        item.add_marker(pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed"))
        item.add_marker(pytest.mark.timeout(STARTS_S))
        # What vLLM warns of is its own affair.
        item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_sessionfinish() -> None:
    """What vLLM leaves open, and the log of a test has held, is found here; pytest would take it for an error."""
    with warnings.catch_warnings(action="default"):
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """One core for vLLM and one for us; more would spin against each other."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        yield


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with heads of 32, whose output head is its embedding: the case that goes wrong most easily."""
    return make_tiny_model(tmp_path_factory.mktemp("tied"), tie=True, hidden_size=128)


@asynccontextmanager
async def started(
    path: Path, *, lora: LoraSettings | None = None, max_staleness: int = 2, **generation: Any
) -> AsyncIterator[VllmEngine]:
    """An engine on the CPU with one thread, without weights that it may serve."""
    config = Config.model_validate(
        {
            "model": {"path": str(path)},
            "lora": (lora or LoraSettings()).model_dump(),
            "staleness": {"max_staleness": max_staleness},
            "generation": {"engine": "vllm", "device": "cpu", "num_threads": 1, "max_num_seqs": 32} | generation,
        }
    )
    engine = VllmEngine(config)
    await engine.start()
    client = engine._llm.engine_core
    try:
        yield engine
    finally:
        await engine.close()
        assert client.resources.ctx.closed, "or it would be closed, with a warning, when the collector finds it"


class Kept:
    """The engine of a module and all that it was given. refusal: what it said when it had no weights yet."""

    def __init__(self, start: Callable[[], AbstractAsyncContextManager[VllmEngine]], history: History) -> None:
        self.refusal = ""
        self._start, self._history = start, history
        self._stack = AsyncExitStack()
        self._engine: VllmEngine | None = None

    async def engine(self) -> VllmEngine:
        """It serves the newest weights of the history; started where there is none."""
        if self._engine is None:
            self._engine = await self._stack.enter_async_context(self._start())
            assert self._engine.weight_version is None
            with pytest.raises(EngineError) as caught:
                await self._engine.generate(group_of([5, 6, 7]))
            self.refusal = str(caught.value)
        if self._engine.weight_version is None:
            newest = self._history.newest
            await self._engine.apply_weights(self._history.next() if newest < 0 else self._history.state(newest))
        return self._engine

    async def end(self) -> None:
        """Close it; who asks next gets another."""
        self._engine = None
        await self._stack.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(kept: Kept) -> VllmEngine:
    """The module's engine, with the newest weights of its history. The module says which: its fixture `kept`."""
    return await kept.engine()


@pytest_asyncio.fixture(loop_scope="module")
async def last_engine(kept: Kept) -> AsyncIterator[VllmEngine]:
    """The same, for a test that ends it."""
    try:
        yield await kept.engine()
    finally:
        await kept.end()


def trainer_model(path: Path, lora: LoraSettings | None = None) -> torch.nn.Module:
    """The trainer's copy."""
    return load(ModelSettings(path=str(path)), lora)


def drawn_logprobs(model: torch.nn.Module, prompt: PromptGroup, completion: Completion) -> np.ndarray[Any, Any]:
    """Logprobs of the completion's tokens by one plain forward pass, [T]."""
    logprobs = plain_logits(model, prompt, completion).log_softmax(-1)
    ids = torch.from_numpy(completion.token_ids.astype(np.int64))
    return logprobs.gather(1, ids[:, None])[:, 0].numpy()


def largest_gap(
    model_of: Callable[[int], torch.nn.Module], prompt: PromptGroup, completions: tuple[Completion, ...]
) -> float:
    """Largest difference between what vLLM reports and what the model of each token's version gives."""
    gap = 0.0
    for completion in completions:
        versions = completion.token_versions
        for version in set(versions.tolist()):
            there = versions == version
            expected = drawn_logprobs(model_of(version), prompt, completion)
            gap = max(gap, float(np.abs(expected - completion.generator_logprobs)[there].max()))
    return gap
