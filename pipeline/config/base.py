"""What all sections of the settings have in common: kinds of numbers, and that unknown keys fail."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# A week. Waits are made of a few of it, and poll(2) takes 2**31 ms, not quite 25 days, at once.
LONGEST_S = 7 * 24 * 3600

LARGEST_INT = 2**63 - 1  # that a tensor, a stream and Redis hold
# More than e^20, the largest importance weight that counts, and far from where float32 ends, products included.
LARGEST_FACTOR = 1e9

Count = Annotated[int, Field(ge=1, le=LARGEST_INT)]
Natural = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Threads = Annotated[int, Field(ge=0, le=4096)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFactor = Annotated[float, Field(gt=0, le=LARGEST_FACTOR, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=0, le=LARGEST_FACTOR, allow_inf_nan=False)]
SignedFactor = Annotated[float, Field(ge=-LARGEST_FACTOR, le=LARGEST_FACTOR, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A table of config.toml. Frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
