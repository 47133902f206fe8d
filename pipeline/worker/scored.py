"""What a stage that scores hands on.

In: a scored group. Out: its entry for the next stream.
"""

from __future__ import annotations

from pipeline.messages import ScoredGroup
from pipeline.streams import Entry, Lease
from pipeline.wire import encode


def entry_of(lease: Lease, group: ScoredGroup) -> Entry:
    """It, under the oldest version of its tokens."""
    rollout = group.rollout
    return Entry(
        group_id=lease.group_id,
        weight_version=min(completion.spans[0].weight_version for completion in rollout.completions),
        payload=encode(group),
        is_evaluation=rollout.prompt.is_evaluation,
    )
