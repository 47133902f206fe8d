"""Generation engines: one prompt group in, its completions out, weights replaced in between.

In: `PromptGroup` and `WeightState`. Out: `Completion`s whose tokens carry the logprobs of the
distribution they were drawn from and the weight version that drew them. An engine never labels a
token by the clock, and never serves weights under a label that is not theirs.

    generate(prompt) --interrupt()--> Interrupted(partial) --> elsewhere: generate(prompt, partial)
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pipeline.messages import Completion, PartialGroup, PromptGroup
from pipeline.weights import WeightState


class Interrupted(Exception):
    """A group was interrupted. partial: what there is of it, what it had been continued from included."""

    def __init__(self, partial: PartialGroup) -> None:
        super().__init__(f"group {partial.prompt.group_id} was interrupted")
        self.partial = partial


class GenerationEngine(Protocol):
    """What a generator needs of an engine.

    All coroutines are called from one event loop; heavy work belongs in a thread or process of
    the engine's own. `generate` is called concurrently for many groups.
    """

    @property
    def weight_version(self) -> int | None:
        """Version that is being served; None until the first `apply_weights`."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are decoded at once."""

    @property
    def num_unfinished_seqs(self) -> int:
        """Sequences accepted and not yet ended, those that wait for a slot included."""

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start; never falls. A watchdog reads it as progress."""

    async def start(self) -> None:
        """Load the model. Raises ModelError."""

    async def generate(self, prompt: PromptGroup, partial: PartialGroup | None = None) -> tuple[Completion, ...]:
        """`prompt.sampling.group_size` completions. Cancelling it frees the sequences.

        partial: of this very prompt, no token newer than the weights being served: what is finished is
        returned as it is, what is not goes on behind its tokens. Raises Interrupted, and EngineError when
        this group failed and others may go on.
        """

    async def interrupt(self) -> None:
        """Every group in flight, and every later one, ends with Interrupted instead of being completed."""

    async def so_far(self) -> list[PartialGroup]:
        """What there is at this moment of every group in flight, for the case that this process ends. All go on."""

    async def apply_weights(self, state: WeightState) -> float:
        """Replace the weights between two decode steps; sequences in flight go on.

        Returns the seconds that generation stood still. On WeightError the old version goes on
        serving under its own label.
        """

    async def close(self) -> None:
        """Stop and free everything. Safe to call twice."""


@runtime_checkable
class SleepingEngine(GenerationEngine, Protocol):
    """An engine that can leave its device to the trainer for a while. No weights are applied while it sleeps."""

    async def sleep(self) -> None:
        """Stop between two steps and free the device: weights and what is needed move to host memory.

        Sequences in flight, and those that are asked for meanwhile, wait.
        """

    async def wake_up(self) -> None:
        """Take the device again; sequences go on from the tokens that they have."""
