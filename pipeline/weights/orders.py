"""The pieces of one transfer that are on order at a publisher, never more than it was granted credits for."""

from __future__ import annotations

from pipeline.weights.link import Answer, Link
from pipeline.weights.protocol import Kind
from pipeline.weights.subscriber_stats import SubscriberStats
from pipeline.weights.throttle import Throttle
from pipeline.weights.transfer import Transfer


class Orders:
    """Orders over one link. stats: counts what was lost and what was wrong."""

    def __init__(
        self, link: Link, transfer: Transfer, *, credits: int, throttle: Throttle, stats: SubscriberStats
    ) -> None:
        self._link = link
        self._transfer = transfer
        self._credits = credits
        self._throttle = throttle
        self._stats = stats
        self._pieces: dict[int, int] = {}  # by request, in the order of the requests

    async def top_up(self) -> None:
        """Order what is missing, as far as credits reach."""
        version, key = self._transfer.manifest.weight_version, self._transfer.key
        while len(self._pieces) < self._credits and (index := self._transfer.next_missing()) is not None:
            try:
                await self._throttle.admit(self._transfer.piece_size(index))
                number = await self._link.request(self._transfer.request, version=version, index=index, root=key)
            except BaseException:
                self._transfer.put_back([index])
                raise
            self._pieces[number] = index

    def are_refused_by(self, answer: Answer) -> bool:
        """Whether the publisher no longer has what was ordered."""
        return answer.header.kind is Kind.ERROR and answer.header.request in self._pieces

    def are_met_by(self, answer: Answer) -> bool:
        """Whether this brings something that was ordered."""
        return answer.header.kind is self._transfer.answer and answer.header.request in self._pieces

    async def take(self, answer: Answer) -> None:
        """Verify one piece. Answers come in the order of the requests: what was passed over is lost."""
        number = answer.header.request
        is_right = await self._transfer.accept(self._pieces[number], answer.payload)
        passed_over = [earlier for earlier in self._pieces if earlier < number]
        self._stats.num_lost_tiles += len(passed_over)
        self._stats.num_corrupt_tiles += not is_right
        again = [*passed_over] if is_right else [*passed_over, number]
        self._transfer.put_back([self._pieces[request] for request in again])
        for request in (*passed_over, number):
            del self._pieces[request]

    def close(self) -> None:
        """What has not come has to be ordered again."""
        self._transfer.put_back(self._pieces.values())
