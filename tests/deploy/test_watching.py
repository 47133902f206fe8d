"""A real Prometheus watches a real run, and is asked everything that boards and alerts ask."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import time
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from deploy.grafana.answers import Window
from pipeline.streams import Entry
from tests.answering import Answering, answering
from tests.deploy.boards import DASHBOARDS as BOARDS
from tests.deploy.boards import filled, queries, read
from tests.deploy.prometheus import Prometheus, watching
from tests.deploy.promql import DEPLOY, rules
from tests.integration.harness import SCRIPTED, Run, running
from tests.integration.processes import Worker
from tests.integration.served import text_at
from tests.integration.test_stages import of_both

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
    pytest.mark.timeout(1200),  # a whole run with a Prometheus, and two boards that are drawn
]

# What a run with a learner that computes nothing has no values for, and a bound that the server does not have.
NO_VALUES = {
    "overview/Memory of Redis/1",
    "overview/Workers there and wanted/1",  # no `up` runs there
    "training/Balance of ranks/0",
    "training/Cut by age/0",
    "training/Effective sample size/0",
    "training/Entropy and KL/0",
    "training/Entropy and KL/1",
    "training/Entropy and KL/2",
    "training/Entropy and KL/3",
    "training/Importance ratio by age/0",
    "training/Importance weights/0",
    "training/Importance weights/1",
    "training/Importance weights/2",
    "training/Importance weights/3",
    "training/Importance weights/4",
    "training/Learning rate/0",
    "training/Loss and gradient/0",
    "training/Loss and gradient/1",
    "training/Mismatch KL/0",
    "training/Mismatch KL/1",
    "training/Mismatch KL/2",
    "training/Teachers' probability on the ids they send/0",
}


@pytest.fixture
def models() -> Iterator[Answering]:
    """The server of a teacher and of a judge."""
    with answering(of_both) as server:
        yield server


async def found(run: Run, prometheus: Prometheus, *workers: Worker) -> None:
    """Wait until exactly these workers are scraped, with success, and only they have series."""
    wanted = {info.worker_id for info in await run.until_ready(*workers)}

    async def are_found() -> bool:
        if await prometheus.targets() != dict.fromkeys(wanted, "up"):
            return False
        series = await prometheus.now("rollstream_worker_info")
        return {item["metric"]["worker"] for item in series} == wanted

    await run.until(are_found, f"{len(wanted)} workers in Prometheus")


async def wait_for(run: Run, prometheus: Prometheus, expr: str, what: str) -> None:
    async def holds() -> bool:
        return bool(await prometheus.now(expr))

    await run.until(holds, what)


async def lint(run: Run, *workers: Worker) -> None:
    """Prometheus's own checker finds nothing to complain of in what these serve."""
    for worker in workers:
        text = await text_at(await run.address(worker))
        checker = await asyncio.create_subprocess_exec("promtool", "check", "metrics", stdin=PIPE, stderr=PIPE)
        _, complaints = await checker.communicate(text.encode())
        assert (checker.returncode, complaints) == (0, b""), worker.role


async def without_data(prometheus: Prometheus, run_name: str, since: float) -> set[str]:
    """Ask every query of every panel; returns those that have had no data since then, in Unix seconds."""
    shown_s = time.time() - since
    variables = {"run": run_name, "role": ".*", "worker": ".*", "__rate_interval": "10s", "__interval": "1s"}
    empty = set()
    for query in queries():
        if not await prometheus.has_data(filled(query.expr, variables), shown_s):
            empty.add(query.where)
    for mark in read(BOARDS[0])["annotations"]["list"]:
        if not await prometheus.has_data(filled(mark["target"]["expr"], variables), shown_s):
            empty.add(mark["name"])
    return empty


async def until_all_is_shown(run: Run, prometheus: Prometheus, since: float) -> None:
    """Wait until every panel and every mark has had data, but for those that cannot have any here."""
    empty: set[str] = set()

    async def has_all() -> bool:
        empty.clear()
        empty.update(await without_data(prometheus, run.config.run.name, since))
        return empty <= NO_VALUES

    try:
        await run.until(has_all, "data in every panel")
    except AssertionError as error:
        error.add_note(f"without data: {sorted(empty - NO_VALUES)}")
        raise
    assert sorted(empty) == sorted(NO_VALUES)


