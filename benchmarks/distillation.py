"""How many samples a policy needs with a teacher, and how many with a reward alone.

The demo's task and start: a tiny model writes words backwards, from about 0.4 right. The teacher is the
same model after more supervision. Whole runs, which differ in what they learn from and in nothing else:
the reward (grpo), both (grpo with distillation_coef), the teacher alone by the sampled tokens (opd), or by
its likeliest ids (jsd_coef). What counts is the step at which a mean of `target` is first seen on the
held-out words, times the completions of a step. Runs of one seed share their start, teacher and words.

    python -m benchmarks.distillation --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import report
from pipeline.config import Config
from pipeline.demo.cold_start import cold_start
from pipeline.demo.prepare import Prepared, prepare
from pipeline.demo.settings import demo_config
from pipeline.demo.task import make_words
from pipeline.local.crew import Crew
from pipeline.local.run import LocalRun
from pipeline.records.recorder import read_metrics
from pipeline.settings.files import load_config, show

RUNS = {
    "reward": (),
    "both": ("algorithm.distillation_coef={coefficient}",),
    "teacher": ("algorithm.preset='opd'",),
    "divergence": ("algorithm.advantage='none'", "algorithm.jsd_coef=1.0", "algorithm.jsd_beta={beta}"),
}

DISTANCES = ("teacher_kl", "teacher_jsd")
Results = dict[str, float | None]


def distillation(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    """All results, a list with one for each seed; and how many times fewer samples than the reward alone needs."""
    found = [of_seed(seed, arguments, directory / str(seed)) for seed in arguments.seeds]
    results: dict[str, object] = {name: [row[name] for row in found] for name in found[0]}
    for name in arguments.runs:
        ratios = [ratio for row in found if (ratio := _saved(row, name)) is not None]
        if name != "reward" and len(ratios) == len(found):
            results[f"samples_saved_{name}"] = round(statistics.median(ratios), 3)
            results[f"samples_saved_{name}_worst"] = round(min(ratios), 3)
    return results


def _saved(row: Results, name: str) -> float | None:
    alone, ours = row.get("samples_to_target_reward"), row[f"samples_to_target_{name}"]
    return None if alone is None or ours is None else alone / ours


def of_seed(seed: int, arguments: argparse.Namespace, directory: Path) -> Results:
    """Every run from the start that this seed gives."""
    prepared = prepare(directory / "start", seed)
    teacher = directory / "teacher"
    words = make_words(seed=seed)
    accuracy = cold_start(teacher, words.supervised, enough=arguments.teacher, max_steps=arguments.teacher_steps)
    results: Results = {"teacher_accuracy": round(accuracy, 3)}
    for name in arguments.runs:
        config = config_of(name, seed, prepared, teacher, directory, arguments)
        results |= _outcome(name, config, target=arguments.target)
    return results


def _outcome(name: str, config: Config, *, target: float) -> Results:
    """Of one run, from its records."""
    with LocalRun(config, Crew(), persist=False) as run:
        code = asyncio.run(run.run(run.supervisor(lambda worker, line: None), lambda line: None))
        ledger = asyncio.run(run.ledger())
    if code:
        raise SystemExit(f"the run {name!r} ended with exit code {code}: see {config.run_dir}")
    rows = read_metrics(config.run_dir)
    seen = [(row["step"], row["eval_reward"]) for row in rows if "eval_reward" in row]
    reached = next((step for step, value in seen if value >= target), None)
    samples = config.trainer.groups_per_step * config.generation.group_size
    return {
        f"start_{name}": seen[0][1],
        f"end_{name}": seen[-1][1],
        f"samples_to_target_{name}": None if reached is None else float(reached * samples),
        **{f"{value}_first_{name}": _seen(rows, value, 0) for value in DISTANCES},
        **{f"{value}_last_{name}": _seen(rows, value, -1) for value in DISTANCES},
        f"lost_{name}": None if ledger is None else float(ledger.fed - ledger.trained),
    }


def config_of(
    name: str, seed: int, prepared: Prepared, teacher: Path, directory: Path, arguments: argparse.Namespace
) -> Config:
    """One of the runs."""
    base = demo_config(prepared, run_dir=directory, name=name, seed=seed, steps=arguments.steps)
    written = directory / f"{name}.toml"
    written.write_text(show(base), encoding="utf-8")
    more = [setting.format(coefficient=arguments.coefficient, beta=arguments.beta) for setting in RUNS[name]]
    if more:
        top_k = arguments.top_k if name == "divergence" else 0
        more.append(f"scoring.teachers=[{{model={json.dumps(str(teacher))}, top_k={top_k}}}]")
    common = [
        f"evaluation.every_steps={arguments.every}",
        f"trainer.learning_rate={arguments.learning_rate}",
        "trainer.schedule=constant",  # or the step of the target would depend on the number of steps
    ]
    return load_config([written], environ={}, overrides=[*common, *more])


def _seen(rows: Sequence[dict[str, float]], value: str, index: int) -> float:
    return round([row[value] for row in rows if value in row][index], 4)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out words")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of each run")
    parser.add_argument("--target", type=float, default=0.9, help="mean reward on held-out words")
    parser.add_argument("--coefficient", type=float, default=0.3, help="distillation_coef where both are learnt from")
    parser.add_argument("--beta", type=float, default=0.5, help="jsd_beta of the divergence")
    parser.add_argument("--top-k", type=int, default=16, help="of the teacher, for the divergence")
    parser.add_argument("--teacher", type=float, default=0.99, help="supervise the teacher until so many are right")
    parser.add_argument("--teacher-steps", type=int, default=2000, help="but for no more steps than this")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each with a start and words of its own")
    return parser.parse_args(argv)


def main() -> None:
    """Run and report."""
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="rollstream-distillation-") as directory:
        results = distillation(arguments, Path(directory))
    report("distillation", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
