"""What is read from bytes of unknown origin is right or refused, and nothing else happens.

`python -m tests.fuzz` looks for longer, guided by what is reached.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import Target, targets

TARGETS = targets()


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_example_is_read(target: Target) -> None:
    assert target.read(target.example) is not None


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_right(target: Target, data: st.DataObject) -> None:
    spoilt = bytearray(target.example)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(spoilt) - 1))
        spoilt[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=5))
        spoilt = spoilt or bytearray(1)
    target.read(bytes(spoilt))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@settings(max_examples=50, deadline=None)
@given(payload=st.binary(max_size=300))
def test_random_bytes_are_refused(target: Target, payload: bytes) -> None:
    assert target.read(payload) is None
