"""The benchmark of the trainer runs, reports in the common shape, and refuses what makes no sense."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import trainer


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """As a command does it, here, where torch is imported."""
    monkeypatch.setattr(sys, "argv", ["trainer", "--json", *words])
    trainer.main()


def test_layouts_put_as_many_tokens_through_the_model_as_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--hidden", "128", "--layers", "1", "--length", "32", "--rounds", "1", "--memory-tokens", "0")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["benchmark"] == "trainer"
    assert report["machine"]["cores"] >= 1
    found = report["results"]
    # Prompt and completion of 16 tokens, of which the last is not read: 8 x 31 alone, 16 + 8 x 15 with one prompt.
    assert found["prefix_sharing_tokens"] == pytest.approx(8 * 31 / (16 + 8 * 15), abs=1e-3)
    assert found["packed_vs_padded_tokens"] > 2
    for name in ("step_vs_plain_hf", "step_vs_plain_hf_chunked", "packed_vs_padded", "prefix_sharing_speedup"):
        assert found[name] > 0


@pytest.mark.parametrize("words", [("--hidden", "100"), ("--rounds", "0")])
def test_sizes_that_make_no_sense_are_refused(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *words)
    assert words[0] in capsys.readouterr().err
