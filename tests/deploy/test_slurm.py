"""The job script for Slurm: with a stand-in for Slurm's programs it runs a whole run, and drains one at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.answering import answering
from tests.deploy.files import DEPLOY, ROOT
from tests.deploy.servers import reserved_port
from tests.deploy.test_containers import EXAMPLE
from tests.integration.test_stages import by_length

SCRIPT = DEPLOY / "slurm" / "rollstream.sbatch"
STAND_IN = Path(__file__).with_name("stand_in_slurm.py")
# The second node is this one again: a generator beside the trainer, and one there.
TWO_NODES = {
    "SLURM_JOB_NODELIST": "localhost,localhost",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_ON_NODE": "4",
    "GENERATORS_PER_NODE": "1",
}
_DEADLINE_S = 240.0
pytestmark = pytest.mark.timeout(900)  # two whole jobs, each of five processes


class Job:
    """The script as Slurm's batch step starts it, and what it leaves."""

    def __init__(self, folder: Path, port: int) -> None:
        self._port = port
        self.run = folder / "runs" / "slurm-test"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "bin").mkdir()
        (folder / "steps").mkdir()
        for name in ("srun", "scontrol", "squeue", "scancel"):
            program = folder / "bin" / name
            program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
            program.chmod(0o755)

    def start(self, *settings: str, **variables: str) -> None:
        """Start it for a run without a model."""
        environ = {
            **os.environ,
            "PATH": f"{self._folder / 'bin'}:/usr/bin:/bin",
            "STEPS": str(self._folder / "steps"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": self.run.name,
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "VENV": str(Path(sys.executable).parent.parent),
            "RUN_DIR": str(self._folder / "runs"),
            "REDIS_PORT": str(self._port),
            "NUM_SCORERS": "1",
            "PYTHONPATH": str(ROOT),
            **variables,
        }
        words = [word for item in (*settings, "worker.log_format='json'") for word in ("--set", item)]
        with (self._folder / "job.log").open("wb") as log:
            self._process = subprocess.Popen(
                [SCRIPT, EXAMPLE, *words], env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; the job's output says why it did not come."""
        end = time.monotonic() + _DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"not {what}: {self.output}"
            time.sleep(0.02)

    def until_there(self, **numbers: int) -> None:
        """Wait until so many workers of each role have started in all, so that each has something to end."""
        self.until(lambda: self.counted("started") == {"redis": 0, **numbers}, "there")

    def counted(self, event: str) -> dict[str, int]:
        """How often workers of each role have said this."""
        logs = {path.name: path.read_text() for path in (self.run / "logs").glob("*.log")}
        return {name.partition("-")[0]: text.count(f'"event": "{event}"') for name, text in logs.items()}

    def until_at_work(self) -> None:
        """Wait for the first step."""
        self.until((self.run / "metrics.jsonl").exists, "at work")

    def kill(self, role: str) -> None:
        """End the one task of a step with SIGKILL."""
        (step,) = (self._folder / "steps").glob(f"{role}.*")
        os.kill(int(step.read_text()), signal.SIGKILL)

    def ended(self) -> int:
        """Its exit code."""
        assert self._process is not None
        process = self._process
        self.until(lambda: process.poll() is not None, "over")
        return int(process.returncode)

    def warn(self) -> None:
        """What --signal=B:TERM does before the time is up."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End what still runs."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def output(self) -> str:
        logs = [self._folder / "job.log", *sorted(self.run.glob("logs/*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs if log.exists())

    @property
    def identity(self) -> dict[str, Any]:
        """run.json."""
        stored: dict[str, Any] = json.loads((self.run / "run.json").read_text())
        return stored


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with reserved_port() as port:
        made = Job(tmp_path, port)
        yield made
        made.close()


@pytest.fixture
def gate() -> threading.Event:
    """Nothing is judged while it is closed, and so no step done."""
    return threading.Event()


@pytest.fixture
def judge(gate: threading.Event) -> Iterator[str]:
    """The setting of one behind a server."""

    def behind_the_gate(path: str, body: dict[str, Any], number: int) -> tuple[int, Any]:
        gate.wait(_DEADLINE_S)
        return by_length(path, body, number)

    with answering(behind_the_gate) as server:
        yield f"scoring.judges=[{{model='tiny',url='{server.url}',timeout_s={_DEADLINE_S}}}]"


def test_a_job_whose_time_is_up_drains_and_the_next_one_ends_with_its_run(
    job: Job, judge: str, gate: threading.Event
) -> None:
    once = dict.fromkeys(("exporter", "scorer", "judge", "trainer"), 1)
    twice = dict.fromkeys(once, 2)
    job.start(judge, NUM_JUDGES="1")
    job.until_there(generator=1, **once)
    gate.set()
    job.until_at_work()
    job.warn()
    assert job.ended() == 0, job.output
    assert (job.identity["ended"], job.identity["ledger"]["uncommitted"]) == (None, 0)
    done = sum('"groups"' in line for line in (job.run / "metrics.jsonl").read_text().splitlines())
    gate.clear()
    job.start(f"trainer.max_steps={done + 1}", judge, NUM_JUDGES="1", **TWO_NODES)
    job.until_there(generator=3, **twice)
    gate.set()
    assert job.ended() == 0, job.output
    assert job.identity["ended"] == f"all {done + 1} steps are done"
    assert job.identity["ledger"]["trained"] == (done + 1) * 16
    assert job.counted("left") == {"redis": 0, "generator": 3, **twice}, job.output
    assert not list(job.run.glob("secrets*"))


def test_a_job_whose_settings_are_wrong_ends_with_2(job: Job) -> None:
    job.start("trainer.max_steps=-1")
    assert job.ended() == 2, job.output


def test_a_job_does_not_outlive_its_server(job: Job) -> None:
    job.start("worker.drain_timeout_s=1")
    job.until_at_work()
    job.kill("redis")
    assert job.ended() == 3, job.output
    assert "the server has ended" in job.output
