"""Tiles and their successors, and patches applied under guard."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import WeightError
from pipeline.weights.delta import Patch, apply_patch

Tile = NDArray[np.uint8]

WIDTHS = (1, 2, 4, 8)
GUARD = 64  # bytes on either side of a target, which nothing may touch


@st.composite
def histories(draw: st.DrawFn, *, length: int = 2) -> tuple[int, list[Tile]]:
    """(width, states of one tile): random, constant or special words; some, none or all of them changed each time."""
    width = draw(st.sampled_from(WIDTHS))
    num_words = draw(st.one_of(st.integers(0, 40), st.integers(0, 3000)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = np.dtype(f"<u{width}")
    top = 2 ** (8 * width) - 1
    special = np.array([0, 1, top, top // 2, top // 2 + 1, top // 3], dtype=dtype)
    words = random.choice(special, num_words) if draw(st.booleans()) else noise(random, num_words, width)
    states = [words.view(np.uint8)]
    for _ in range(length - 1):
        words = words.copy()
        density = draw(st.sampled_from((0.0, 0.001, 0.01, 0.1, 0.5, 1.0)))
        where = np.flatnonzero(random.random(num_words) < density)
        match draw(st.sampled_from(("near", "far", "special", "equal"))):
            case "near":
                words[where] += random.integers(-9, 10, len(where)).astype(dtype)
            case "far":
                words[where] = noise(random, len(where), width)
            case "special":
                words[where] = random.choice(special, len(where))
            case "equal":
                words[where] = special[2]
        states.append(words.view(np.uint8))
    return width, states


def noise(random: np.random.Generator, num_words: int, width: int) -> NDArray[np.unsignedinteger]:
    return random.integers(0, 256, num_words * width, dtype=np.uint8).view(f"<u{width}")


def near(num_words: int, width: int = 2, *, every: int = 100, step: int = 1) -> tuple[Tile, Tile]:
    """Random words, and the same with every so many of them a little larger."""
    old = noise(np.random.default_rng(num_words), num_words, width)
    new = old.copy()
    new[::every] += np.array(step, dtype=new.dtype)
    return old.view(np.uint8), new.view(np.uint8)


def applied(patch: Patch, old: Tile, width: int) -> Tile:
    """What `patch` makes of a copy of `old`, in the middle of memory that it must leave alone."""
    return attempted(patch.method, patch.payload, old, width)


def attempted(method: int, payload: bytes | memoryview, old: Tile, width: int) -> Tile:
    memory = np.full(len(old) + 2 * GUARD, 0xA5, dtype=np.uint8)
    target = memory[GUARD : GUARD + len(old)]
    target[:] = old
    try:
        apply_patch(method, payload, target, width)
    except WeightError:
        assert np.array_equal(target, old), "a refused patch has changed something"
        raise
    finally:
        assert (memory[:GUARD] == 0xA5).all()
        assert (memory[GUARD + len(old) :] == 0xA5).all()
    return target


def refused(method: int, payload: bytes | memoryview, old: Tile, width: int) -> bool:
    try:
        attempted(method, payload, old, width)
    except WeightError:
        return True
    return False
