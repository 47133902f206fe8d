"""The last row of a role's board: its processes."""

from __future__ import annotations

from deploy.grafana.board import Row
from deploy.grafana.boards.promql import RATE, RUN, of_role
from deploy.grafana.panels import BYTES, RATIO, SECONDS, Query, graph


def processes(role: str) -> Row:
    """Processors, memory and waits of the workers of one role."""
    labels = of_role(role)
    return Row(
        title="Processes",
        panels=(
            graph(
                "Processors in use",
                "100 % is one of them. The worker's own process, without those that it starts.",
                Query(f"rate(process_cpu_seconds_total{{{labels}}}[{RATE}])", "{{worker}}"),
                unit=RATIO,
            ),
            graph(
                "Memory",
                "Resident; steady growth is a leak.",
                Query(f"process_resident_memory_bytes{{{labels}}}", "{{worker}}"),
                unit=BYTES,
            ),
            graph(
                "Waiting now",
                "How long a worker has been waiting for what it lacks; `rollstream workers` says what.",
                Query(f'max by (worker) (rollstream_waiting_seconds{{{RUN}, role="{role}"}})', "{{worker}}"),
                unit=SECONDS,
            ),
        ),
    )
