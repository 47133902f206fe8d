"""Manifests for Kubernetes, as kustomize renders them: valid, and consistent with settings, images and users."""

from __future__ import annotations

import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from deploy.kubernetes.build import files
from pipeline.config import Config
from pipeline.embedded import find_server
from pipeline.keys import CONSUMER_GROUP, TAKEN_BY, Keys
from pipeline.settings.files import load_config
from pipeline.weights.security import check_public_key, read_keys
from tests.deploy.files import DEPLOY, LEAVE_S, check_command
from tests.deploy.manifests import (
    KUBERNETES,
    RUN,
    Manifest,
    chosen_by,
    container_environment,
    of_kind,
    pods,
    references,
    rendered,
    secret,
    workers,
)
from tests.deploy.servers import make_users, on_socket, serving
from tests.deploy.test_containers import MODELS, ROLES
from tests.deploy.test_files import program

NAMESPACE = "rollstream"
VERSIONS = ("1.30.0", "1.37.0")


WITH_MODELS = ("gpu", "teachers", "keda-teachers", "judges", "keda-judges")


@pytest.fixture(scope="module", params=[("local",), ("gpu",), WITH_MODELS], ids=["local", "gpu", "models"])
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """What an overlay makes, with users and keys made as the README says."""
    if request.param == WITH_MODELS:
        return list(request.getfixturevalue("gpu"))
    return rendered(*request.param, tmp_path_factory.mktemp("kubernetes"))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """The overlay with everything."""
    overlay, *components = WITH_MODELS
    return rendered(overlay, tmp_path_factory.mktemp("kubernetes"), *components)


def test_what_is_repeated_is_as_it_stands_elsewhere() -> None:
    for path, content in files().items():
        assert path.read_text(encoding="utf-8") == content, "run `python -m deploy.kubernetes.build`"
    example = DEPLOY / "compose" / "example" / "rollstream.toml"
    assert (KUBERNETES / "base" / "rollstream.toml").read_text() == example.read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(manifests: list[Manifest], version: str) -> None:
    ours = {"ScaledObject", "TriggerAuthentication", "PodMonitor", "PrometheusRule"}
    checked = [manifest for manifest in manifests if manifest["kind"] not in ours]
    assert len(checked) >= 20
    for manifest in checked:
        kubernetes_validate.validate(manifest, version, strict=True)
    assert {manifest["metadata"].get("namespace", NAMESPACE) for manifest in manifests} == {NAMESPACE}


def test_workers_start_with_settings_that_load(manifests: list[Manifest], tmp_path: Path) -> None:
    (settings,) = [
        item["data"] for item in of_kind(manifests, "ConfigMap") if item["metadata"]["name"].startswith("input")
    ]
    file = tmp_path / "rollstream.toml"
    file.write_text(settings[file.name])
    found = list(workers(manifests))
    assert {role for role, _, _ in found} - set(ROLES) in (set(), set(MODELS))
    for role, template, container in found:
        check_command([role, *container["args"]])
        config = load_config([file], environ=container_environment(role, container, manifests))
        assert config.run.name == RUN == template["metadata"]["labels"]["app.kubernetes.io/instance"]
        assert config.redis.url.get_secret_value().startswith(f"redis://{RUN}.{role}:")
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["metrics"] == (config.exporter.port if role == "exporter" else config.worker.port)
        assert config.worker.host == "0.0.0.0"


def test_the_weight_channel_is_encrypted_and_reaches_the_trainer(manifests: list[Manifest], tmp_path: Path) -> None:
    found = {
        role: load_config([], environ=container_environment(role, box, manifests))
        for role, _, box in workers(manifests)
    }
    trainer, public_key = found["trainer"].weights, found["generator"].weights.server_public_key
    (box,) = [box for role, _, box in workers(manifests) if role == "trainer"]
    ports = {port["name"]: port["containerPort"] for port in box["ports"]}
    assert (trainer.port, trainer.announce_port) == (ports["tiles"], ports["announcements"])
    assert (trainer.host, trainer.advertise, trainer.insecure) == ("0.0.0.0", "10.0.0.7", False)
    (name,) = [
        item["metadata"]["name"] for item in of_kind(manifests, "Secret") if "weights-key" in item["metadata"]["name"]
    ]
    key = tmp_path / "weights.key"
    key.write_text(secret(manifests, name)["weights.key"])
    check_public_key(public_key)
    assert read_keys(str(key), "key").public == public_key
    mounts = {mount["mountPath"] for mount in box["volumeMounts"]}
    assert str(Path(trainer.server_secret_key_file).parent) in mounts


