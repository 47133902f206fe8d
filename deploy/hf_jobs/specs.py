"""What is asked of Hugging Face Jobs: one job for each worker of a run.

In: choices of a person and addresses of the Redis server. Out: the arguments of `HfApi.run_job` for each job, and
the same with secrets left out, to be shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import Volume

    from pipeline.messages import Json

INPUT, RUNS = "/input", "/runs"
_ROLE = "{role}"
_PLACES = ("bucket", "dataset", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A repository or bucket on the Hub. kind: bucket, dataset or model. name: owner/name."""

    kind: str
    name: str

    @classmethod
    def parse(cls, text: str, option: str) -> Place:
        """From `dataset:owner/name`. Raises ConfigError naming the option."""
        kind, _, name = text.partition(":")
        if kind not in _PLACES or name.count("/") != 1:
            raise ConfigError(
                f"{option} {text}: write it as KIND:OWNER/NAME, where KIND is one of {', '.join(_PLACES)}"
            )
        return cls(kind=kind, name=name)

    def volume(self, path: str, *, is_read_only: bool) -> Volume:
        """It, mounted at `path`."""
        from huggingface_hub import Volume

        return Volume(type=self.kind, source=self.name, mount_path=path, read_only=is_read_only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run as it is to be on Jobs.

    run: its name. image: with `{role}` where the role stands. input: what has rollstream.toml, data and rewards.
    records: bucket for records and checkpoints. store: where weights go through, as in weights.store. counts,
    flavors: for each role. timeout: of every job, such as 12h. settings: `section.key=value`, for all workers.
    """

    run: str
    image: str
    input: Place
    records: Place
    store: str
    counts: Mapping[str, int]
    flavors: Mapping[str, str]
    timeout: str
    settings: Sequence[str] = ()

    def __post_init__(self) -> None:
        if _ROLE not in self.image:
            raise ConfigError(f"--image {self.image}: write {_ROLE} where the role stands in the name of the image")
        if self.records.kind != "bucket":
            raise ConfigError(f"--records {self.records.kind}:{self.records.name}: only a bucket can be written to")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job. arguments: of `HfApi.run_job`, without secrets. secrets: name -> value."""

    name: str
    arguments: Mapping[str, object]
    secrets: Mapping[str, str] = field(repr=False)

    def shown(self) -> dict[str, Json]:
        """The job as a person may see it: of secrets the names only."""
        volumes = self.arguments["volumes"]
        assert isinstance(volumes, list)
        values = dict(self.arguments) | {"volumes": [volume.to_dict() for volume in volumes]}
        return {**values, "secrets": sorted(self.secrets)}  # type: ignore[dict-item]


def jobs(plan: Plan, addresses: Mapping[str, str], secrets: Mapping[str, str]) -> Iterator[Job]:
    """The jobs of a run, the trainer first. addresses: role -> REDIS_URL. secrets: of every job besides."""
    for role, count in plan.counts.items():
        for index in range(count):
            yield _job(plan, role, index, {"REDIS_URL": addresses[role], **secrets})


def _job(plan: Plan, role: str, index: int, secrets: Mapping[str, str]) -> Job:
    name = f"{plan.run}-{role}-{index}"
    settings = [word for setting in plan.settings for word in ("--set", setting)]
    volumes = [plan.input.volume(INPUT, is_read_only=True)]
    if role == "trainer":
        volumes.append(plan.records.volume(RUNS, is_read_only=False))
    arguments: dict[str, object] = {
        "name": name,
        "image": plan.image.replace(_ROLE, role),
        "command": ["rollstream", role, "-c", f"{INPUT}/rollstream.toml", "--run", plan.run, *settings],
        "env": {"ROLLSTREAM_WEIGHTS__STORE": plan.store, "ROLLSTREAM_RUN__DIR": RUNS},
        "flavor": plan.flavors[role],
        "timeout": plan.timeout,
        # A trainer that comes back goes on from its last checkpoint.
        "attempts": 3,
        "labels": {"rollstream-run": plan.run, "rollstream-role": role},
        "volumes": volumes,
    }
    return Job(name=name, arguments=arguments, secrets=secrets)


def read_address(folder: Path, role: str) -> str:
    """REDIS_URL as `deploy.redis.users` has written it. Raises ConfigError."""
    file = folder / f"{role}.env"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; write it with `python -m deploy.redis.users`") from None
    values = dict(line.partition("=")[::2] for line in lines)
    if not values.get("REDIS_URL"):
        raise ConfigError(f"{file} has no REDIS_URL; write it with `python -m deploy.redis.users`")
    return values["REDIS_URL"]
