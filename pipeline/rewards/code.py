"""Shipped reward for programs: which of the row's tests does the completion's Python pass?

In: completions with a program in each, and tests. Out: the share of tests passed, or None where the row has none.
Programs run in a sandbox (`pipeline.rewards.sandbox`); without one nothing is run.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pipeline.errors import RewardLoadError
from pipeline.rewards.columns import Completions, column, texts_of
from pipeline.rewards.sandbox import Verdict, isolation_problem, run_python

_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(?P<program>.*?)(?:\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)


def python_tests(
    prompts: Sequence[Any],
    completions: Completions,
    *,
    tests_column: str = "tests",
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    all_or_nothing: bool = False,
    **columns: Any,
) -> list[float | None]:
    """Share of the row's tests that the program in the completion passes, 0 to 1.

    The program is the last block fenced by ```, or else the whole text. Column `tests` (see tests_column) is a list,
    or one test: text of Python that is run behind the program and must not raise (`assert add(1, 2) == 3`), or
    {"input": ..., "output": ...}: standard input, and what the program must then print, but for white space at the
    ends of lines. timeout_s, memory_mb: of each test. all_or_nothing: 1.0 only where all are passed, else 0.0.
    None where the row has no test. See SECURITY.md for what the sandbox keeps in, and what not.
    """
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        raise ValueError(f"timeout_s = {timeout_s!r}: seconds that a test may take, more than 0")
    if not (isinstance(memory_mb, int) and memory_mb >= 16):
        raise ValueError(f"memory_mb = {memory_mb!r}: a whole number, and Python alone takes 16")
    if problem := isolation_problem():
        raise RewardLoadError(
            f"the reward 'python_tests' runs what the model wrote, and {problem}; allow user namespaces for the scorer "
            "(a container's seccomp profile often forbids them), or run programs in a sandbox of your own"
        )
    run = partial(run_python, timeout_s=timeout_s, memory_mb=memory_mb)

    def passes(program: str, test: object) -> bool:
        if isinstance(test, dict):
            if "output" not in test:
                raise ValueError(f'a test has {sorted(map(str, test))} and no "output" to compare with')
            outcome = run(program, str(test.get("input", "")))
            return outcome.verdict is Verdict.OK and _lines(outcome.output) == _lines(str(test["output"]))
        # A program that ends itself before the test, with exit code 0, does not print this.
        mark = secrets.token_hex(16)
        outcome = run(f"{program}\n{test}\nprint({mark!r})\n")
        return outcome.verdict is Verdict.OK and outcome.output.endswith(f"{mark}\n")

    def score(text: str, tests: object) -> float | None:
        wanted = tests if isinstance(tests, list) else [tests]
        if tests is None or not wanted:
            return None
        program = program_of(text)
        num_passed = sum(passes(program, test) for test in wanted)
        return float(num_passed == len(wanted)) if all_or_nothing else num_passed / len(wanted)

    tests = column(columns, tests_column, len(completions))
    with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(score, texts_of(completions), tests))


def program_of(text: str) -> str:
    """The last fenced block, also one that was cut off; the whole text where there is none."""
    blocks = [match["program"] for match in _BLOCK.finditer(text)]
    return blocks[-1] if blocks else text


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
