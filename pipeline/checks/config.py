"""Whether everything that the settings name is there and fits together, without starting anything.

In: a `Config`. Out: what was looked at, with a warning for what may be right and may not; or one
ConfigError with a line for each problem. It makes the checks that the workers make, by their code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.config import Config, GenerationSettings
from pipeline.config.advice import advice
from pipeline.config.presets import PRESETS, look_up
from pipeline.engines.vllm_options import check_arguments, require_installed
from pipeline.errors import ConfigError, UsageError
from pipeline.prompts import Dataset
from pipeline.settings.sources import near_misses

# Enough to meet every kind of row, and read in a second.
MAX_ROWS = 1000


@dataclass(kw_only=True)
class Report:
    """What was found.

    facts: subject and text of what is there. warnings: what a run may get over. problems: what would
    end it. datasets: what was read of the data, for the rewards to be tried on.
    """

    config: Config
    is_quick: bool = False
    facts: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    datasets: list[Dataset] = field(default_factory=list)

    def saw(self, subject: str, text: str) -> None:
        """Something is there."""
        self.facts.append((subject, text))

    def add(self, examine: Callable[[Report], None]) -> None:
        """Look at one thing."""
        try:
            examine(self)
        except UsageError as error:
            self.problems += str(error).splitlines()


def check(config: Config, *, calls_rewards: bool = False) -> Report:
    """Everything, the model and the server included. Raises ConfigError.

    calls_rewards: each reward function is called once, which may cost money or have effects.
    """
    from pipeline.checks import model

    heavy = (model.algorithm, model.devices, model.prompts, model.policy)
    trial = (_trial,) if calls_rewards else ()
    return _examined(Report(config=config), (*_QUICK, *trial, *heavy, _server))


def check_quickly(config: Config) -> Report:
    """What takes no torch and no download: settings, files, data, rewards, packages. Raises ConfigError."""
    return _examined(Report(config=config, is_quick=True), _QUICK)


def _examined(report: Report, examine: Sequence[Callable[[Report], None]]) -> Report:
    for look in examine:
        report.add(look)
    if report.problems:
        raise ConfigError("\n".join(dict.fromkeys(report.problems)))
    return report


def _preset(report: Report) -> None:
    look_up("preset", report.config.algorithm.preset, PRESETS)


def _engine(report: Report) -> None:
    if report.config.generation.engine == "vllm":
        check_arguments(report.config.generation)
        require_installed()
    if report.config.generation.engine == "openai":
        from pipeline.engines.openai_checks import check_settings

        check_settings(report.config)


def _unread(report: Report) -> None:
    """What is set and will not be looked at."""
    config = report.config
    report.warnings += near_misses(os.environ)
    generation, defaults = config.generation, GenerationSettings()
    for name in ("scripted", "vllm", "openai"):
        if name != generation.engine and getattr(generation, name) != getattr(defaults, name):
            report.warnings.append(
                f"generation.{name} is not read, since generation.engine = {generation.engine!r}: "
                f"set generation.engine = {name!r}, or leave it out"
            )
    if config.scoring.teachers and not config.algorithm.has_teacher:
        report.warnings.append(
            "scoring.teachers: what they say is not read, since algorithm.distillation_coef = 0 and jsd_coef = 0; "
            "raise one, or set algorithm.preset = 'opd'"
        )
    if any(teacher.top_k for teacher in config.scoring.teachers) and not config.algorithm.jsd_coef:
        report.warnings.append(
            "scoring.teachers: their top_k ids are sent and not read, since algorithm.jsd_coef = 0; raise it, or set "
            "top_k = 0"
        )
    if config.lora.quantization != "none" and generation.engine in {"vllm", "openai"}:
        report.warnings.append(
            f"lora.quantization = {config.lora.quantization!r} does not reach generation.engine = "
            f"{generation.engine!r}: unless its server quantizes, too, it samples from other weights than the "
            "trainer's, which counts as off-policy"
        )
    if not generation.merge_lora:
        return
    if not config.lora.rank:
        report.warnings.append("generation.merge_lora = true has nothing to merge: lora.rank = 0 trains all weights")
    elif generation.engine not in {"vllm", "openai"}:
        report.warnings.append(
            f"generation.merge_lora = true is not read, since generation.engine = {generation.engine!r} "
            "always applies the adapter beside the weights: leave it out"
        )


def _keys(report: Report) -> None:
    from pipeline.weights.security import Signer, publisher_keys, receiver_keys

    weights = report.config.weights
    publisher_keys(weights)
    receiver_keys(weights)
    Signer.load(weights.shared_key_file)
    if weights.server_public_key and not (weights.server_secret_key_file or weights.store):
        report.warnings.append(
            "weights.server_public_key without weights.server_secret_key_file is for generators alone: a trainer "
            "with these settings ends"
        )


def _store(report: Report) -> None:
    store = report.config.weights.store
    if not store:
        return
    from pipeline.weights.store.folder import check_store, missing_directory

    check_store(store)
    report.saw("weights", f"through files in {store}")
    if missing := missing_directory(store):
        report.warnings.append(
            f"weights.store = {store!r}: {missing} is no directory here; make it, or mount it, on all machines "
            "where trainer and generators run"
        )


def _steps(report: Report) -> None:
    from pipeline.learner.schedule import check_schedule
    from pipeline.run.data import check_end

    check_end(report.config)
    check_schedule(report.config.trainer)


def _advice(report: Report) -> None:
    config = report.config
    report.warnings += advice(config.algorithm, config.generation, config.staleness)


def _trackers(report: Report) -> None:
    from pipeline.records.tracking import require_trackers

    require_trackers(report.config.tracking)


def _model_files(report: Report) -> None:
    from pipeline.models.files import check_model_files

    if report.config.generation.engine != "scripted":
        check_model_files(report.config.model)


def _scorers(report: Report) -> None:
    from pipeline.checks import scoring

    scoring.models(report)


def _training(report: Report) -> None:
    from pipeline.checks import scoring
    from pipeline.run.data import training_set

    if not _is_put_off(report, report.config.data.path):
        dataset = training_set(report.config, max_rows=MAX_ROWS)
        _rows(report, "data", dataset)
        scoring.rows(report, dataset)


def _held_out(report: Report) -> None:
    from pipeline.run.data import held_out_set

    if _is_put_off(report, report.config.data.eval_path):
        return
    dataset = held_out_set(report.config, max_rows=MAX_ROWS)
    if dataset is not None:
        _rows(report, "held out", dataset)


def _is_put_off(report: Report, path: str) -> bool:
    from pipeline.prompts.files import is_on_hub

    return report.is_quick and bool(path) and is_on_hub(path)


def _rows(report: Report, subject: str, dataset: Dataset) -> None:
    report.datasets.append(dataset)
    number = f"the first {len(dataset)} rows" if dataset.is_cut else f"{len(dataset)} rows"
    kinds = dataset.kinds()
    columns = sorted(set[str]().union(*kinds))
    report.saw(subject, f"{dataset.name}: {number}; columns besides the prompt: {', '.join(columns) or 'none'}")
    for kind, index in kinds.items():
        lacking = [name for name in columns if name not in kind]
        if lacking:
            report.warnings.append(
                f"{dataset.where(index)} lacks {', '.join(lacking)}, which other rows have: "
                "rewards must do without, or the row goes"
            )


def _rewards(report: Report) -> None:
    from pipeline.rewards import TrialRow, load_rewards

    rows = [
        TrialRow(where=dataset.where(index), prompt=dataset[index].prompt, columns=dataset[index].columns)
        for dataset in report.datasets
        for index in dataset.kinds().values()
    ]
    scoring = report.config.scoring
    rewards = load_rewards(scoring.rewards, rows, may_be_none=scoring.has_models)
    if rewards:
        report.saw("rewards", ", ".join(f"{reward.name} (weight {reward.weight:g})" for reward in rewards))


def _trial(report: Report) -> None:
    from pipeline.rewards.loading import TrialRow
    from pipeline.rewards.trial import call_rewards

    for dataset in report.datasets[:1]:
        row = TrialRow(where=dataset.where(0), prompt=dataset[0].prompt, columns=dataset[0].columns)
        group_size = report.config.generation.group_size
        for line in call_rewards(report.config.scoring, row, group_size=group_size):
            report.saw("rewards", line)


def _server(report: Report) -> None:
    """Never a problem: the server may be started later, or be out of reach from here."""
    from pipeline.checks.findings import Level
    from pipeline.checks.server import examine_server
    from pipeline.local.server_address import is_without_server

    config = report.config
    if is_without_server(config):
        report.saw("server", "a private one, which `rollstream up` starts")
        return
    for finding in examine_server(config):
        if finding.level is Level.OK:
            report.saw("server", finding.text)
        else:
            report.warnings.append(f"redis.url: {finding.text}; {finding.way_out}")


_QUICK = (
    _preset,
    _engine,
    _unread,
    _keys,
    _store,
    _steps,
    _advice,
    _trackers,
    _model_files,
    _training,
    _held_out,
    _rewards,
    _scorers,
)
