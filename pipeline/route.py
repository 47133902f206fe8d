"""The way of a group: which streams a run uses, and where each stage hands on to.

In: what scores the groups of a run. Out: streams, in order of flow. Rules come first, then teachers,
then judges; a group that has passed one stage waits for none but the next.
"""

from __future__ import annotations

from pipeline.config import ScoringSettings
from pipeline.keys import TAKEN_BY, Stream


def streams_of(scoring: ScoringSettings) -> tuple[Stream, ...]:
    """The streams that groups pass, in order of flow."""
    unused = set()
    if not scoring.teachers:
        unused.add(Stream.TO_TEACH)
    if not scoring.judges:
        unused.add(Stream.TO_JUDGE)
    return tuple(stream for stream in Stream if stream not in unused)


def stages_of(scoring: ScoringSettings) -> tuple[str, ...]:
    """The roles that take from them."""
    return tuple(TAKEN_BY[stream] for stream in streams_of(scoring))


def next_stream(scoring: ScoringSettings, source: Stream, *, is_evaluation: bool) -> Stream:
    """Where a group goes that has passed the stage of `source`. Held-out groups need no teacher."""
    skipped = {Stream.TO_TEACH} if is_evaluation else set()
    way = [stream for stream in Stream if stream in streams_of(scoring) and stream not in skipped]
    return next(stream for stream in way if list(Stream).index(stream) > list(Stream).index(source))
