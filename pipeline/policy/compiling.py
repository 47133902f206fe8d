"""The decoder's layers as compiled code, by `torch.compile`.

In: a model whose layout is proven. Out: the same model with the same names and weights; its layers are
compiled at their first pass, for rows of any length. Attention over packed rows stays outside: what it
gets with every row would be compiled anew with every row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models.layers import decoder_layers
from pipeline.policy.packed_attention import call_outside_of_graphs

BACKEND = "inductor"


def require_compiler(device: torch.device) -> None:
    """Compile something small. Raises ConfigError where that cannot be done here."""
    try:
        torch.compile(_probe, backend=BACKEND)(torch.ones(2, device=device))
    except Exception as error:  # of the compiler, of a missing package, of its own cache: torch has no common kind
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        needs = "a C++ compiler (g++, or what CXX names)" if device.type == "cpu" else "Triton and a C compiler"
        raise ConfigError(
            f"trainer.compile = true needs {needs} that works on this machine: {reason}; install it, or set "
            "trainer.compile = false"
        ) from error


def compile_layers(model: nn.Module, *, backend: str = BACKEND) -> None:
    """Have the decoder's layers compiled when they are first used. backend: of `torch.compile`."""
    call_outside_of_graphs()
    for layer in decoder_layers(model):
        layer.compile(backend=backend, dynamic=True)


def _probe(values: Tensor) -> Tensor:
    return values + 1
