"""Manifests for Kubernetes as kustomize renders them, and views of what is in them.

In: the name of an overlay and a folder. Out: manifests with users and keys made as the README says.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.files import DEPLOY
from tests.deploy.servers import make_users
from tests.deploy.test_containers import MODELS, ROLES, environment
from tests.deploy.test_files import program

KUBERNETES = DEPLOY / "kubernetes"
RUN = "my-run"
Manifest = dict[str, Any]


def rendered(overlay: str, folder: Path, *components: str, run: str = RUN) -> list[Manifest]:
    """What an overlay makes, with more components. run: the name in its base."""
    place = folder / "kubernetes"
    shutil.copytree(KUBERNETES, place, ignore=shutil.ignore_patterns("*.env", "*.key", "users.acl", "__pycache__"))
    _add(place / "overlays" / overlay / "kustomization.yaml", components)
    base = place / "base" / "kustomization.yaml"
    base.write_text(base.read_text().replace(f"instance: {RUN}", f"instance: {run}"))
    _make_users_beside(place / "secrets")
    path = f"{Path(program('rollstream')).parent}:/usr/bin:/bin"
    subprocess.run([place / "secrets" / "weight-keys.sh"], check=True, env={"PATH": path})
    words = [program("kubectl"), "kustomize", str(place / "overlays" / overlay)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def _add(file: Path, components: Sequence[str]) -> None:
    """As a person does who takes away what is before the lines that name them."""
    text = file.read_text()
    for component in components:
        line = f"- ../../components/{component}\n"
        assert f"# {line}" in text
        text = text.replace(f"# {line}", line)
    file.write_text(text)


def _make_users_beside(folder: Path) -> None:
    users = make_users(folder.parent / "users", RUN, "--server", "valkey:6379")
    for path in users.folder.iterdir():
        path.rename(folder / path.name)


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """Those of these kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and template of whatever makes pods."""
    for manifest in of_kind(manifests, "Deployment", "StatefulSet", "Job"):
        yield manifest["metadata"]["name"], manifest["spec"]["template"]


def workers(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Role, pod and container of each worker."""
    for name, template in pods(manifests):
        if name in {*ROLES, *MODELS}:
            (container,) = template["spec"]["containers"]
            yield name, template, container


def container_environment(role: str, container: Manifest, manifests: list[Manifest]) -> dict[str, str]:
    """What the worker finds in its environment, with the pod's own facts filled in."""
    fields = {"metadata.labels['app.kubernetes.io/instance']": RUN, "status.podIP": "10.0.0.7"}
    values = environment(role)
    for item in container["env"]:
        source = item.get("valueFrom", {})
        if "fieldRef" in source:
            values[item["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif source.get("secretKeyRef", {}).get("optional"):
            continue
        elif "secretKeyRef" in source:
            values[item["name"]] = secret(manifests, source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]]
        else:
            values[item["name"]] = item["value"]
    return values


def secret(manifests: list[Manifest], name: str) -> dict[str, str]:
    """What a Secret holds."""
    (found,) = [item for item in of_kind(manifests, "Secret") if item["metadata"]["name"] == name]
    return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}


def references(volume: Manifest) -> set[tuple[str, str]]:
    """Kind and name of what a volume is made of."""
    names = {
        "Secret": volume.get("secret", {}).get("secretName") or volume.get("secret", {}).get("name"),
        "ConfigMap": volume.get("configMap", {}).get("name"),
        "PersistentVolumeClaim": volume.get("persistentVolumeClaim", {}).get("claimName"),
    }
    return {(kind, name) for kind, name in names.items() if name}


def chosen_by(selector: Manifest, labels: dict[str, dict[str, str]]) -> set[str]:
    """What a selector means, of these pods."""
    return {name for name, own in labels.items() if selector["matchLabels"].items() <= own.items()}
