"""The cycle collector: out of the way while a program is imported, at work afterwards."""

from __future__ import annotations

import json
import subprocess
import sys


def seen(code: str) -> list[int]:
    """What a fresh interpreter prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280)
    numbers: list[int] = json.loads(done.stdout)
    return numbers


def test_what_was_there_at_the_end_of_the_start_is_kept_and_cycles_made_later_are_found() -> None:
    first, at_start, settled, frozen, left = seen(
        """
import gc, json, weakref
from pipeline import startup

class Node: pass

first = gc.get_threshold()[0]
startup.begin()
at_start = gc.get_threshold()[0]
startup.settle()
node = Node()
node.itself, seen = node, weakref.ref(node)
del node
kept = [[] for _ in range(10 * first)]
print(json.dumps([first, at_start, gc.get_threshold()[0], gc.get_freeze_count(), seen() is not None]))
"""
    )
    assert at_start > first
    assert settled == first
    assert frozen > 0
    assert not left


def test_who_has_not_begun_has_nothing_to_settle() -> None:
    before, after, frozen = seen(
        "import gc, json\nfrom pipeline import startup\nbefore = gc.get_threshold()[0]\nstartup.settle()\n"
        "print(json.dumps([before, gc.get_threshold()[0], gc.get_freeze_count()]))"
    )
    assert before == after
    assert frozen == 0
