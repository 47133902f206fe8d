"""Teachers and judges that a run cannot have as its settings are.

In: all settings. Out: one sentence for each problem, with the way out. Every process can ask, without
torch, before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import Config

_BYTES_PER_ID = 8  # and its logprob


def scoring_conflicts(config: Config) -> list[str]:
    """Why these cannot score; empty where they can."""
    return [*_teaching(config), *_names(config), *_models(config)]


def _teaching(config: Config) -> Iterator[str]:
    scoring, coefficient = config.scoring, config.algorithm.distillation
    if coefficient and not scoring.teachers:
        why = "algorithm.preset = 'opd'" if config.algorithm.distillation_coef == "preset" else "it"
        yield (
            f"algorithm.distillation_coef = {coefficient:g}: scoring.teachers is empty, so that {why} has nobody to "
            "learn from; name a model in a [[scoring.teachers]] table"
        )
    yield from _top_ids(config)
    if scoring.teacher_column and not scoring.teachers:
        column = scoring.teacher_column
        yield f"scoring.teacher_column = {column!r}: scoring.teachers is empty; name one, or leave the column out"
    generation = config.generation
    wanted = {
        "temperature": (generation.temperature, 1),
        "top_p": (generation.top_p, 1),
        "top_k": (generation.top_k, 0),
    }
    for index, teacher in enumerate(scoring.teachers):
        for name, (value, needed) in wanted.items():
            if teacher.url and value != needed:
                yield (
                    f"scoring.teachers[{index}].url with generation.{name} = {value:g}: a server tells logprobs at "
                    f"temperature 1 and over all tokens; set generation.{name} = {needed}, or leave out the url to "
                    "load the teacher here"
                )


def _top_ids(config: Config) -> Iterator[str]:
    scoring, coefficient, generation = config.scoring, config.algorithm.jsd_coef, config.generation
    if coefficient and not scoring.teachers:
        yield (
            f"algorithm.jsd_coef = {coefficient:g}: scoring.teachers is empty, so that it has nobody to learn from; "
            "name a model in a [[scoring.teachers]] table, with top_k"
        )
    for index, teacher in enumerate(scoring.teachers):
        if coefficient and not teacher.top_k:
            yield (
                f"scoring.teachers[{index}].top_k = 0 with algorithm.jsd_coef = {coefficient:g}: the divergence needs "
                "the teacher's likeliest ids at each token; set top_k, 64 for example, or jsd_coef = 0"
            )
    widest = sorted(teacher.top_k for teacher in scoring.teachers)
    num_ids = widest[-1] if widest and scoring.teacher_column else sum(widest)
    num_bytes = _BYTES_PER_ID * num_ids * generation.group_size * generation.max_tokens
    if num_bytes > config.queues.max_payload_bytes:
        yield (
            f"scoring.teachers: top_k = {num_ids} in all makes up to {num_bytes} bytes for a group "
            f"({_BYTES_PER_ID} x top_k x generation.group_size x generation.max_tokens), more than "
            f"queues.max_payload_bytes = {config.queues.max_payload_bytes}; lower top_k, or raise the limit"
        )


def _names(config: Config) -> Iterator[str]:
    scoring = config.scoring
    rewards = [reward.name or reward.function.rpartition(":")[2] for reward in scoring.rewards]
    judges = [judge.title for judge in scoring.judges]
    for setting, names in (
        ("scoring.teachers", [teacher.title for teacher in scoring.teachers]),
        ("scoring.judges", [*(name for name in rewards if name in judges), *judges]),
    ):
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{setting}: two rewards or models are called {name!r}; give one of them another `name`"


def _models(config: Config) -> Iterator[str]:
    scoring = config.scoring
    for kind, models in (("teachers", scoring.teachers), ("judges", scoring.judges)):
        for index, item in enumerate(models):
            if not item.model and not item.url:
                yield (f"scoring.{kind}[{index}].model is empty: name a directory or Hub id, or set `url` to a server")
