"""A run as a picture: its queues, arrows with rates between them, the way back of the weights, the workers.

In: a `RunStatus`, what was seen before it, and a width. Out: lines of styled text that fit. It reads
and writes nothing. Only who shows it imports this: it needs `rich`.
"""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from pipeline.keys import TAKEN_BY, Stream
from pipeline.messages import Json
from pipeline.queues.ledger import Depth
from pipeline.roster import WorkerInfo
from pipeline.run.status import RunStatus
from pipeline.status import headline, ledger_lines, limit_line, rates

NARROWEST, _WIDE = 80, 100
_KEPT = 240  # samples
_BARS = "▁▂▃▄▅▆▇█"
_FEEDER = "feeder"
_MOST_IN_A_ROW = 3
_WINDOW_S = 60.0
_STATES = {"running": "green", "waiting": "yellow", "starting": "cyan", "paused": "magenta", "draining": "magenta"}
_DIM, _LIMIT, _BLOCKED = "bright_black", "bold yellow", "bold red"


@dataclass(slots=True)
class History:
    """What was seen of a run, oldest first: depths by stream, groups a second by arrow, rewards."""

    fed: deque[tuple[float, int]] = field(default_factory=deque)
    depths: dict[Stream, deque[float]] = field(default_factory=dict)
    rates: dict[str, deque[float]] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _step: int | None = None

    def add(self, status: RunStatus) -> None:
        """One more moment."""
        self.fed.append((status.at, status.ledger.fed))
        while len(self.fed) > 2 and self.fed[-1][0] - self.fed[1][0] >= _WINDOW_S:
            self.fed.popleft()
        for stream, depth in status.streams.items():
            self.depths.setdefault(stream, deque(maxlen=_KEPT)).append(depth.length)
        for arrow in (_FEEDER, *TAKEN_BY.values()):
            self.rates.setdefault(arrow, deque(maxlen=_KEPT)).append(self.rate(arrow, status) or 0.0)
        if status.reward_mean is not None and status.step != self._step:
            self.rewards.append(status.reward_mean)
        self._step = status.step

    def rate(self, arrow: str, status: RunStatus) -> float | None:
        """Groups a second over the last minute; None where it is not known yet."""
        if arrow != _FEEDER:
            return _sum(_of(status.workers, arrow), "groups_per_s")
        (first, fed_before), (last, fed) = self.fed[0], self.fed[-1]
        return (fed - fed_before) / (last - first) if last > first else None


def picture(status: RunStatus, history: History, *, screen_width: int, note: str = "") -> list[Text]:
    """Lines no longer than `screen_width`; below NARROWEST they are cut. note: a warning on top."""
    width = max(screen_width, NARROWEST)
    lines = _head(status, history, width)
    lines += [Text(line, style=_BLOCKED) for line in textwrap.wrap(note, width)] or _limit(status, width)
    if status.streams:
        lines += [Text(), *_flow(status, history, width), _way_back(status, width)]
    style = _DIM if status.ledger_balances else _BLOCKED
    lines += [Text(), *(Text(line, style=style) for line in ledger_lines(status)), Text(), *_workers(status, width)]
    return [_cut(line, screen_width) for line in lines]


def sparkline(values: Sequence[float] | deque[float], width: int) -> str:
    """The last `width` values as bars between 0 (or the least of them, if below) and the greatest."""
    shown = list(values)[-width:]
    low, high = min([0.0, *shown]), max([0.0, *shown])
    steps = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / (high - low) * steps) if high > low else 0] for value in shown)


def _head(status: RunStatus, history: History, width: int) -> list[Text]:
    """The facts of the run, as many to a line as fit."""
    lines = [Text()]
    trend = f"  rewards {sparkline(history.rewards, 20)}" if len(history.rewards) > 1 else ""
    for fact in f"{headline(status)}{trend}".split("  "):
        if lines[-1] and len(lines[-1]) + 2 + len(fact) > width:
            lines.append(Text())
        lines[-1].append(f"  {fact}" if lines[-1] else fact, style="green" if fact.startswith("rewards") else "bold")
    return lines


def _limit(status: RunStatus, width: int) -> list[Text]:
    style = _BLOCKED if status.limit.is_blocked else "yellow"
    return [Text(line, style=style) for line in textwrap.wrap(limit_line(status), width)]


