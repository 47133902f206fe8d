"""What a worker's own endpoint says of it.

In: an address. Out: the text that Prometheus would get, and totals of its series, all of one moment.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """All metrics of a worker at one moment: what is compared has to come from one."""

    samples: Sequence[Sample]

    def total(self, name: str, **labels: str) -> float:
        """The sum of one metric's series, over labels that are not given."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())


async def served_at(address: str) -> Served:
    """The metrics behind host:port."""
    families = text_string_to_metric_families(await text_at(address))
    return Served([sample for family in families for sample in family.samples])


async def text_at(address: str) -> str:
    """The same as it is written."""
    return await asyncio.to_thread(_get, f"http://{address}/metrics")


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_DEADLINE_S) as answer:
        return str(answer.read().decode())
