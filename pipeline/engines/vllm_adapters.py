"""LoRA adapters in vLLM: one for each version, as long as someone is decoded with it.

In: the tensors of an adapter. Out: an adapter that new requests use at once. Every version has a
name and a number of its own, because vLLM keeps what an adapter read under its number. At most
`max_loras` are loaded; files exist only while vLLM reads them, and in memory. What a generator that was
killed left of them is removed by the next one.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import LoraSettings
from pipeline.errors import EngineLostError, WeightError
from pipeline.models.weights import host_tensor
from pipeline.weights import WeightState
from pipeline.weights.meeting import OwnFolder

_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
_PREFIX, _DEFAULT = "base_model.model.", ".default."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A loaded adapter. request: vLLM's name for it."""

    version: int
    request: Any


class AdapterShelf:
    """The adapters that are loaded. max_live: more are never loaded at once, 2 or more."""

    def __init__(self, llm: Any, lora: LoraSettings) -> None:
        self._llm = llm
        self._lora = lora
        self._max_live = int(llm.vllm_config.lora_config.max_loras)
        self._live: list[Adapter] = []
        self._num_loaded = 0
        self._folder = OwnFolder(_MEMORY)

    @property
    def newest(self) -> Adapter | None:
        """What new requests use."""
        return self._live[-1] if self._live else None

    @property
    def num_live(self) -> int:
        """Adapters that are loaded."""
        return len(self._live)

    def oldest_to_keep(self) -> int:
        """Version below which adapters must go, so that there is room for the next."""
        return self._live[-(self._max_live - 1) :][0].version

    async def load(self, state: WeightState) -> float:
        """Load an adapter and make it the newest; returns the seconds it took.

        Raises WeightError, also where the files find no room; EngineLostError: vLLM has ended.
        """
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        self._num_loaded += 1
        try:
            with tempfile.TemporaryDirectory(dir=self._folder.path) as folder:
                self._write(Path(folder), state)
                request = LoRARequest(f"version-{state.weight_version}-{self._num_loaded}", self._num_loaded, folder)
                started = time.perf_counter()
                is_loaded = await self._llm.add_lora(request)
                seconds = time.perf_counter() - started
        except EngineDeadError as error:
            raise EngineLostError(f"vLLM has ended: {error}") from error
        except Exception as error:
            raise WeightError(f"vLLM could not load the adapter {state.weight_version}: {error}") from error
        if not is_loaded:
            raise WeightError(f"vLLM did not load the adapter {state.weight_version}")
        self._live.append(Adapter(version=state.weight_version, request=request))
        return seconds

    async def unload_unused(self, used: Collection[Adapter]) -> None:
        """Unload all but the newest and those in use."""
        for adapter in [item for item in self._live[:-1] if item not in used]:
            await self._llm.remove_lora(adapter.request.lora_int_id)
            self._live.remove(adapter)

    def close(self) -> None:
        """Nothing is loaded any more. Safe to call twice."""
        self._folder.close()

    def _write(self, folder: Path, state: WeightState) -> None:
        """The adapter as PEFT saves it."""
        from safetensors.torch import save_file

        tensors = {name.replace(_DEFAULT, "."): host_tensor(tensor) for name, tensor in state.tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "target_modules": modules,
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
