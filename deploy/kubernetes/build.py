"""Writes what manifests repeat of other files: `python -m deploy.kubernetes.build`.

In: the server's settings and the rules for Prometheus, as kustomize reads nothing outside its folder. Out:
base/valkey.conf and components/monitoring/rules.yaml.
"""

from __future__ import annotations

from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[1]
_HEAD = "# Written by `python -m deploy.kubernetes.build` from deploy/prometheus/rules.\n"


def files() -> dict[Path, str]:
    """Path -> content."""
    folder = Path(__file__).parent
    return {
        folder / "base" / "valkey.conf": (DEPLOY / "redis" / "valkey.conf").read_text(encoding="utf-8"),
        folder / "components" / "monitoring" / "rules.yaml": _HEAD
        + yaml.safe_dump(_rules(), sort_keys=False, width=120),
    }


def _rules() -> dict[str, object]:
    parts = [
        yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "rollstream"},
        "spec": {"groups": [group for part in parts for group in part["groups"]]},
    }


def main() -> None:
    """Write them."""
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
