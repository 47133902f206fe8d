"""Everything that reads bytes of unknown origin: what it may say of them, and examples to begin from.

In: bytes. Out: nothing; what is not refused with the decoder's own error rises. Objects that are sealed get their true
hash first, or no change to them would get past it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pipeline.errors import MessageError, WeightError
from pipeline.messages import PartialGroup, PromptGroup, RolloutGroup, ScoredGroup, TopLogprobs
from pipeline.weights.codec import Encoder
from pipeline.weights.manifest import decode_manifest
from pipeline.weights.patches import decode_table
from pipeline.weights.sealed import HASH_BYTES, digest
from pipeline.weights.store.pointer import Pointer, Step, decode_pointer, encode_pointer
from pipeline.wire import decode, encode
from tests.groups import make_prompt, make_rollout, make_scored
from tests.weights.drift import drifted

MAX_BYTES = 1 << 20

Reader = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Target:
    """read: takes whatever bytes. example: bytes that it reads without a complaint."""

    read: Callable[[bytes], object]
    example: bytes


def targets() -> Mapping[str, Target]:
    """By name."""
    prompt = make_prompt(columns={"answer": [1, None, {"a": 2.5}]})
    messages = {
        "prompt": (PromptGroup, encode(prompt)),
        "rollout": (RolloutGroup, encode(make_rollout(prompt))),
        "scored": (ScoredGroup, encode(_with_top(make_scored(prompt, [1.0, None])))),
        "partial": (PartialGroup, encode(PartialGroup(prompt=prompt, finished={}, unfinished={}))),
    }
    encoder = Encoder(session=bytes(16), tile_bytes=16_384)
    items = [encoder.encode(drifted(version)) for version in (0, 1)]
    patches = encoder.compare(*items)
    assert patches is not None
    manifest = items[1].manifest
    step = Step(base_version=0, base_root=items[0].manifest.root, weight_version=1, root=manifest.root, num_bytes=9)
    pointer = Pointer(session=bytes(16), weight_version=1, root=manifest.root, file_bytes=4096, steps=(step,))
    sealed: dict[str, tuple[Callable[[bytes], object], bytes]] = {
        "manifest": (lambda data: decode_manifest(data, max_model_bytes=MAX_BYTES), items[1].payload),
        "table": (lambda data: decode_table(data, manifest), patches.payload),
        "pointer": (decode_pointer, encode_pointer(pointer)),
    }
    return {
        **{name: Target(_message(kind), example) for name, (kind, example) in messages.items()},
        **{name: Target(_sealed(read), example[HASH_BYTES:]) for name, (read, example) in sealed.items()},
    }


def _with_top(group: ScoredGroup) -> ScoredGroup:
    length = len(group.rollout.completions[0])
    ids, logprobs = np.tile(np.arange(3, dtype=np.uint32), (length, 1)), np.full((length, 3), -2, dtype=np.float32)
    top = (TopLogprobs(token_ids=ids, logprobs=logprobs),)
    return replace(group, scores=(replace(group.scores[0], teacher_top=top), *group.scores[1:]))


def _message(kind: type[PromptGroup] | type[RolloutGroup] | type[ScoredGroup] | type[PartialGroup]) -> Reader:
    def read(data: bytes) -> object:
        try:
            return decode(data, kind, max_bytes=MAX_BYTES)
        except MessageError:
            return None

    return read


def _sealed(decoder: Reader) -> Reader:
    def read(data: bytes) -> object:
        try:
            return decoder(digest(data) + data)
        except WeightError:
            return None

    return read