def test_probes_ask_what_workers_answer_and_pods_have_time_to_drain(manifests: list[Manifest]) -> None:
    for _, template, container in workers(manifests):
        asked = {kind: container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert [get["path"] for get in asked.values()] == ["/healthz", "/healthz", "/readyz"]
        assert {get["port"] for get in asked.values()} == {"metrics"}
        assert template["spec"]["terminationGracePeriodSeconds"] >= Config().worker.drain_timeout_s + LEAVE_S


def test_pods_have_no_more_rights_than_they_need(manifests: list[Manifest]) -> None:
    for name, template in pods(manifests):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            rights = container["securityContext"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True), name


def test_what_pods_refer_to_is_there(manifests: list[Manifest]) -> None:
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    for name, template in pods(manifests):
        spec = template["spec"]
        wanted = {
            ("Secret", item["valueFrom"]["secretKeyRef"]["name"])
            for box in spec["containers"]
            for item in box.get("env", [])
            if "secretKeyRef" in item.get("valueFrom", {}) and not item["valueFrom"]["secretKeyRef"].get("optional")
        }
        for volume in spec["volumes"]:
            wanted |= references(volume)
            for source in volume.get("projected", {}).get("sources", []):
                wanted |= references(source)
        assert wanted <= there, name
        volumes = {volume["name"] for volume in spec["volumes"]} | ({"data"} if name == "valkey" else set())
        assert {mount["name"] for box in spec["containers"] for mount in box["volumeMounts"]} <= volumes


def test_budgets_and_services_mean_one_kind_of_pod_each(manifests: list[Manifest]) -> None:
    labels = {name: template["metadata"]["labels"] for name, template in pods(manifests)}
    for manifest in of_kind(manifests, "PodDisruptionBudget", "Service"):
        selector = manifest["spec"]["selector"]
        wanted = selector.get("matchLabels", selector)
        assert [name for name, own in labels.items() if wanted.items() <= own.items()] == [manifest["metadata"]["name"]]
    assert {item["metadata"]["name"] for item in of_kind(manifests, "PodDisruptionBudget")} == set(labels) - {
        "exporter"
    }


def test_teachers_and_judges_are_of_the_run_that_the_base_names(tmp_path: Path) -> None:
    others = rendered("local", tmp_path, "teachers", "judges", run="other")
    selected = {item["metadata"]["name"]: item["spec"]["selector"] for item in of_kind(others, "PodDisruptionBudget")}
    for role in MODELS:
        ((_, template, _),) = [found for found in workers(others) if found[0] == role]
        assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == "other"
        (deployment,) = [item for item in of_kind(others, "Deployment") if item["metadata"]["name"] == role]
        assert deployment["spec"]["selector"] == selected[role] == {"matchLabels": template["metadata"]["labels"]}


def test_a_trainer_with_wrong_settings_is_not_started_again(manifests: list[Manifest]) -> None:
    (job,) = of_kind(manifests, "Job")
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_the_server_starts_as_the_manifest_has_it(manifests: list[Manifest], short_path: Path) -> None:
    (template,) = [template for name, template in pods(manifests) if name == "valkey"]
    (box,) = template["spec"]["containers"]
    users = make_users(short_path / "users", RUN)
    path = short_path / "server.sock"
    _, conf, *words = box["command"]
    assert (KUBERNETES / "base" / Path(conf).name).is_file()
    rest = words[: words.index("--dir")] + words[words.index("--maxmemory") :]
    with serving(find_server(), short_path, users, *rest, *on_socket(path), url=users.on_socket("operator", path)):
        asking = box["livenessProbe"]["exec"]["command"][1:]
        answer = subprocess.run(
            [program("redis-cli"), "-s", str(path), *asking], capture_output=True, text=True, check=True
        )
        assert answer.stdout == "PONG\n"


def test_autoscaling_counts_what_waits_for_a_role_as_the_user_for_it(gpu: list[Manifest]) -> None:
    (login,) = of_kind(gpu, "TriggerAuthentication")
    parameters = {
        item["parameter"]: secret(gpu, item["name"])[item["key"]] for item in login["spec"]["secretTargetRef"]
    }
    assert parameters["username"] == f"{RUN}.autoscaler"
    streams = {role: stream for stream, role in TAKEN_BY.items() if role != "trainer"}
    scaled = {item["spec"]["scaleTargetRef"]["name"]: item["spec"] for item in of_kind(gpu, "ScaledObject")}
    assert set(scaled) == set(streams)
    for role, spec in scaled.items():
        assert spec["minReplicaCount"] == 0
        by_lag, by_work = [trigger["metadata"] for trigger in spec["triggers"]]
        for metadata in (by_lag, by_work):
            assert metadata["stream"] == Keys(RUN).stream(streams[role])
            assert metadata["consumerGroup"] == CONSUMER_GROUP
            assert metadata["address"] == f"valkey.{NAMESPACE}.svc:6379"
        assert {"lagCount", "activationLagCount"} <= set(by_lag)
        assert "pendingEntriesCount" in by_work
        assert {trigger["authenticationRef"]["name"] for trigger in spec["triggers"]} == {login["metadata"]["name"]}
    counted = [item for item in of_kind(gpu, "Deployment") if item["metadata"]["name"] in streams]
    assert all("replicas" not in item["spec"] for item in counted)


def test_the_prometheus_operator_asks_all_workers_and_knows_all_rules(gpu: list[Manifest], tmp_path: Path) -> None:
    (monitor,) = of_kind(gpu, "PodMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    for _, template, container in workers(gpu):
        assert wanted.items() <= template["metadata"]["labels"].items()
        assert {port["name"] for port in container["ports"]} >= {
            e["port"] for e in monitor["spec"]["podMetricsEndpoints"]
        }
    (rule,) = of_kind(gpu, "PrometheusRule")
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    subprocess.run([program("promtool"), "check", "rules", file], check=True, capture_output=True)


def test_trainer_generators_and_teachers_have_a_gpu_and_the_models(gpu: list[Manifest]) -> None:
    for role, _, container in workers(gpu):
        has_gpu = role in {"trainer", "generator", "teacher"}
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) is has_gpu
        assert any(mount["mountPath"] == "/models" for mount in container["volumeMounts"]) is has_gpu


def test_policies_open_ports_that_pods_have_and_let_in_who_needs_them(gpu: list[Manifest]) -> None:
    labels = {name: template["metadata"]["labels"] for name, template in pods(gpu)}
    ports = {
        name: {port["name"] for port in template["spec"]["containers"][0]["ports"]} for name, template in pods(gpu)
    }
    opened: dict[str, dict[str, set[str]]] = {}
    for policy in of_kind(gpu, "NetworkPolicy"):
        chosen = chosen_by(policy["spec"]["podSelector"], labels)
        for rule in policy["spec"].get("ingress", []):
            names = {port["port"] for port in rule["ports"]}
            sources = {
                name
                for source in rule["from"]
                if "podSelector" in source
                for name in chosen_by(source["podSelector"], labels)
            }
            for name in chosen:
                for port in names & ports[name]:
                    opened.setdefault(name, {})[port] = sources
    assert opened["valkey"] == {"redis": set(labels)}
    assert opened["trainer"] == {"tiles": {"generator"}, "announcements": {"generator"}, "metrics": set()}
    assert all("metrics" in opened[role] for role in (*ROLES, *MODELS))
    (rewards,) = [policy for policy in of_kind(gpu, "NetworkPolicy") if policy["spec"]["policyTypes"] == ["Egress"]]
    assert chosen_by(rewards["spec"]["podSelector"], labels) == {"scorer"}
    assert chosen_by(rewards["spec"]["egress"][0]["to"][0]["podSelector"], labels) == {"valkey"}
