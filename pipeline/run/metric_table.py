"""Every metric in one table, for docs/operations.md.

In: the declarations. Out: Markdown, which `python -m pipeline.run.metric_table` prints. It says
nothing that a declaration does not say.
"""

from __future__ import annotations

import sys

from pipeline.instruments import WORKER_LABELS, Spec
from pipeline.metrics import Metrics
from pipeline.run.metrics import READ_SECONDS, REDIS_UP, RUN_METRICS

_OF_RUN = ("run",)


def all_specs() -> list[tuple[Spec, tuple[str, ...]]]:
    """Every declaration with the labels that all its series have: those of a worker, or of the run."""
    of_workers = [(spec, WORKER_LABELS) for spec in Metrics.specs()]
    return [*of_workers, *((spec, _OF_RUN) for spec in (REDIS_UP, READ_SECONDS, *RUN_METRICS))]


def render_table() -> str:
    """The metrics as a Markdown table."""
    lines = ["| metric | type | unit | from | labels | meaning | how to read it |", "|---|---|---|---|---|---|---|"]
    for spec, common in all_specs():
        source = ", ".join(spec.roles) or ("every worker" if common == WORKER_LABELS else "exporter")
        labels = ", ".join(spec.labels)
        lines.append(
            f"| `{spec.name}` | {spec.kind.value} | {spec.unit} | {source} | {labels} | {spec.help} | {spec.reading} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_table())
