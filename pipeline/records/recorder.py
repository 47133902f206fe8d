"""The run directory: what was measured at every step, and samples of what was said.

In: metrics and scored groups. Out: `metrics.jsonl`, `samples.jsonl` and `dropped.jsonl`, one JSON object a
line, readable while the run goes on. A full disk costs records, which are counted, never the run. Steps
that a resumed run does again stand in `metrics.jsonl` once; what it lost is in `metrics_lost.jsonl`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias

import numpy as np
import structlog

from pipeline.disk import write_whole
from pipeline.json_values import plain_json
from pipeline.messages import Completion, Floats, Json, Score, ScoredGroup
from pipeline.records.lines import lines_backwards, lines_of, number_in, parsed, records_in, step_of, steps_in

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
DROPPED_FILE = "dropped.jsonl"
LOST_FILE = "metrics_lost.jsonl"
_log = structlog.get_logger()

Values: TypeAlias = Mapping[str, SupportsFloat | str | Mapping[str, SupportsFloat] | None]


class Recorder:
    """Appends to the records of one run.

    role: kind of worker that writes, named in every record. clock: Unix seconds.
    """

    def __init__(self, run_dir: Path, role: str, *, clock: Callable[[], float] = time.time) -> None:
        self._run_dir = run_dir
        self._role = role
        self._clock = clock
        self._torn: set[str] = {METRICS_FILE, SAMPLES_FILE, DROPPED_FILE, LOST_FILE}
        self._is_failure_logged = False
        self.num_lost = 0

    def metrics(self, step: int, values: Values) -> None:
        """One record of a step. Several records of one step are read as one."""
        self._append(METRICS_FILE, [{**self._head(step), **values}])

    def samples(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """One record for each group, with its completions and their rewards."""
        self._append(SAMPLES_FILE, [self._head(step) | _sample(group) for group in groups])

    def dropped(self, step: int, group_ids: Iterable[str], reason: str) -> None:
        """One record for each group that is about to be dropped."""
        self._append(DROPPED_FILE, [self._head(step) | {"group_id": name, "reason": reason} for name in group_ids])

    def rewind(self, step: int) -> int:
        """The run goes on from `step`: what comes after it is done again. Returns how many records made way.

        An evaluation that came later, of weights that go on, stays as one of `step`. What got in without
        being a record of a step makes way, too.
        """
        path = self._run_dir / METRICS_FILE
        try:
            kept, lost = _divided(lines_of(path), step)
            if lost:
                self._put(LOST_FILE, b"".join(lost), len(lost))
                write_whole(path, b"".join(kept).decode("utf-8", errors="replace"))
        except OSError as error:
            self._log_once(METRICS_FILE, error)
            return 0
        return len(lost)

    def close(self) -> None:
        """Say how many records were lost; all others are on disk already."""
        if self.num_lost:
            _log.error("records_lost", run_dir=str(self._run_dir), num_lost=self.num_lost)

    def _head(self, step: int) -> dict[str, Json]:
        return {"step": step, "time": round(self._clock(), 3), "role": self._role}

    def _append(self, name: str, records: Sequence[Mapping[str, object]]) -> None:
        if records:
            self._put(name, _text(records).encode("utf-8", errors="replace"), len(records))

    def _put(self, name: str, data: bytes, num_records: int) -> None:
        try:
            self._write(self._run_dir / name, data)
        except OSError as error:
            self._torn.add(name)
            self.num_lost += num_records
            self._log_once(name, error)

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A crash or a full disk may have left half a line; what follows must not be glued to it.
            if path.name in self._torn and not _ends_with_newline(path):
                data = b"\n" + data
            if os.write(descriptor, data) < len(data):
                raise OSError(f"only a part of the record fitted into {path}")
        finally:
            os.close(descriptor)
        self._torn.discard(path.name)

    def _log_once(self, name: str, error: OSError) -> None:
        if self._is_failure_logged:
            return
        self._is_failure_logged = True
        _log.error("record_not_written", file=str(self._run_dir / name), error=str(error), consequence="run goes on")


def _text(records: Iterable[Mapping[str, object]]) -> str:
    return "".join(json.dumps(plain_json(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records)


def _divided(lines: Iterable[bytes], step: int) -> tuple[list[bytes], list[bytes]]:
    """What belongs to a run that goes on from `step`, and what does not; one that begins anew keeps nothing.

    What is no record of a step does not. All stays as it was written, but evaluations that become one of `step`.
    """
    kept: list[bytes] = []
    lost: list[bytes] = []
    found = [(line.rstrip(b"\n") + b"\n", parsed(line) or {}) for line in lines if line.strip()]
    newest = max((number_in(record, "weight_version", 0) for _, record in found if _belongs(record, step)), default=0)
    for line, record in found:
        if _belongs(record, step):
            kept.append(line)
        elif step > 0 and step_of(record) and number_in(record, "eval_weight_version", math.inf) <= newest:
            kept.append(_text([record | {"step": step}]).encode("utf-8", errors="replace"))
        else:
            lost.append(line)
    return kept, lost


def _belongs(record: Mapping[str, Any], step: int) -> bool:
    own = step_of(record)
    return own is not None and 0 < step >= own


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _sample(group: ScoredGroup) -> dict[str, object]:
    prompt = group.rollout.prompt
    completions: list[Json] = [
        _completion(completion, score)
        for completion, score in zip(group.rollout.completions, group.scores, strict=True)
    ]
    return {
        "group_id": prompt.group_id,
        "is_evaluation": prompt.is_evaluation,
        "dataset_index": prompt.dataset_index,
        "epoch": prompt.epoch,
        "prompt": prompt.prompt,
        "columns": prompt.columns,
        "completions": completions,
        "generator": group.rollout.generator,
        "scorer": group.scorer,
    }


def _completion(completion: Completion, score: Score) -> Json:
    problems: dict[str, Json] = {part.name: part.problem for part in score.parts if part.problem}
    return {
        "text": completion.text,
        "reward": score.reward,
        "rewards": {part.name: part.value for part in score.parts},
        "outcomes": {part.name: part.outcome.value for part in score.parts},
        "num_tokens": len(completion),
        "finish_reason": completion.finish_reason.value,
        "versions": [[span.weight_version, span.first_token] for span in completion.spans],
        **({"problems": problems} if problems else {}),
        **({} if score.teacher_logprobs is None else {"teacher_logprob": _mean(score.teacher_logprobs)}),
    }


def _mean(logprobs: Floats) -> float | None:
    """Over the tokens that have one, to four digits; None without any."""
    finite = logprobs[np.isfinite(logprobs)]
    return round(float(finite.mean()), 4) if len(finite) else None


# Reading


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """One record for each step, in order.

    A run that resumed from an older checkpoint did some steps twice; the later ones count.
    """
    by_step: dict[int, dict[str, Any]] = {}
    last_step = -1
    for step, record in steps_in(lines_of(run_dir / METRICS_FILE)):
        if step < last_step:
            by_step = {known: values for known, values in by_step.items() if known < step}
        by_step[step] = by_step.get(step, {}) | record
        last_step = step
    return [by_step[step] for step in sorted(by_step)]


def last_metrics(run_dir: Path, names: Collection[str]) -> dict[str, Any]:
    """The newest record, and with it the newest value of each name, wherever that was recorded last."""
    found: dict[str, Any] = {}
    for _, record in steps_in(lines_backwards(run_dir / METRICS_FILE)):
        found = record | found
        if all(name in found for name in names):
            break
    return found


def all_samples(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Every sample record, oldest first."""
    return records_in(lines_of(run_dir / SAMPLES_FILE))


def tail_samples(run_dir: Path, n: int) -> list[dict[str, Any]]:
    """The last `n` sample records, oldest first; fewer, or none, if there are not that many."""
    newest: list[dict[str, Any]] = []
    for record in records_in(lines_backwards(run_dir / SAMPLES_FILE)):
        if len(newest) >= n:
            break
        newest.append(record)
    return newest[::-1]


def find_sample(run_dir: Path, group_id: str) -> dict[str, Any] | None:
    """The newest sample record of a group, or None."""
    records = records_in(lines_backwards(run_dir / SAMPLES_FILE))
    return next((record for record in records if record.get("group_id") == group_id), None)


def plot_curve(run_dir: Path, png: Path, *, temperature: float = 1.0, eval_temperature: float = 0.0) -> Path | None:
    """The learning curve as a picture; None without matplotlib or without records. See `pipeline.records.curve`."""
    from pipeline.records.curve import draw

    records = read_metrics(run_dir)
    return draw(records, png, title=run_dir.name, temperature=temperature, eval_temperature=eval_temperature)
