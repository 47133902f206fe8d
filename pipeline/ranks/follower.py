"""A rank that computes what rank 0 tells it to, and knows nothing of queues.

In: orders. Out: its part of a step, of weights that are gathered, of a state that is loaded. It ends when it
is told to, or when rank 0 is gone.
"""

from __future__ import annotations

from pipeline.config import Config
from pipeline.learner.policy import PolicyLearner
from pipeline.messages import ScoredGroup
from pipeline.ranks.orders import Order, Work
from pipeline.ranks.world import World, collective
from pipeline.wire import decode


def follow(config: Config, world: World) -> None:
    """Until rank 0 says that it is over. Raises RankLostError when rank 0, or another rank, has ended."""
    learner: PolicyLearner | None = None
    world.use_device()
    while (order := Order.decode(world.hear())).work is not Work.STOP:
        with collective():
            if order.work is Work.BUILD:
                learner = PolicyLearner.create(config, world)
                continue
            assert learner is not None, f"{order.work} before {Work.BUILD}"
            _obey(order, learner, world, config.queues.max_payload_bytes)


def _obey(order: Order, learner: PolicyLearner, world: World, max_bytes: int) -> None:
    match order.work:
        case Work.STEP:
            groups = [decode(world.hear(), ScoredGroup, max_bytes=2 * max_bytes) for _ in range(order.num_groups)]
            learner.step(groups, trainer_version=order.version)
        case Work.EXPORT:
            learner.export_weights(0)
        case Work.SNAPSHOT:
            learner.snapshot()
        case Work.STATE:
            learner.state_dict()
        case Work.MODEL:
            learner.model_snapshot()
        case Work.LOAD:
            learner.load_state_dict({})
        case Work.LEAVE_DEVICE:
            learner.leave_device()