def _flow(status: RunStatus, history: History, width: int) -> list[Text]:
    """Arrow, queue, arrow, queue, arrow, queue, arrow; each a column of six lines. More queues take a second row."""
    box = max(13, width // 6)
    arrow = (width - 3 * box) // 4
    queues = list(status.streams.items())
    first = len(queues) if len(queues) <= _MOST_IN_A_ROW else (len(queues) + 1) // 2
    lines: list[Text] = []
    for row in (queues[:first], queues[first:]):
        columns = [] if lines else [_arrow(_FEEDER, status, history, arrow)]
        for stream, depth in row:
            stage = TAKEN_BY[stream]
            rest = arrow if stage != "trainer" else width - len(row) * (box + arrow) + 1
            columns += [_queue(stream, depth, history, box), _arrow(stage, status, history, rest)]
        if row:
            lines += [Text.assemble(*parts) for parts in zip(*columns, strict=True)]
    return lines


def _arrow(stage: str, status: RunStatus, history: History, width: int) -> list[Text]:
    alive = [worker for worker in _of(status.workers, stage) if worker.is_alive]
    rate = history.rate(stage, status)
    style = (_BLOCKED if status.limit.is_blocked else _LIMIT) if status.limit.stage == stage else "bold"
    tokens = _sum(alive, "tokens_per_s")
    idle = [value for worker in alive if (value := _number(worker, "idle_ratio")) is not None]
    lines = [
        Text(stage, style=style),
        Text(_shaft(stage, status, len(alive), width - 2), style=style),
        Text("" if rate is None else _short(f"{rate:.3g}", "groups/s", "/s", width - 1)),
        Text(sparkline(history.rates.get(stage, ()), width - 2), style="green"),
        Text(_tokens(tokens, width - 1) if tokens else "", style=_DIM),
        Text(f"idle {sum(idle) / len(idle):.0%}" if idle else "", style=_DIM),
    ]
    return [_fit(line, width - 1, " ") for line in lines]


def _shaft(stage: str, status: RunStatus, number: int, width: int) -> str:
    """An arrow with how many workers there are; at the trainer, what has come of it all."""
    if stage == "trainer":
        step = "" if status.step is None else str(status.step)
        return f"▶ step {step}" if len(step) + 7 <= width + 1 else f"▶ {step}"
    number_of = f"x{number}" if stage != _FEEDER else ""
    return f"{number_of:─^{width - 1}}▶"


def _tokens(tokens: float, width: int) -> str:
    """Tokens a second: `1,145 tok/s`, where there is little room `1.1k tok`."""
    exact = f"{tokens:,.0f} tok/s"
    return exact if len(exact) <= width else f"{tokens / 1000:.1f}k tok"


def _short(value: str, unit: str, shorter: str, width: int) -> str:
    """A value with its unit, where there is little room with the shorter one."""
    return f"{value} {unit}" if len(value) + 1 + len(unit) <= width else f"{value}{shorter}"


def _queue(stream: Stream, depth: Depth, history: History, width: int) -> list[Text]:
    inner = width - 2
    lines = [
        _pair(f"{depth.backlog} waiting", _age(depth.oldest_waiting_s), inner, style="bold" if depth.backlog else _DIM),
        _pair(f"{depth.pending} in work", _age(depth.oldest_pending_s), inner, style="" if depth.pending else _DIM),
        _fit(Text(sparkline(history.depths.get(stream, ()), inner), style="cyan"), inner),
        _fit(Text(f"{depth.length} groups", style=_DIM), inner),
    ]
    top = f"┌{stream.value:─<{inner}}┐"
    return [Text(top), *(Text.assemble("│", line, "│") for line in lines), Text(f"└{'─' * inner}┘")]


def _way_back(status: RunStatus, width: int) -> Text:
    """From the trainer to the generators."""
    box = max(13, width // 6)
    arrow = (width - 3 * box) // 4
    served = [
        int(version)
        for worker in _of(status.workers, "generator")
        if worker.is_alive and (version := _number(worker, "weight_version")) is not None
    ]
    style = _LIMIT if status.limit.stage == "weights" else _DIM
    at = f"{min(served)} to {max(served)}" if served and min(served) < max(served) else f"{min(served, default='none')}"
    label = f" weights: version {status.weight_version if status.weight_version is not None else 'none'}, served {at} "
    if len(status.streams) > _MOST_IN_A_ROW:
        return Text(f"──{label}", style=style)
    length = 2 * arrow + 2 * box - 1
    return Text(" " * (arrow + box + 2) + "▲" + f"{label:─^{length}}"[:length] + "┘", style=style)


def _workers(status: RunStatus, width: int) -> list[Text]:
    has_room = width >= _WIDE
    lines: list[Text] = []
    for worker in status.workers:
        state = str(worker.status.get("state", "?")) if worker.is_alive else "LOST"
        version = _number(worker, "weight_version")
        facts: list[str | tuple[str, str]] = [
            f"{worker.worker_id:<34}",
            (f"{state:<9}", _STATES.get(state, _BLOCKED)),
            f"{'' if version is None else f'v{version:.0f}':<6}",
            f"{_shown(worker, 'groups_per_s', '.3g', ' groups/s' if has_room else '/s'):>{14 if has_room else 9}}",
            f"{_shown(worker, 'idle_ratio', '.0%', ' idle'):>11}",
            f"{_shown(worker, 'tokens_per_s', ',.0f', ' tok/s') if _number(worker, 'tokens_per_s') else '':>15}"
            * has_room,
            (f"  {worker.status.get('waiting_for') or ''}" if worker.is_alive else f"  {worker.age_s:.0f} s", _DIM),
        ]
        lines.append(Text.assemble(*facts))
    return lines


def _pair(left: str, right: str, width: int, *, style: str) -> Text:
    if len(left) + len(right) + 1 > width:
        right = ""
    return Text(f"{left}{right:>{width - len(left)}}", style=style)


def _fit(line: Text, width: int, rest: str = "") -> Text:
    """Cut or filled to `width`, with `rest` behind it."""
    fitted = line.copy()
    fitted.truncate(width, pad=True)
    return Text.assemble(fitted, rest)


def _cut(line: Text, width: int) -> Text:
    cut = line.copy()
    cut.rstrip()
    cut.truncate(width, overflow="ellipsis")
    return cut


def _of(workers: Sequence[WorkerInfo], role: str) -> list[WorkerInfo]:
    return [worker for worker in workers if worker.role == role]


def _sum(workers: Sequence[WorkerInfo], name: str) -> float | None:
    values = [value for worker in workers if worker.is_alive and (value := _number(worker, name)) is not None]
    return sum(values) if values else None


def _number(worker: WorkerInfo, name: str) -> float | None:
    said: Mapping[str, Json] = worker.status
    value = said.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _shown(worker: WorkerInfo, name: str, form: str, unit: str) -> str:
    value = rates(worker).get(name)
    return f"{value:{form}}{unit}" if isinstance(value, (int, float)) else ""


def _age(seconds: float) -> str:
    if not seconds:
        return ""
    return f"{seconds:.1f}s" if seconds < 100 else f"{seconds / 60:.0f}min"
