"""A real Prometheus, with the settings and rules of deploy/prometheus, made quick for tests.

In: the address of an exporter. Out: answers of Prometheus's HTTP API. It keeps its data in the test's
folder, takes a free port, and is ended when the test is.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.promql import PROMETHEUS

EVERY_S = 0.5
_START_S = 120.0
_LISTENS = re.compile(r'msg="Listening on" address=(\S+)')


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One server. url: of its HTTP API."""

    url: str

    async def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer. Fails where Prometheus says that the question is wrong."""
        return await asyncio.to_thread(self._ask, path, parameters)

    async def now(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        return list((await self.ask("query", query=expr))["result"])

    async def value(self, expr: str) -> float | None:
        """Of an expression with one series; None without any."""
        found = await self.now(expr)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    async def has_data(self, expr: str, seconds: float) -> bool:
        """Whether an expression had a number at some moment of the last `seconds`."""
        now = time.time()
        data = await self.ask("query_range", query=expr, start=f"{now - seconds}", end=f"{now}", step="1")
        values = [float(value) for series in data["result"] for _, value in series["values"]]
        return any(map(math.isfinite, values))

    async def targets(self) -> dict[str, str]:
        """Workers that are scraped -> whether that works: up, down, unknown."""
        found = (await self.ask("targets", state="active"))["activeTargets"]
        return {item["labels"]["worker"]: item["health"] for item in found}

    def _ask(self, path: str, parameters: dict[str, str]) -> Any:
        words = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{words}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error


@contextmanager
def watching(directory: Path, exporter: str) -> Iterator[Prometheus]:
    """A server that finds workers by this exporter."""
    program = shutil.which("prometheus")
    assert program is not None
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={_settings(directory, exporter)}",
                f"--storage.tsdb.path={directory / 'prometheus'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield Prometheus(f"http://{_address(process, log)}")
    finally:
        process.kill()
        process.wait()


def _settings(directory: Path, exporter: str) -> Path:
    """Those of deploy/prometheus with other intervals, and this exporter."""
    every = f"{EVERY_S * 1000:.0f}ms"
    settings = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    settings["global"] |= {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    (discovery,) = settings["scrape_configs"][0]["http_sd_configs"]
    discovery |= {"url": f"http://{exporter}/targets", "refresh_interval": every}
    rules = directory / "rules"
    rules.mkdir()
    for file in (PROMETHEUS / "rules").glob("*.yml"):
        text = re.sub(r"interval: \d+s", f"interval: {every}", file.read_text(encoding="utf-8"))
        text = re.sub(r"for: \d+s", "for: 1s", text)
        (rules / file.name).write_text(text, encoding="utf-8")
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        text = log.read_text(errors="replace")
        if "ready to receive web requests" in text and (found := _LISTENS.search(text)):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"Prometheus does not start: {log.read_text(errors='replace')[-2000:]}")
