"""The layers of a decoder, in any architecture that transformers knows.

In: a model, with an adapter or spread over ranks or neither. Out: its layers, in order.
"""

from __future__ import annotations

from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers, where transformers says what they are."""
    kinds: set[str] = set()
    for module in model.modules():
        kinds |= set(getattr(module, "_no_split_modules", None) or ())
    # FSDP makes each layer's class one of its own, below the model's.
    return [module for module in model.modules() if any(kind.__name__ in kinds for kind in type(module).__mro__)]
