"""A rank of the trainer besides rank 0: it computes what rank 0 tells it to.

    follow      orders, groups of a step -> its part of gradients and weights   waits for: rank 0

It knows neither Redis nor generators, and has no port. The first signal leaves the end to rank 0, which
gets one too and drains; the second ends it at once. With rank 0, or another rank, gone it ends by itself: where
rank 0 has started it at once, whatever it does, and else when a connection breaks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from pipeline.config import Config
from pipeline.errors import RollstreamError
from pipeline.learner import Learner, load_learner
from pipeline.logs import configure, get_logger, masked
from pipeline.ranks.crew import started
from pipeline.ranks.place import Place, place_of
from pipeline.worker.shutdown import PARENT_VARIABLE, expected_parent

if TYPE_CHECKING:
    from pipeline.ranks.world import World

_LOOK_EVERY_S = 0.5

Result = TypeVar("Result")


class _InThread(threading.Thread, Generic[Result]):
    """Work that waits where Python hears no signals; the main thread hears them meanwhile."""

    def __init__(self, work: Callable[[], Result]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error

    def result(self) -> Result:
        """Start, and wait for the end."""
        self.start()
        self.join()
        if self._error is not None:
            raise self._error
        return self._results[0]


def join(config: Config, place: Place) -> World:
    """Meet the other ranks, once torch is loaded. Raises ConfigError, RankLostError."""
    from pipeline.ranks.world import World

    # Whoever has started the ranks ends them; one whose starter is gone drains, as any worker does. Until it has
    # joined it has nothing to drain, and may wait in vain for others that are gone as well.
    os.environ.setdefault(PARENT_VARIABLE, str(os.getppid()))
    with _ending_with_its_parent():
        return _InThread(lambda: World.join(place, config.trainer)).result()


@contextlib.contextmanager
def _ending_with_its_parent() -> Iterator[None]:
    """Ends this process in the block when the one that started it is gone, whatever it waits for or computes."""
    parent, is_over = expected_parent(), threading.Event()

    def watch() -> None:
        while parent in {None, os.getppid()}:
            if is_over.wait(_LOOK_EVERY_S):
                return
        with contextlib.suppress(OSError):
            sys.stderr.write("error: the process that started this rank of the trainer is gone\n")
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def lead(config: Config, place: Place, train: Callable[[Callable[[Config], Learner]], int]) -> int:
    """Rank 0: what `train` gives, with the others, if any, behind the learner that it loads. Raises ConfigError."""
    if place.size > 1:
        return _lead(config, place, train)
    if config.trainer.num_ranks == 1:
        return train(load_learner)
    with started(config) as (our_place, crew):
        code = _lead(config, our_place, train, before_the_end=crew.expect_end)
        return code or int(crew.has_lost)


def _lead(
    config: Config,
    place: Place,
    train: Callable[[Callable[[Config], Learner]], int],
    before_the_end: Callable[[], None] = lambda: None,
) -> int:
    world = join(config, place)
    from pipeline.ranks.leader import LeadingLearner, dismiss

    try:
        return train(partial(LeadingLearner.create, world=world))
    finally:
        before_the_end()
        dismiss(world)


def main(config: Config, place: Place) -> int:
    """Exit code of a rank other than 0."""
    configure(config.worker, "trainer", f"trainer-rank-{place.rank}")
    try:
        has_joined = _signals()
        world = join(config, place)
        has_joined.set()
        get_logger().info("rank_joined", rank=place.rank, num_ranks=place.size, device=str(world.device))
        from pipeline.ranks.follower import follow

        _InThread(lambda: follow(config, world)).result()
        world.leave()
    except RollstreamError as error:
        get_logger().error("rank_failed", rank=place.rank, error=str(error))
        with contextlib.suppress(OSError):  # the exit code says it, too
            sys.stderr.write(f"error: {masked(' '.join(str(error).split()))}\n")
        return error.exit_code
    except Exception:  # noqa: BLE001 - the last word of a process is its exit code
        get_logger().exception("rank_crashed", rank=place.rank)
        return 1
    return 0


def _signals() -> threading.Event:
    """The first ends a rank that has not joined the others, which is to be said by the event, and so has nothing
    to do. Later it is for rank 0, which gets one too and needs this one to finish its step and keep its weights."""
    has_joined, heard = threading.Event(), []

    def on_signal(number: int, _frame: object) -> None:
        if not has_joined.is_set():
            os._exit(0)
        heard.append(number)
        if len(heard) > 1:
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    return has_joined


if __name__ == "__main__":
    os.environ[PARENT_VARIABLE] = sys.argv[1]
    with _ending_with_its_parent():
        code = main(Config.model_validate_json(sys.stdin.buffer.read()), place_of(os.environ))
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                output.flush()
        os._exit(code)  # threads of torch may wait for ranks that are gone
