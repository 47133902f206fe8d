"""Keys and values of many sequences of different lengths, one sequence a row.

In: a decode step's keys and values, one token a row. Out: all the keys and values of the rows that
are active, which are always the first ones. Rows never see each other's tokens: the mask that goes
with every step ends each row at its own length.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

Prefix = list[tuple[torch.Tensor, torch.Tensor]]


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


class RowCache(Cache):
    """A transformers cache whose rows have lengths of their own.

    Buffers are [rows, heads, tokens, head_dim] for each layer. They grow by powers of two, and what
    no sequence has written is zero, because a masked value still must be finite.
    """

    def __init__(self, num_layers: int) -> None:
        self._rows: list[_RowLayer] = [_RowLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self._rows))

    def begin_step(self, lengths: torch.Tensor, num_columns: int) -> None:
        """Say where the next token of every active row goes: column `lengths` [n]; at most `num_columns` are read."""
        rows = torch.arange(len(lengths), device=lengths.device)
        for layer in self._rows:
            layer.begin_step(rows, lengths, num_columns)

    def fill(self, first_row: int, prefix: Prefix, source: torch.Tensor) -> None:
        """Rows from `first_row` on begin with the tokens of `prefix`; row i copies prefix row `source[i]`."""
        for layer, (keys, values) in zip(self._rows, prefix, strict=True):
            layer.fill(first_row, keys[source], values[source])

    def move(self, holes: torch.Tensor, movers: torch.Tensor, num_columns: int) -> None:
        """Row `holes[i]` becomes what row `movers[i]` is, up to `num_columns` tokens."""
        for layer in self._rows:
            layer.move(holes, movers, num_columns)

    def to(self, device: torch.device) -> None:
        """Move all buffers."""
        for layer in self._rows:
            layer.to(device)

    def wipe(self, first_row: int) -> None:
        """Zero all rows from `first_row` on: what a failed sequence left there may not be finite."""
        for layer in self._rows:
            layer.wipe(first_row)


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a RowCache."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype = torch.float32
        self.device: torch.device = torch.device("cpu")
        self._index = torch.zeros(0, dtype=torch.long)
        self._lengths = self._index
        self._num_columns = 0

    def begin_step(self, rows: torch.Tensor, lengths: torch.Tensor, num_columns: int) -> None:
        self._index, self._lengths, self._num_columns = rows, lengths, num_columns

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros((0, key_states.shape[1], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((0, value_states.shape[1], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [n, heads, 1, head_dim] and return [n, heads, num_columns, head_dim]."""
        num_rows = len(self._index)
        self._reserve(num_rows, self._num_columns, key_states, value_states)
        self.keys[self._index, :, self._lengths] = key_states[:, :, 0]
        self.values[self._index, :, self._lengths] = value_states[:, :, 0]
        return self.keys[:num_rows, :, : self._num_columns], self.values[:num_rows, :, : self._num_columns]

    def fill(self, first_row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = first_row + keys.shape[0]
        self._reserve(end, keys.shape[2], keys, values)
        self.keys[first_row:end, :, : keys.shape[2]] = keys
        self.values[first_row:end, :, : keys.shape[2]] = values

    def move(self, holes: torch.Tensor, movers: torch.Tensor, num_columns: int) -> None:
        self.keys[holes, :, :num_columns] = self.keys[movers, :, :num_columns]
        self.values[holes, :, :num_columns] = self.values[movers, :, :num_columns]

    def to(self, device: torch.device) -> None:
        if self.is_initialized:
            self.device, self.keys, self.values = device, self.keys.to(device), self.values.to(device)

    def wipe(self, first_row: int) -> None:
        if self.is_initialized:
            self.keys[first_row:] = 0
            self.values[first_row:] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_columns, 0

    def get_seq_length(self) -> int:
        return self._num_columns - 1 if self._num_columns else 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1  # what transformers before 5.16 calls get_max_length

    def _reserve(self, num_rows: int, num_columns: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        rows, columns = self.keys.shape[0], self.keys.shape[2]
        if num_rows <= rows and num_columns <= columns:
            return
        rows, columns = max(rows, power_of_two(num_rows)), max(columns, power_of_two(num_columns))
        self.keys, self.values = _grown(self.keys, rows, columns), _grown(self.values, rows, columns)


def _grown(buffer: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    grown = buffer.new_zeros((num_rows, buffer.shape[1], num_columns, buffer.shape[3]))
    grown[: buffer.shape[0], :, : buffer.shape[2]] = buffer
    return grown
