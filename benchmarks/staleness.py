"""What old samples cost, and what corrections give back: the demo's task with every token equally old.

Runs of one process each (`benchmarks.staleness_run`): engine, rewards and learner are real, and the age of
the samples is set instead of measured, so that the same arguments give the same numbers. Lags and
corrections are crossed, each with several seeds; the runs of one seed see the same words in the same order.

    python -m benchmarks.staleness --results runs/staleness.jsonl --json

What is in the file of results already is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.report import report
from benchmarks.staleness_figures import draw, figures, table
from benchmarks.staleness_run import CORRECTIONS, OTHER_PRESETS, Case, Curve, run_case
from pipeline.demo.cold_start import cold_start
from pipeline.demo.prepare import Prepared
from pipeline.demo.task import make_words, row

_MAX_SEEDS = 10


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Seed by seed, so that what there is of an unfinished study is balanced.

    Without a lag all corrections are the same update, so one stands for all.
    """
    for seed in range(arguments.seeds):
        for lag in arguments.lags:
            named = [name if lag or name not in CORRECTIONS else "none" for name in arguments.corrections]
            for correction in dict.fromkeys(named):
                yield Case(
                    correction=correction,
                    lag=lag,
                    seed=seed,
                    learning_rate=arguments.learning_rate,
                    groups_per_step=arguments.groups_per_step,
                    steps=arguments.steps,
                    evaluate_every=arguments.evaluate_every,
                    num_held_out=arguments.held_out,
                    schedule=arguments.schedule,
                )


def study(wanted: Sequence[Case], results: Path | None, starts: Path) -> dict[Case, Curve]:
    """Every case's curve, run now where `results` does not have it. starts: folder of what the seeds set out from."""
    found = dict(read(results)) if results is not None and results.exists() else {}
    missing = [case for case in wanted if case not in found]
    for number, case in enumerate(missing, start=1):
        curve = run_case(case, start_of(starts, case.seed))
        found[case] = curve
        if results is not None:
            _append(results, case, curve)
        print(f"{number}/{len(missing)} {case.correction} lag {case.lag} seed {case.seed}: {curve.held_out[-1]}")
    return {case: found[case] for case in wanted}


def read(results: Path) -> Iterator[tuple[Case, Curve]]:
    """What is in a file of results."""
    for line in results.read_text(encoding="utf-8").splitlines():
        row: Mapping[str, dict[str, object]] = json.loads(line)
        yield Case(**row["case"]), Curve(**row["curve"])  # type: ignore[arg-type]


def start_of(folder: Path, seed: int) -> Prepared:
    """The words of a seed, and the model that all seeds set out from, which is trained where it is not there yet."""
    words = make_words(seed=seed)
    start = Prepared(model=folder / "model", training=folder / f"{seed}.jsonl", held_out=folder / "held_out.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    for file, some in ((start.training, words.training), (start.held_out, words.held_out)):
        file.write_text("".join(json.dumps(row(word)) + "\n" for word in some), encoding="utf-8")
    if not (start.model / "config.json").exists():
        cold_start(start.model, words.supervised)
    return start


def _append(results: Path, case: Case, curve: Curve) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"case": dataclasses.asdict(case), "curve": dataclasses.asdict(curve)}) + "\n")


def _parsed(words: Iterable[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 8, 16], help="ages in steps")
    parser.add_argument("--corrections", nargs="+", default=list(CORRECTIONS), choices=[*CORRECTIONS, *OTHER_PRESETS])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each, at most 10")
    parser.add_argument("--steps", type=int, default=120, help="optimiser steps of a run")
    parser.add_argument("--groups-per-step", type=int, default=16, help="groups of eight completions")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--schedule", default="constant", choices=("constant", "linear", "cosine"))
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--held-out", type=int, default=1024, help="words to evaluate on")
    parser.add_argument("--results", type=Path, help="JSONL: read first, and added to run by run")
    parser.add_argument("--starts", type=Path, help="folder in which the supervised start is kept, to be used again")
    parser.add_argument("--plot", type=Path, help="PNG of the curves, where matplotlib is installed")
    arguments = parser.parse_args(None if words is None else list(words))
    at_least_one = (arguments.steps, arguments.groups_per_step, arguments.evaluate_every, arguments.held_out)
    if min(at_least_one) < 1 or min(arguments.lags) < 0 or arguments.learning_rate <= 0:
        sys.exit("error: --lags are 0 or more, all other numbers above 0")
    if not 1 <= arguments.seeds <= _MAX_SEEDS:
        sys.exit(f"error: --seeds is 1 to {_MAX_SEEDS}")
    return arguments


def main() -> None:
    """Run what was asked for and say what came of it."""
    arguments = _parsed()
    with tempfile.TemporaryDirectory() as folder:
        curves = study(list(cases(arguments)), arguments.results, arguments.starts or Path(folder))
    if arguments.plot is not None:
        draw(curves, arguments.plot)
    if not arguments.json:
        print(table(curves))
    report("staleness", figures(curves), as_json=arguments.json)


if __name__ == "__main__":
    main()
