"""What `rollstream status --json` prints, as a JSON schema.

In: the carriers that it prints, and what their fields mean. Out: a schema of draft 2020-12 in which
every field is described. It describes; it checks nothing itself.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

from pipeline.messages import Json
from pipeline.prompts.statistics import Coverage
from pipeline.queues.ledger import Depth, Ledger
from pipeline.roster import WorkerInfo
from pipeline.run.limits import Limit
from pipeline.run.status import RunStatus

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN: Mapping[object, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}

MEANINGS: Mapping[type, Mapping[str, str]] = {
    RunStatus: {
        "run": "Name of the run.",
        "run_id": "Changes when the server has lost the run; null when nobody has joined it.",
        "at": "Unix seconds by the server's clock.",
        "weight_version": "Newest weights of the trainer; null before the first.",
        "is_paused": "Whether `rollstream pause` was asked for.",
        "stop_reason": "Why the run is over; null while it goes on.",
        "trainer": "Worker id of the trainer that has the run.",
        "step": "Optimiser steps done; null before a trainer has said so.",
        "reward_mean": "Mean reward of the last step's groups.",
        "eval_reward": "Mean reward of the last evaluation.",
        "staleness_mean": "Mean age of the last step's tokens, in weight versions.",
        "max_staleness": "Its bound, as the trainer has it.",
        "tokens_per_s": "Trained tokens a second, over the last minute.",
        "generated_tokens_per_s": "Generated tokens a second of all generators, over the last minute.",
        "streams": "The queues, in order of flow; empty for a run that is over and whose server is gone.",
        "ledger": "What has become of all groups.",
        "ledger_balances": "Whether the ledger adds up; false is a defect.",
        "workers": "Everyone in the registry, the lost included.",
        "limit": "What holds the run back.",
        "redis_memory_bytes": "Memory of the server; null where it does not tell.",
        "redis_memory_max_bytes": "Memory that it may take, 0 for all there is.",
        "prompts": "What the trainer has seen of its data set; null before the first step.",
        "wanted_workers": "Role to number that an `up` keeps (`rollstream scale`); empty without an `up`.",
    },
    Depth: {
        "length": "Groups in the stream.",
        "pending": "Groups in work: claimed by a worker.",
        "backlog": "Groups that wait for a worker.",
        "oldest_pending_s": "Seconds since the oldest group in work came; 0 without one.",
        "oldest_waiting_s": "Seconds since the oldest waiting group came; 0 without one.",
        "holders": "Worker id to the number of groups that it has claimed.",
    },
    Coverage: {
        "in_data": "Rows of the data set.",
        "seen": "Rows of which a group came back with rewards.",
        "always_solved": "Rows whose last group earned data.solved_reward.",
        "sometimes_solved": "Rows whose last group earned a part of it.",
        "never_solved": "Rows whose last group earned nothing.",
    },
    Ledger: {
        "fed": "Groups that were fed: trained + dropped + dead + live.",
        "trained": "Groups that were in an optimiser step.",
        "uncommitted": "Trained groups whose effect is in no checkpoint yet.",
        "dropped": "Reason to number of groups that were not trained.",
        "dead": "Groups that no one can process.",
        "live": "Groups in the streams.",
        "refused": "Results that came after their lease was lost; no groups of their own.",
        "eval_fed": "Evaluation groups that were fed: eval_done + eval_dead + eval_live.",
        "eval_done": "Evaluation groups that came back.",
        "eval_dead": "Evaluation groups that no one can process.",
        "eval_live": "Evaluation groups in the streams.",
        "next_ordinal": "Place in the feeding order of the next group.",
    },
    WorkerInfo: {
        "worker_id": "Unique; role, host, process and a random part.",
        "role": "generator, scorer, trainer or exporter.",
        "host": "Machine it runs on.",
        "pid": "Process there.",
        "address": "host:port of /metrics, /healthz and /readyz.",
        "heartbeat_s": "Promised seconds between signs of life.",
        "status": "What it last said of itself.",
        "started_at": "Unix seconds by the server's clock.",
        "age_s": "Seconds since its last sign of life.",
        "is_alive": "False after several signs of life were missed.",
    },
    Limit: {
        "stage": "generator, scorer, trainer, weights or control; null when nothing holds it back.",
        "reason": "One sentence.",
        "is_blocked": "Whether nothing will move until it is mended.",
    },
}
# What workers say of themselves; each role adds more.
SAID: Mapping[str, tuple[tuple[str, ...], str]] = {
    "state": (("string",), "starting, waiting, running, paused or draining."),
    "ready": (("boolean",), "Whether it can do its work."),
    "waiting_for": (("string", "null"), "What it waits for."),
    "wait_cause": (("string", "null"), "What kind of thing that is: groups, weights, redis or other."),
    "waited_s": (("number",), "Since when, in seconds."),
    "in_reward": (
        ("string", "null"),
        "Of a scorer: the reward function that has run longest of those that run now. Of a teacher or judge: its "
        "models, while they are asked.",
    ),
    "in_reward_s": (("number",), "For how long, in seconds."),
    "busy_with": (("string", "null"), "One long piece of work in which nothing else moves."),
    "groups_in": (("integer",), "Groups that it has claimed."),
    "groups_out": (("integer",), "Groups that it has handed over, or trained."),
    "tokens_out": (("integer",), "Tokens generated, or trained."),
    "groups_per_s": (("number",), "Groups out, a second, over the last minute."),
    "tokens_per_s": (("number",), "Tokens out, a second, over the last minute."),
    "idle_ratio": (("number",), "Share of the last minute without work."),
    "idle_s": (("number",), "Seconds without work since its start."),
    "idle_cause": (("string", "null"), "Most frequent cause of that."),
    "progress_age_s": (("number",), "Seconds since it moved anything."),
    "weight_version": (("integer", "null"), "Weights that it serves or has made."),
}


def status_schema() -> dict[str, Json]:
    """The schema of one line of `rollstream status --json`."""
    return {"$schema": _DRAFT, "title": "rollstream status", **_object(RunStatus)}


def _object(carrier: type) -> dict[str, Json]:
    hints, meanings = get_type_hints(carrier), MEANINGS[carrier]
    names = [field.name for field in fields(carrier)]
    properties: dict[str, Json] = {
        name: {"description": meanings[name], **(_said() if name == "status" else _schema_of(hints[name]))}
        for name in names
    }
    return {"type": "object", "properties": properties, "required": [*names], "additionalProperties": False}


def _said() -> dict[str, Json]:
    properties: dict[str, Json] = {
        name: {"type": [*kinds], "description": meaning} for name, (kinds, meaning) in SAID.items()
    }
    return {"type": "object", "properties": properties, "additionalProperties": True}


def _schema_of(hint: Any) -> dict[str, Json]:
    """Of a type that a carrier has: plain, optional, an enum, a carrier, or a mapping or sequence of these."""
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"type": "string", "enum": [member.value for member in hint]}
    if is_dataclass(hint) and isinstance(hint, type):
        return _object(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return {"anyOf": [_schema_of(each) for each in inner]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "propertyNames": _schema_of(inner[0]), "additionalProperties": _schema_of(inner[1])}
    assert isinstance(origin, type)
    assert issubclass(origin, Sequence)
    return {"type": "array", "items": _schema_of(inner[0])}
