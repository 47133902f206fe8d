"""Starts a run on Hugging Face Jobs: trainer, generators, scorers, teachers and judges as jobs of their own.

In: a folder of addresses from `deploy.redis.users`, and where inputs, records and weights are. Out: jobs, and a line
for each with its page; with --dry-run their specifications as JSON. No secret is ever printed.

    python -m deploy.hf_jobs.launch --run my-run --image registry/me/rollstream-{role}:0.1.0 \
        --input dataset:me/my-run --records bucket:me/my-run --store s3://bucket/my-run --secrets secrets --dry-run
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from deploy.hf_jobs.specs import Job, Place, Plan, jobs, read_address
from pipeline.errors import ConfigError, RollstreamError, ServiceUnavailableError
from pipeline.keys import Keys

_RUN_ROLES = ("trainer", "generator", "scorer", "teacher", "judge")


@click.command()
@click.option("--run", "run_name", required=True, metavar="NAME", help="The run's name.")
@click.option("--image", required=True, metavar="NAME", help="Image of a role; {role} stands for it.")
@click.option("--input", "input_", required=True, metavar="KIND:OWNER/NAME", help="Has rollstream.toml, data, rewards.")
@click.option("--records", required=True, metavar="bucket:OWNER/NAME", help="For records and checkpoints.")
@click.option("--store", required=True, metavar="PLACE", help="Where weights go through, as in weights.store.")
@click.option("--secrets", "folder", required=True, type=click.Path(path_type=Path), help="Of deploy.redis.users.")
@click.option("--generators", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--scorers", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--teachers", type=click.IntRange(min=0), default=0, show_default=True, help="Where the run has any.")
@click.option("--judges", type=click.IntRange(min=0), default=0, show_default=True, help="Where the run has any.")
@click.option("--trainer/--no-trainer", "has_trainer", default=True, help="Without: more workers for a run.")
@click.option("--trainer-flavor", default="a100-large", show_default=True, metavar="FLAVOR")
@click.option("--generator-flavor", default="a10g-small", show_default=True, metavar="FLAVOR")
@click.option("--scorer-flavor", default="cpu-upgrade", show_default=True, metavar="FLAVOR")
@click.option("--teacher-flavor", default="a10g-small", show_default=True, metavar="FLAVOR")
@click.option("--judge-flavor", default="cpu-upgrade", show_default=True, metavar="FLAVOR")
@click.option("--timeout", default="12h", show_default=True, help="Of every job.")
@click.option("--namespace", metavar="NAME", help="Who pays; without it the owner of the token.")
@click.option("--secret", "names", multiple=True, metavar="NAME", help="Variable of yours that jobs get, as a secret.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting of all workers.")
@click.option("--dry-run", is_flag=True, help="Print the jobs, and start none.")
def main(
    run_name: str,
    image: str,
    input_: str,
    records: str,
    store: str,
    folder: Path,
    generators: int,
    scorers: int,
    teachers: int,
    judges: int,
    has_trainer: bool,
    trainer_flavor: str,
    generator_flavor: str,
    scorer_flavor: str,
    teacher_flavor: str,
    judge_flavor: str,
    timeout: str,
    namespace: str | None,
    names: tuple[str, ...],
    settings: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Start a run on Hugging Face Jobs."""
    flavors = (trainer_flavor, generator_flavor, scorer_flavor, teacher_flavor, judge_flavor)
    plan = Plan(
        run=Keys(run_name).run,
        image=image,
        input=Place.parse(input_, "--input"),
        records=Place.parse(records, "--records"),
        store=store,
        counts=dict(zip(_RUN_ROLES, (int(has_trainer), generators, scorers, teachers, judges), strict=True)),
        flavors=dict(zip(_RUN_ROLES, flavors, strict=True)),
        timeout=timeout,
        settings=settings,
    )
    _check_settings(settings)
    addresses = {role: read_address(folder, role) for role in _RUN_ROLES if plan.counts[role]}
    wanted = list(jobs(plan, addresses, _from_environment(names)))
    if dry_run:
        click.echo(json.dumps([job.shown() for job in wanted], indent=2))
        return
    _start(wanted, namespace)


def _start(wanted: list[Job], namespace: str | None) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    for job in wanted:
        arguments: dict[str, Any] = {**job.arguments, "secrets": dict(job.secrets)}
        try:
            info = api.run_job(**arguments, namespace=namespace)
        except HfHubHTTPError as error:
            # What the server says may repeat what it was sent.
            status = error.response.status_code
            raise ServiceUnavailableError(
                f"{job.name}: Hugging Face refuses it (HTTP {status}): mend the token (`hf auth login`), --namespace, "
                "flavors or --image; jobs named above this line run already, `hf jobs cancel` ends them"
            ) from None
        click.echo(f"{job.name}: {info.url}")


def _from_environment(names: tuple[str, ...]) -> dict[str, str]:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(f"--secret {missing[0]}: there is no such variable here; export it first")
    return {name: os.environ[name] for name in names}


def _check_settings(settings: tuple[str, ...]) -> None:
    """Raises ConfigError for what is no setting, and for a secret in a place that everybody sees."""
    from pipeline.settings.files import load_config

    if any(setting.partition("=")[0].strip() == "redis.url" for setting in settings):
        raise ConfigError("--set redis.url: addresses come from --secrets, where they stay secret")
    load_config([], environ={}, overrides=settings)


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)
    except RollstreamError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
