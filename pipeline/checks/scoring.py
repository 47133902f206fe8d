"""Whether teachers and judges can begin, as far as that is to be seen without loading a model or asking a server.

In: a report with the rows that were read. Out: a UsageError where a worker would raise one, and where rows
name teachers that there are not.
"""

from __future__ import annotations

from pipeline.checks.config import Report
from pipeline.config import ModelSettings
from pipeline.config.scoring import ModelAtWork
from pipeline.engines.openai_asker import check_url
from pipeline.errors import DataError, few
from pipeline.judges.question import Question
from pipeline.models.files import check_model_files, naming
from pipeline.prompts import Dataset


def models(report: Report) -> None:
    """Directories, URLs and templates."""
    scoring = report.config.scoring
    for index, teacher in enumerate(scoring.teachers):
        _model(teacher, f"scoring.teachers[{index}]")
    for index, judge in enumerate(scoring.judges):
        setting = f"scoring.judges[{index}]"
        _model(judge, setting)
        if judge.url:
            Question(judge.prompt, setting=f"{setting}.prompt", min_score=judge.min_score, max_score=judge.max_score)


def rows(report: Report, dataset: Dataset) -> None:
    """The teachers that rows of the training data name are there."""
    scoring = report.config.scoring
    column, known = scoring.teacher_column, [teacher.title for teacher in scoring.teachers]
    if not column:
        return
    names = [dataset[index].columns.get(column) for index in range(len(dataset))]
    for index, name in enumerate(names):
        if name not in (None, "", *known):
            raise DataError(
                f"{dataset.where(index)}: column {column!r} (scoring.teacher_column) names the teacher {name!r}; "
                f"there are: {', '.join(known)}"
            )
    if not any(names) and not dataset.is_cut:
        there = few(set[str]().union(*dataset.kinds()))
        raise DataError(
            f"scoring.teacher_column = {column!r}: no row of {dataset.name} has a teacher in that column, so that "
            f"nobody would teach; columns that there are: {there}"
        )


def _model(settings: ModelAtWork, setting: str) -> None:
    if settings.url:
        check_url(settings, setting)
        return
    with naming(f"{setting}.model"):
        check_model_files(ModelSettings(path=settings.model))
