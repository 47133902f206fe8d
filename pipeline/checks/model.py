"""The part of `config check` that needs the tokenizer and the model's structure, but no weights.

In: a report in the making. Out: its facts on algorithm, prompts and policy; a UsageError where a
worker would raise one. Kept apart because it imports torch.
"""

from __future__ import annotations

from pipeline.algorithms import resolve_algorithm
from pipeline.checks.config import MAX_ROWS, Report
from pipeline.models.loading import context_length, load_config, load_skeleton, resolve_device
from pipeline.models.quantization import require_quantization
from pipeline.models.routing import check_model_type
from pipeline.models.weights import ADAPTER_MARK
from pipeline.policy.compiling import require_compiler
from pipeline.prompts import Dataset, prompt_lengths
from pipeline.run.data import RunData, load_run_data


def algorithm(report: Report) -> None:
    """Every name is in its table."""
    resolve_algorithm(report.config.algorithm)


def devices(report: Report) -> None:
    """The devices are there, and what compiles for the trainer's."""
    if report.config.generation.engine != "scripted":
        resolve_device(report.config.generation.device, setting="generation.device")
        trainer = resolve_device(report.config.trainer.device, setting="trainer.device")
        if report.config.trainer.compile:
            require_compiler(trainer)


def prompts(report: Report) -> None:
    """Every prompt that is looked at has tokens, and some have few enough."""
    data = load_run_data(report.config, max_rows=MAX_ROWS)
    _lengths(report, data, data.training)
    if not data.training.is_cut:
        data.source.next_group(0, 0)  # the trainer's own refusal where none is short enough
    if data.held_out is None:
        return
    _lengths(report, data, data.held_out)
    if not data.held_out.is_cut or report.config.evaluation.num_prompts:
        data.evaluation_groups(0)


def _lengths(report: Report, data: RunData, dataset: Dataset) -> None:
    lengths, limit = prompt_lengths(dataset, data.encode), data.max_prompt_tokens
    num_skipped = sum(length > limit for length in lengths)
    report.saw("prompts", f"{dataset.name}: {min(lengths)} to {max(lengths)} tokens, up to {limit} fit")
    if num_skipped:
        first = next(index for index, length in enumerate(lengths) if length > limit)
        report.warnings.append(
            f"{num_skipped} of {len(lengths)} prompts are longer than {limit} tokens and will be skipped, "
            f"the first is {dataset.where(first)}"
        )


def policy(report: Report) -> None:
    """The model can be made, and has the modules that an adapter is for."""
    config = report.config
    require_quantization(config.lora)
    if config.generation.engine == "scripted":
        report.saw("model", "none: the scripted engine makes its tokens up")
        return
    model_config = load_config(config.model)
    if config.generation.replay_routing:
        check_model_type(model_config.get_text_config(decoder=True).model_type)
    skeleton = load_skeleton(config.model, config.lora, attention=config.model.attention)
    count = {name: parameter.numel() for name, parameter in skeleton.named_parameters()}
    adapter = sum(number for name, number in count.items() if ADAPTER_MARK in name)
    context = context_length(config.model, model_config)
    report.saw(
        "model", f"{config.model.path}: {sum(count.values()) - adapter:,} parameters, context {context:,} tokens"
    )
    if config.lora.rank:
        report.saw("adapter", f"rank {config.lora.rank}: {adapter:,} parameters are trained")
