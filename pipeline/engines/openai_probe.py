"""Whether servers can be used, asked of the servers themselves.

In: settings. Out: for each server nothing or what is wrong with it. Also memory of this process by
which a server finds out whether it runs on the same machine: a path alone proves nothing.
"""

from __future__ import annotations

import os
from typing import Any

from pipeline.config import Config
from pipeline.engines.openai_answers import PassingError
from pipeline.engines.openai_checks import check_settings
from pipeline.engines.shared_weights import SharedWeights
from pipeline.errors import ConfigError
from pipeline.models.loading import context_length, load_config
from pipeline.weights import HostTensor, WeightKind, WeightState


class Probe:
    """Some bytes that nobody else knows, in memory that a process of this machine can map."""

    def __init__(self) -> None:
        secret = os.urandom(16)
        tensor = HostTensor(dtype="uint8", shape=(len(secret),), data=memoryview(secret))
        self._memory = SharedWeights()
        self.proof = secret.hex()
        self.description: dict[str, Any] = self._memory.write(
            WeightState(weight_version=0, kind=WeightKind.SNAPSHOT, tensors={"proof": tensor})
        )

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._memory.close()


async def examine_servers(config: Config) -> dict[str, str]:
    """URL of each server, and what is wrong with it or nothing. Raises ConfigError, ModelError."""
    check_settings(config)
    from pipeline.engines.openai_server import RemoteServer

    context = context_length(config.model, load_config(config.model))
    probe = Probe()
    found: dict[str, str] = {}
    for url in config.generation.openai.urls:
        server = RemoteServer(url, config, context=context)
        try:
            await server.connect(probe.description, proof=probe.proof, is_to_own=False)
            found[server.url] = ""
        except (ConfigError, PassingError) as error:
            found[server.url] = str(error)
        finally:
            await server.close()
    probe.close()
    return found
