"""Scores of rollouts, from functions that may hang, crash, raise or not apply.

In: `RolloutGroup`s, many at once. Out: one `Score` for each completion. A call that exceeds its
time-out loses its process, and a new one takes its place; no hang uses up capacity.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from pipeline.config import ScoringSettings
from pipeline.errors import RewardLoadError, RollstreamError
from pipeline.messages import Completion, Outcome, RewardResult, RolloutGroup, Score
from pipeline.rewards import frames
from pipeline.rewards.combining import combine
from pipeline.rewards.failure_log import FailureLog
from pipeline.rewards.loading import Reward, name_rewards, order
from pipeline.rewards.process import ProcessDiedError, RewardProcess

_START_DELAYS_S = (0.0, 1.0, 5.0)
# A function that returned nothing usable in its first calls is no reward function at all.
_MOST_USELESS_CALLS = 3
_MAX_PROBLEM_CHARS = 400  # of what travels with the scores
_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class RewardStats:
    """What one function did so far.

    calls: answered or not. seconds: spent in calls. errors, timeouts: calls that failed as a whole.
    useless: calls that returned nothing usable. telling: calls that could have shown that it is useless.
    outcomes: per completion. num_zeros: completions that got exactly 0, which are all OK.
    """

    calls: int = 0
    seconds: float = 0.0
    errors: int = 0
    timeouts: int = 0
    useless: int = 0
    telling: int = 0
    num_zeros: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)


class RewardPool:
    """Runs reward functions in `num_processes` processes, one call at a time in each.

    clock: monotonic seconds, by which failures are logged. on_call: is told of every call, by the
    function's name, how many seconds it took.
    """

    def __init__(
        self,
        settings: ScoringSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_call: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        self._settings = settings
        self._on_call = on_call
        self._rewards = name_rewards(settings.rewards, may_be_none=settings.has_models)
        self._idle: asyncio.Queue[RewardProcess | RollstreamError] = asyncio.Queue()
        self._processes: set[RewardProcess] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._failures = FailureLog(clock=clock)
        self._is_closed = False
        self._in_calls: dict[RewardProcess, tuple[str, float]] = {}  # name of the function, and since when
        self.stats: dict[str, RewardStats] = {reward.name: RewardStats() for reward in self._rewards}

    @property
    def num_idle(self) -> int:
        """Processes that wait for a call."""
        return self._idle.qsize()

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that live now."""
        return sorted(process.pid for process in self._processes)

    @property
    def longest_call(self) -> tuple[str, float] | None:
        """Of those that run now, the one that has run longest: name of its function, seconds."""
        if not self._in_calls:
            return None
        name, since = min(self._in_calls.values(), key=lambda call: call[1])
        return name, time.monotonic() - since

    async def start(self) -> None:
        """Start the processes and load the functions in each. Raises RewardLoadError."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._settings.num_processes if self._rewards else 0):
                    group.create_task(self._add_process())
        except* RewardLoadError as errors:
            raise errors.exceptions[0] from None

    async def score(self, rollout: RolloutGroup) -> tuple[Score, ...]:
        """One score for each completion, in their order. Other calls run at the same time.

        Raises RewardLoadError when no reward process can be started any more, or when a function
        has never returned what a reward function returns.
        """
        if not self._rewards:
            return (Score(reward=None),) * len(rollout.completions)
        frame = _call_frame(rollout)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run(index, frame)) for index in range(len(self._rewards))]
        except* RollstreamError as errors:
            raise errors.exceptions[0] from None
        weights = [reward.weight for reward in self._rewards]
        by_completion = zip(*(task.result() for task in tasks), strict=True)
        return tuple(combine(parts, weights, self._settings.on_failure) for parts in by_completion)

    async def close(self) -> None:
        """End all processes. Calls in flight fail. Safe to call twice."""
        self._is_closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        for process in list(self._processes):
            self._remove(process)
        self._idle.put_nowait(_closed())  # for calls that wait for a process

    async def _run(self, index: int, frame: frames.Frame) -> list[RewardResult]:
        """One function on one group."""
        reward, num_completions = self._rewards[index], len(frame["texts"])
        process = await self._take()
        started = time.monotonic()
        has_answered = False
        self._in_calls[process] = reward.name, started
        try:
            reply = await process.call(frame | {"reward": index}, reward.timeout_s)
            has_answered = True
        except TimeoutError:
            problem = f"took longer than {reward.timeout_s:g} s"
            return self._failed(reward, Outcome.TIMEOUT, num_completions, problem)
        except ProcessDiedError as error:
            if self._is_closed:
                raise _closed() from error
            return self._failed(reward, Outcome.ERROR, num_completions, f"ended its process: {error}")
        finally:
            del self._in_calls[process]
            self._give_back(process, is_usable=has_answered)
            self.stats[reward.name].calls += 1
            self._failures.count_call(reward.name)
            seconds = time.monotonic() - started
            self.stats[reward.name].seconds += seconds
            self._on_call(reward.name, seconds)
        return self._results(reward, reply, num_completions)

    def _results(self, reward: Reward, reply: frames.Frame, num_completions: int) -> list[RewardResult]:
        self._refuse_useless(reward, reply, num_completions)
        if "error" in reply:
            return self._failed(reward, Outcome.ERROR, num_completions, reply["error"], reply["detail"])
        results = [_result(reward, value) for value in reply["values"]]
        if problem := next((result.problem for result in results if result.problem), ""):
            self._failures.add(reward.name, Outcome.ERROR, problem)
        self._count(reward, results)
        return results

    def _refuse_useless(self, reward: Reward, reply: frames.Frame, num_completions: int) -> None:
        """A return of the wrong shape or of no number at all, or a column that is not there: someone must mend it.

        A list of one value is right for one completion, as evaluation has them, and shows nothing.
        """
        wrong = [value["error"] for value in reply.get("values", ()) if isinstance(value, dict) and "error" in value]
        is_useless = "is_useless" in reply or 0 < len(wrong) == len(reply.get("values", ()))
        stats = self.stats[reward.name]
        stats.useless += is_useless
        stats.telling += is_useless or num_completions > 1
        if is_useless and stats.useless == stats.telling >= _MOST_USELESS_CALLS:
            problem = reply["error"] if "error" in reply else wrong[0]
            raise RewardLoadError(f"scoring.rewards: {reward.name} {problem}")

    def _failed(
        self, reward: Reward, outcome: Outcome, num_completions: int, problem: str, detail: str = ""
    ) -> list[RewardResult]:
        """The whole call failed, and with it every completion."""
        if outcome is Outcome.TIMEOUT:
            self.stats[reward.name].timeouts += 1
        else:
            self.stats[reward.name].errors += 1
        self._failures.add(reward.name, outcome, problem, detail)
        result = RewardResult(name=reward.name, value=None, outcome=outcome, problem=problem[:_MAX_PROBLEM_CHARS])
        results = [result] * num_completions
        self._count(reward, results)
        return results

    def _count(self, reward: Reward, results: list[RewardResult]) -> None:
        stats = self.stats[reward.name]
        stats.outcomes.update(result.outcome for result in results)
        stats.num_zeros += sum(result.value == 0 for result in results)

    async def _take(self) -> RewardProcess:
        while isinstance(process := await self._idle.get(), RewardProcess):
            if process in self._processes:
                return process
        self._idle.put_nowait(process)  # every later call must learn of it too
        raise process

    def _give_back(self, process: RewardProcess, *, is_usable: bool) -> None:
        if is_usable:
            self._idle.put_nowait(process)
            return
        self._remove(process)
        if not self._is_closed:
            task = asyncio.create_task(self._replace())
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self) -> None:
        for delay_s in _START_DELAYS_S:
            await asyncio.sleep(delay_s)
            try:
                await self._add_process()
            except RewardLoadError as error:
                problem = str(error)
                _log.warning("reward_process_not_started", problem=problem)
            else:
                return
        self._idle.put_nowait(RewardLoadError(f"no reward process can be started any more: {problem}"))

    async def _add_process(self) -> None:
        try:
            process = RewardProcess(order(self._rewards))
        except OSError as error:
            raise RewardLoadError(f"a reward process cannot be started: {error}") from error
        self._processes.add(process)
        try:
            await process.load()
        except BaseException:
            self._remove(process)
            raise
        self._idle.put_nowait(process)

    def _remove(self, process: RewardProcess) -> None:
        process.kill()
        self._processes.discard(process)


def _result(reward: Reward, value: Any) -> RewardResult:
    if value is None:
        return RewardResult(name=reward.name, value=None, outcome=Outcome.NONE)
    if isinstance(value, dict) and "tokens" in value:
        return RewardResult(name=reward.name, value=None, outcome=Outcome.OK, token_values=tuple(value["tokens"]))
    if isinstance(value, dict):
        problem = value["error"][:_MAX_PROBLEM_CHARS]
        return RewardResult(name=reward.name, value=None, outcome=Outcome.ERROR, problem=problem)
    return RewardResult(name=reward.name, value=value, outcome=Outcome.OK)


def _closed() -> RollstreamError:
    return RollstreamError("the reward pool is closed")


def _call_frame(rollout: RolloutGroup) -> frames.Frame:
    prompt = rollout.prompt
    return {
        "prompt": prompt.prompt,
        "columns": dict(prompt.columns),
        "texts": [completion.text for completion in rollout.completions],
        "token_ids": [_packed_ids(completion) for completion in rollout.completions],
    }


def _packed_ids(completion: Completion) -> bytes:
    return np.ascontiguousarray(completion.token_ids, dtype="<u4").tobytes()
