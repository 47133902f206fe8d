"""What a generator asks a vLLM worker beside generation: `--worker-extension-cls` with `PATH` below.

In: its questions. Out: how far the worker is with fetching weights, since vLLM's own routes for weights return
nothing and a worker that fetches for itself knows best which version it got; and a cache that is finite again.
"""

from __future__ import annotations

from typing import Any

PATH = "pipeline.engines.vllm_worker.Extension"
STATUS = "rollstream_pull_status"
MEND = "rollstream_mend_cache"

_BLOCKS_AT_ONCE = 256


class Extension:
    """vLLM makes it a base of its worker class; `weight_transfer_engine` is the worker's."""

    weight_transfer_engine: Any
    model_runner: Any

    def rollstream_pull_status(self) -> dict[str, Any]:
        """`WeightPull.status` of this worker."""
        status: dict[str, Any] = self.weight_transfer_engine.pull_status
        return status

    def rollstream_mend_cache(self) -> None:
        """Make 0 of keys and values that are not finite; all others stay.

        A sequence that failed leaves its blocks to others, and there they are added, times 0, for places not in use.
        """
        import torch

        for cache in self.model_runner.kv_caches:
            if cache.dtype in {torch.float32, torch.float16, torch.bfloat16}:
                for blocks in cache.split(_BLOCKS_AT_ONCE, dim=cache.shape.index(max(cache.shape))):
                    is_bad = ~torch.isfinite(blocks)
                    if is_bad.any():  # on a CPU memory that was never written has no pages yet
                        blocks.masked_fill_(is_bad, 0)
