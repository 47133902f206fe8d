"""What a worker of a vLLM server tells a generator: `--worker-extension-cls pipeline.engines.vllm_worker.Extension`.

In: nothing. Out: how far the worker is with fetching weights. vLLM's own routes for weights return
nothing, and a worker that fetches for itself knows best which version it got.
"""

from __future__ import annotations

from typing import Any

PATH = "pipeline.engines.vllm_worker.Extension"
STATUS = "rollstream_pull_status"


class Extension:
    """vLLM makes it a base of its worker class; `weight_transfer_engine` is the worker's."""

    weight_transfer_engine: Any

    def rollstream_pull_status(self) -> dict[str, Any]:
        """`WeightPull.status` of this worker."""
        status: dict[str, Any] = self.weight_transfer_engine.pull_status
        return status