async def test_prometheus_finds_workers_that_come_and_go_and_boards_and_alerts_have_data(
    tmp_path: Path, valkey_url: str, run_name: str, models: Answering
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "held out"}\n' * 2)
    settings = (
        *SCRIPTED,
        "trainer.max_steps=1000000",
        "trainer.scripted_step_s=0.4",
        "trainer.groups_per_step=2",
        "checkpoint.every_steps=3",
        "checkpoint.keep=1",
        f"scoring.teachers=[{{model='tiny',url='{models.url}'}}]",
        f"scoring.judges=[{{model='tiny',url='{models.url}'}}]",
        "algorithm.distillation_coef=0.5",
        f"data.eval_path={json.dumps(str(held_out))}",
        "exporter.interval_s=0.2",
    )
    since = time.time()
    async with running(tmp_path, valkey_url, run_name, *settings) as run:
        trainer = run.start_all()
        generator, scorer, _ = run.workers
        teacher, judge, exporter = [run.start(role) for role in ("teacher", "judge", "exporter")]
        stay = (generator, scorer, teacher, judge, trainer, exporter)
        (info,) = await run.until_ready(exporter)
        with watching(tmp_path, info.address) as prometheus:
            await found(run, prometheus, *stay)
            helpers = [run.start("generator") for _ in range(2)]
            await found(run, prometheus, *run.workers)
            await lint(run, *stay)

            # One is killed, one drains: the series of both end, and only the one is missed.
            helpers[0].kill()
            helpers[1].signal(signal.SIGTERM)
            assert await run.until_exit(helpers[1]) == [0]
            await run.streams.feed([Entry(group_id="broken", weight_version=0, payload=b"?")], limit=1000)
            await found(run, prometheus, *stay)
            await wait_for(
                run, prometheus, 'rollstream_workers{state="lost", role="generator"} == 1', "a lost generator"
            )
            await wait_for(run, prometheus, 'rollstream_ledger{state="dead"} == 1', "a dead letter")
            for alert in ("RollstreamDeadLetters", "RollstreamWorkerLost"):
                await wait_for(run, prometheus, f'ALERTS{{alertname="{alert}", alertstate="firing"}}', f"alert {alert}")

            await until_all_is_shown(run, prometheus, since)
            await asked_without_error(run, prometheus)
            await asyncio.to_thread(draw_boards, prometheus.url, run_name, tmp_path, since)

            # The one scorer is gone: nothing moves, and the alert names the stage.
            scorer.kill()
            expr = 'ALERTS{alertname="RollstreamBlocked", alertstate="firing", stage="scorer", severity="critical"}'
            await wait_for(run, prometheus, expr, "an alert that names the stage that blocks")

            # A run that has ended leaves nothing that Prometheus would look for, and no alarm.
            await run.fleet.stop("the test is over")
            await run.until_over()
            # At once, or when a busy one did not note their end, five minutes after their last value.
            await run.until(partial(is_forgotten, prometheus), "an end of all series", deadline_s=400)


async def is_forgotten(prometheus: Prometheus) -> bool:
    return await prometheus.targets() == {} and await prometheus.now('{__name__=~"up|rollstream_.+"}') == []


async def asked_without_error(run: Run, prometheus: Prometheus) -> None:
    """Every rule was evaluated, and the two alerts for what was done to the run say what it was."""
    names = {rule["alert"] for rule in rules("alert")} | {rule["record"] for rule in rules("record")}
    told = (await prometheus.ask("rules"))["groups"]
    evaluated = {rule["name"]: rule for group in told for rule in group["rules"]}
    assert set(evaluated) == names
    assert {rule["health"] for rule in evaluated.values()} == {"ok"}
    name = run.config.run.name
    firing = {item["labels"]["alertname"]: item for item in (await prometheus.ask("alerts"))["alerts"]}
    for alert, words in {
        "RollstreamDeadLetters": f"1 groups of {name} were set aside",
        "RollstreamWorkerLost": f"Gone without a word in {name}: 1 of role generator",
    }.items():
        said = firing[alert]["annotations"]
        assert words in said["summary"]
        assert said["dashboard"].startswith(f"http://localhost:3000/d/rollstream-overview?var-run={name}&viewPanel=")


def draw_boards(url: str, run_name: str, directory: Path, since: float) -> None:
    """Two boards, which have every kind of panel, are drawn from the recorded run."""
    from deploy.grafana.render import panels_of, picture, save

    now = time.time()
    window = Window(url=url, run=run_name, start=since, end=now, rate_s=10)
    drawn = {}
    marks = window.marks(read(BOARDS[0]))
    assert {mark.name for mark in marks} == {"Fleet", "Checkpoints", "Alerts"}
    assert all(0 <= mark.at_s <= now - since for mark in marks)
    for name in ("overview", "scoring"):
        board = read(DEPLOY / "grafana" / "dashboards" / f"{name}.json")
        figure = picture(board, panels_of(board, None), window)
        drawn |= {axes.get_title(loc="left"): axes for axes in figure.axes}
        assert {panel["title"] for panel in board["panels"] if panel["type"] != "row"} <= set(drawn)
        save(figure, directory / f"{name}.png", dpi=60)
        assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(drawn["Busy"].get_lines()) > 0
    assert drawn["Dead letters"].texts[0].get_text() == "1"
    assert len(drawn["Values"].collections) == 1


def test_a_picture_needs_a_prometheus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from deploy.grafana.render import main as render

    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    assert render(["--run", "r", "--url", url, "--out", str(tmp_path / "none.png")]) == 3
    assert capsys.readouterr().err.startswith(f"error: no Prometheus answers at {url}")


async def test_a_worker_in_a_long_step_answers_a_scrape(tmp_path: Path, valkey_url: str, run_name: str) -> None:
    async with running(tmp_path, valkey_url, run_name, *SCRIPTED, "trainer.scripted_step_s=600") as run:
        trainer = run.start_all()

        async def is_in_a_step() -> bool:
            info = await run.info(trainer)
            return info is not None and info.status.get("busy_with") == "an optimiser step"

        await run.until(is_in_a_step, "a long step")
        assert await run.metric(trainer, "rollstream_last_step_timestamp_seconds") > 0
        assert await run.metric(trainer, "rollstream_step") == 0
        trainer.kill()
        await run.fleet.stop("the test is over")
        await run.until_over()
