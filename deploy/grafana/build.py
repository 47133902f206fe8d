"""Writes the boards: `python -m deploy.grafana.build`.

In: `deploy.grafana.boards`. Out: one JSON file for each in dashboards/, as Grafana reads them. Files
of boards that are gone are removed.
"""

from __future__ import annotations

from pathlib import Path

from deploy.grafana.boards import BOARDS

DASHBOARDS = Path(__file__).parent / "dashboards"


def files() -> dict[Path, str]:
    """What is to be in dashboards/: path -> content."""
    return {DASHBOARDS / f"{board.name}.json": board.to_json() for board in BOARDS}


def main() -> None:
    """Make dashboards/ what the boards say."""
    wanted = files()
    for path in set(DASHBOARDS.glob("*.json")) - set(wanted):
        path.unlink()
    for path, content in wanted.items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
