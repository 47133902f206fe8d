"""A vLLM server as its users start it, in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from pipeline.config import ModelSettings
from tests.deploy.servers import reserved_port

START_S = 200.0
# What `vllm serve` runs; the command of the wheel for CPUs looks for a package `vllm` and ends.
COMMAND = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
FLAGS = [
    "--weight-transfer-config",
    '{"backend": "rollstream"}',
    "--worker-extension-cls",
    "pipeline.engines.vllm_worker.Extension",
    "--logprobs-mode",
    "processed_logprobs",
    "--enable-scale-out",
]
CPU_FLAGS = [
    "--dtype",
    "float32",
    "--enforce-eager",
    "--no-enable-chunked-prefill",
    "--max-num-batched-tokens",
    "16384",  # no context is longer
]


class Server:
    """A vLLM server in a process group of its own."""

    def __init__(self, model: ModelSettings, log: Path) -> None:
        self._reserved = contextlib.ExitStack()
        port = self._reserved.enter_context(reserved_port())
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        environ = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "ROLLSTREAM_VLLM_PARENT": str(os.getpid()),
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*COMMAND, "--model", model.path, "--port", str(port), *CPU_FLAGS, *FLAGS],
                env=os.environ | environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._process.poll() is None

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.is_running, self._log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(self._log.read_text()[-3000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return str(response.read().decode())

    def post(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method="POST", headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read() or "null")

    def num_running(self) -> float:
        """Requests in the engine, waiting ones included."""
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", self.get("/metrics"), re.M)
        return sum(map(float, found))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._reserved.close()
