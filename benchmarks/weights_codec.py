"""Patches against the fewest bytes possible, the usual ways to write a difference, and a plain copy.

Everything is measured in turn, tile by tile, in processor time of this thread: what others do on
the same core does not count. Reported are medians over the rounds, and the worst of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.weight_states import Scale, State, entropy_bytes, moved, random_weights, trained
from pipeline.local.cores import available_cores
from pipeline.weights.delta import Method, apply_patch, make_patch
from pipeline.weights.sealed import digest
from pipeline.weights.sparse import read_block

Tile = NDArray[np.uint8]

TILE_BYTES = 1 << 20
_WIDTH = 2
_DENSITIES = {"0.3pct": 0.003, "1pct": 0.01, "3pct": 0.03, "10pct": 0.1}
_LEARNING_RATES = (1e-6, 1e-5)
_NUM_STEPS = 3
_ALL = slice(None)


def measure(scale: Scale) -> dict[str, object]:
    """Rows by density and by learning rate; what is asked for most, at one percent, by name."""
    old = random_weights(scale.num_bytes)
    rows = {name: _row(Versions(old, moved(old, share)), scale.rounds) for name, share in _DENSITIES.items()}
    one = rows["1pct"]
    sizes = {name for name in one if name.endswith(("vs_entropy", "vs_delta"))}
    return {
        **{f"{name}_1pct": one[name] for name in sorted(sizes)},
        **{name: value for name, value in one.items() if name not in sizes and "_vs_" in name},
        **_threads(Versions(old, moved(old, _DENSITIES["1pct"])), scale.rounds),
        "by_density": rows,
        "adamw": {str(rate): _trained_row(scale, rate) for rate in _LEARNING_RATES if scale.num_layers},
    }


class Versions:
    """Two versions of a model, what tells them apart in several ways, and a target to apply that to.

    What remains behind the last whole tile is left out.
    """

    def __init__(self, old: State, new: State) -> None:
        size = old.nbytes // TILE_BYTES * TILE_BYTES // old.itemsize
        self.old, self.new, self.target = old[:size], new[:size], old[:size].copy()
        self.pairs = list(zip(_tiles(self.old), _tiles(self.new), strict=True))
        self.targets = _tiles(self.target)
        self.patches = [make_patch(*pair, _WIDTH) for pair in self.pairs]
        sparse = [memoryview(patch.payload) for patch in self.patches if patch.method is Method.DELTA]
        self.blocks = [read_block(payload, TILE_BYTES // _WIDTH, _WIDTH)[0] for payload in sparse]
        self.xor = [_compress(np.bitwise_xor(*pair)) for pair in self.pairs]
        self.xor_whole = _compress(np.bitwise_xor(self.old, self.new).view(np.uint8))
        self.gaps = [_gaps(*pair) for pair in self.pairs]
        self._decompress = zstandard.ZstdDecompressor().decompress

    def copy(self) -> None:
        """What all times are compared with; the target is the old version again."""
        for target, (source, _) in zip(self.targets, self.pairs, strict=True):
            np.copyto(target, source)

    def encode(self, part: slice = _ALL) -> None:
        for pair in self.pairs[part]:
            make_patch(*pair, _WIDTH)

    def apply(self, part: slice = _ALL) -> None:
        for target, patch in zip(self.targets[part], self.patches[part], strict=True):
            apply_patch(patch.method, patch.payload, target, _WIDTH)

    def apply_read(self) -> None:
        """Only the last part of `apply`: no code that finds changed words by their indices could do without it."""
        for target, block in zip(self.targets, self.blocks, strict=True):
            block.apply(target.view(np.uint16))

    def digest(self, part: slice = _ALL) -> None:
        for old, new in self.pairs[part]:
            digest(old.data), digest(new.data)

    def apply_xor(self) -> None:
        for target, frame in zip(self.targets, self.xor, strict=True):
            np.bitwise_xor(target, np.frombuffer(self._decompress(frame), dtype=np.uint8), out=target)

    def apply_xor_whole(self) -> None:
        difference = np.frombuffer(self._decompress(self.xor_whole), dtype=self.target.dtype)
        np.bitwise_xor(self.target, difference, out=self.target)

    def applied(self, apply: Callable[[], None]) -> tuple[float, float]:
        """Seconds of a copy and of `apply` after it."""
        seconds = _seconds(self.copy), _seconds(apply)
        assert np.array_equal(self.target, self.new)
        return seconds


def _row(versions: Versions, rounds: int) -> dict[str, float]:
    old, delta_bytes = versions.old, sum(len(patch.payload) for patch in versions.patches)
    times = [_round(versions) for _ in range(rounds + 1)][1:]
    return {
        "density": round(float(np.count_nonzero(old != versions.new)) / len(old), 5),
        "delta_bytes": delta_bytes,
        "model_vs_delta": round(old.nbytes / delta_bytes, 1),
        "delta_vs_entropy": round(delta_bytes / entropy_bytes(old, versions.new), 3),
        "xor_zstd_vs_delta": round(sum(map(len, versions.xor)) / delta_bytes, 3),
        "gap_abs_zstd_vs_delta": round(sum(map(len, versions.gaps)) / delta_bytes, 3),
        **{name: round(statistics.median(item[name] for item in times), 3) for name in times[0]},
        **{f"{name}_worst": round(min(item[name] for item in times), 3) for name in times[0] if "_vs_" in name},
    }


def _round(versions: Versions) -> dict[str, float]:
    """Every ratio once, each between neighbours in time."""
    copy, apply = versions.applied(versions.apply)
    copy_before_encode, encode = _seconds(versions.copy), _seconds(versions.encode)
    _, apply_read = versions.applied(versions.apply_read)
    _, apply_xor = versions.applied(versions.apply_xor)
    _, apply_xor_whole = versions.applied(versions.apply_xor_whole)
    return {
        "decode_apply_vs_memcpy": copy / apply,
        "decode_apply_vs_xor": apply_xor / apply,
        "decode_apply_vs_xor_limit": apply_xor / apply_read,
        "decode_apply_vs_xor_whole": apply_xor_whole / apply,
        "encode_vs_memcpy": copy_before_encode / encode,
        "copy_gb_per_s": versions.old.nbytes / 1e9 / copy,
    }


def _trained_row(scale: Scale, learning_rate: float) -> dict[str, float]:
    """Medians over steps of the optimizer, and the worst of all pairs."""
    pairs = trained(scale.num_layers, scale.width, learning_rate, num_pairs=_NUM_STEPS)
    rows = [_row(Versions(*pair), scale.rounds) for pair in pairs]
    result = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    result |= {name: min(row[name] for row in rows) for name in rows[0] if name.endswith("_worst")}
    result |= {f"{name}_worst": min(row[name] for row in rows) for name in rows[0] if name.endswith("vs_delta")}
    return result | {"delta_vs_entropy_worst": max(row["delta_vs_entropy"] for row in rows)}


def _threads(versions: Versions, rounds: int) -> Mapping[str, float]:
    """How much sooner two threads are done than one, by the clock; nothing where there is one core.

    Hashing holds no lock: what it gains is what the machine has to give.
    """
    if available_cores() < 2:
        return {}

    def speed_up(work: Callable[[slice], None]) -> float:
        started = time.perf_counter()
        work(_ALL)
        middle = time.perf_counter()
        list(pool.map(work, [slice(0, None, 2), slice(1, None, 2)]))
        return (middle - started) / (time.perf_counter() - middle)

    works = {"encode": versions.encode, "apply": versions.apply, "hash": versions.digest}
    with ThreadPoolExecutor(2) as pool:
        rows = [{name: speed_up(work) for name, work in works.items()} for _ in range(rounds)]
    return {f"{name}_two_threads_vs_one": round(statistics.median(row[name] for row in rows), 3) for name in works}


def _seconds(work: Callable[[], None]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def _tiles(state: State) -> list[Tile]:
    content = state.view(np.uint8)
    return [content[start : start + TILE_BYTES] for start in range(0, len(content), TILE_BYTES)]


def _compress(data: Tile) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data.data)


def _gaps(old: Tile, new: Tile) -> bytes:
    """The gaps between changes, as narrow as they fit, and the new values, in one frame."""
    before, after = old.view(np.uint16), new.view(np.uint16)
    where = np.flatnonzero(before != after)
    gaps = np.diff(where, prepend=-1)
    narrow = gaps.astype(np.min_scalar_type(int(gaps.max(initial=0))))
    return _compress(np.concatenate([narrow.view(np.uint8), after[where].view(np.uint8)]))
