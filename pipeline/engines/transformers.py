"""The default engine: any Hugging Face causal language model, on CPU or GPU, decoded in a thread.

In: prompt groups and weights, from one event loop. Out: completions. The thread owns the model; the
event loop sends it commands and never waits for it. What is sent in one tick of the loop arrives
together, so groups submitted together join the same decode step.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pipeline.config import GenerationSettings, LoraSettings, ModelSettings
from pipeline.engines import Interrupted
from pipeline.engines.architecture import check_architecture, end_token_ids
from pipeline.engines.decoding import Decoder, Outcome
from pipeline.engines.rows import GroupTask
from pipeline.errors import EngineError
from pipeline.messages import Completion, PartialGroup, PromptGroup
from pipeline.models.loading import context_length, load_model, load_tokenizer, resolve_device, resolve_dtype
from pipeline.models.routing import RoutingRecorder
from pipeline.models.weights import stage_weights
from pipeline.weights import WeightState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Command = Callable[[], None]


class TransformersEngine:
    """A `GenerationEngine` around `Decoder`. seed: of an adapter's initial weights."""

    def __init__(self, model: ModelSettings, lora: LoraSettings, generation: GenerationSettings, *, seed: int) -> None:
        # The cache hands out rows through masks, which only these two implementations take.
        attention = "eager" if model.attention == "eager" else "sdpa"
        self._model_settings = model.model_copy(update={"attention": attention})
        self._lora, self._generation, self._seed = lora, generation, seed
        self._model: torch.nn.Module | None = None
        self._decoder: Decoder | None = None
        self._thread: _DecodeThread | None = None
        self._context = 0
        self._futures: dict[GroupTask, asyncio.Future[tuple[Completion, ...]]] = {}
        self._updates: set[asyncio.Future[float]] = set()
        # As the event loop has heard of it. The thread's own changes at any moment, and whoever asks for two
        # groups in one tick would hear two answers.
        self._version: int | None = None
        self._outbox: list[_Command] = []
        self._is_interrupted = False

    @property
    def weight_version(self) -> int | None:
        """Version that is being served; None until the first `apply_weights`."""
        return self._version if self._decoder else None

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that is being served, to be looked at only; None before `start`."""
        return self._model

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are decoded at once."""
        return self._generation.max_num_seqs

    @property
    def num_unfinished_seqs(self) -> int:
        """Sequences accepted and not yet ended."""
        return sum(task.size - len(task.completions) for task in self._futures)

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start."""
        return self._decoder.num_tokens_generated if self._decoder else 0

    async def start(self) -> None:
        """Load the model and start the thread. Raises ModelError or ConfigError."""
        self._model, decoder = await asyncio.to_thread(self._load)
        loop = asyncio.get_running_loop()

        def deliver(outcomes: list[Outcome]) -> None:
            try:
                loop.call_soon_threadsafe(self._resolve, outcomes)
            except RuntimeError:
                if not loop.is_closed():
                    raise

        self._decoder = decoder
        self._thread = _DecodeThread(decoder, deliver, self._generation.num_threads)
        self._thread.start()

    async def generate(self, prompt: PromptGroup, partial: PartialGroup | None = None) -> tuple[Completion, ...]:
        """`prompt.sampling.group_size` completions. Raises EngineError or Interrupted."""
        decoder = self._running()
        if self.weight_version is None:
            raise EngineError("no verified weights are being served yet; apply_weights comes first")
        task = GroupTask(prompt=prompt, limit=self._limit(prompt), partial=partial)
        if not task.waiting:
            return tuple(task.completions[index] for index in range(task.size))
        if self._is_interrupted:
            raise Interrupted(task.left({}))
        future: asyncio.Future[tuple[Completion, ...]] = asyncio.get_running_loop().create_future()
        self._futures[task] = future
        self._send(lambda: decoder.submit(task))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(lambda: decoder.cancel(task))
            raise
        finally:
            self._futures.pop(task, None)

    async def interrupt(self) -> None:
        """End what is in flight with what there is of it."""
        decoder, self._is_interrupted = self._running(), True
        self._send(decoder.interrupt)

    async def so_far(self) -> list[PartialGroup]:
        """What there is of the groups in flight, as of a moment between two steps."""
        decoder, found = self._running(), list[PartialGroup]()
        await self._in_thread(lambda: found.extend(decoder.so_far()))
        return found

    async def apply_weights(self, state: WeightState) -> float:
        """Check everything while generation goes on, then copy between two steps; see the protocol."""
        self._running()
        assert self._model is not None
        staged = await asyncio.to_thread(stage_weights, self._model, state)
        decoder = self._running()
        try:
            return await self._in_thread(lambda: decoder.replace_weights(staged, state.weight_version))
        finally:
            self._version = decoder.weight_version

    async def sleep(self) -> None:
        """Leave the device between two steps, with weights, keys and values."""
        await self._in_thread(self._running().sleep)

    async def wake_up(self) -> None:
        """Take the device again and go on."""
        await self._in_thread(self._running().wake_up)

    async def close(self) -> None:
        """Stop the thread; what is still in flight ends with EngineError."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            await asyncio.to_thread(thread.join)
        self._model = self._decoder = None
        unanswered: list[asyncio.Future[Any]] = [*self._futures.values(), *self._updates]
        for future in unanswered:
            if not future.done():
                future.set_exception(EngineError("the engine was closed"))

    def _load(self) -> tuple[torch.nn.Module, Decoder]:
        settings = self._generation
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        device = resolve_device(settings.device)
        tokenizer = load_tokenizer(self._model_settings)
        model: Any = load_model(
            self._model_settings,
            self._lora,
            device=device,
            dtype=resolve_dtype(settings.dtype, device),
            seed=self._seed,
            trainable=False,
        )
        self._context = context_length(self._model_settings, model.config)
        recorder = RoutingRecorder(model) if settings.replay_routing else None
        check_architecture(model, tokenizer, context=self._context)
        return model, self._decoder_for(model, tokenizer, recorder)

    def _decoder_for(self, model: Any, tokenizer: PreTrainedTokenizerBase, recorder: RoutingRecorder | None) -> Decoder:
        return Decoder(
            model,
            tokenizer,
            end_ids=end_token_ids(model, tokenizer),
            max_num_seqs=self._generation.max_num_seqs,
            recorder=recorder,
        )

    async def _in_thread(self, work: _Command) -> float:
        """Do it between two steps; returns the seconds that generation stood still."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[float] = loop.create_future()
        self._updates.add(done)
        self._send(lambda: _do(work, loop, done))
        try:
            return await done
        finally:
            self._updates.discard(done)

    def _running(self) -> Decoder:
        if self._thread is None or self._decoder is None:
            raise EngineError("the engine is not running")
        return self._decoder

    def _limit(self, prompt: PromptGroup) -> int:
        num_prompt_tokens = len(prompt.prompt_token_ids)
        room = self._context - num_prompt_tokens
        if not num_prompt_tokens or room < 1:
            raise EngineError(
                f"group {prompt.group_id}: a prompt of {num_prompt_tokens} tokens leaves nothing to generate "
                f"in a context of {self._context}"
            )
        return min(prompt.sampling.max_tokens, room)

    def _send(self, command: _Command) -> None:
        """Commands of one tick of the event loop reach the thread together, at its end."""
        self._outbox.append(command)
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if self._thread is not None:
            self._thread.send(commands)

    def _resolve(self, outcomes: list[Outcome]) -> None:
        for task, outcome in outcomes:
            future = self._futures.get(task)
            if future is None or future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


def _do(work: _Command, loop: asyncio.AbstractEventLoop, done: asyncio.Future[float]) -> None:
    """Runs in the decode thread; the answer is the time that generation stood still."""
    started = time.perf_counter()
    try:
        work()
    except Exception as error:  # noqa: BLE001  it rises where the work was asked for
        loop.call_soon_threadsafe(_settle, done, error)
        return
    loop.call_soon_threadsafe(_settle, done, time.perf_counter() - started)


def _settle(done: asyncio.Future[float], outcome: float | Exception) -> None:
    if done.done():
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


class _DecodeThread(threading.Thread):
    """Runs commands between decode steps, and sleeps while there is neither work nor a command."""

    def __init__(self, decoder: Decoder, deliver: Callable[[list[Outcome]], None], num_threads: int) -> None:
        super().__init__(name="decode", daemon=True)
        self._decoder, self._deliver, self._num_threads = decoder, deliver, num_threads
        self._commands: list[_Command] = []
        self._changed = threading.Condition()
        self._is_stopping = False

    def send(self, commands: list[_Command]) -> None:
        """Run these before the next step, in order."""
        with self._changed:
            self._commands += commands
            self._changed.notify()

    def stop(self) -> None:
        """End after the current step."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Commands, a step, outcomes; until stopped."""
        if self._num_threads:
            torch.set_num_threads(self._num_threads)  # each thread of Python has a number of its own
        while not self._is_stopping:
            for command in self._next_commands():
                command()
            self._decoder.step()
            outcomes = self._decoder.take_outcomes()
            if outcomes:
                self._deliver(outcomes)

    def _next_commands(self) -> list[_Command]:
        with self._changed:
            while not (self._commands or self._decoder.has_work or self._is_stopping):
                self._changed.wait()
            commands, self._commands = self._commands, []
            return commands
