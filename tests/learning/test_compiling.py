"""Layers that torch compiles. Here graphs are captured and run as they are: a C++ compiler takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.policy.compiling import compile_layers, require_compiler
from tests.learning.builders import make_learner, random_groups, tiny_llama
from tests.learning.test_policy import with_adapter


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's own tracing
def test_compiled_layers_are_compiled_once_for_rows_of_any_length() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    compiled, plain = with_adapter(tiny_llama(1)), with_adapter(tiny_llama(1))
    backend = CompileCounterWithBackend("eager")
    compile_layers(compiled, backend=backend)
    one, other = make_learner(compiled), make_learner(plain)
    graphs = []
    for seed in range(3):
        groups = random_groups(tiny_llama(1), seed=seed, noise=0.4)
        metrics, expected = (learner.step(groups, trainer_version=0) for learner in (one, other))
        assert metrics == pytest.approx(expected, rel=1e-12, abs=1e-12)
        graphs.append(backend.frame_count)
    assert graphs[0] > 0
    assert graphs == graphs[:1] * 3
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_a_machine_that_cannot_compile_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    with pytest.raises(
        ConfigError, match=r"trainer\.compile = true needs a C\+\+ compiler .* trainer\.compile = false"
    ):
        require_compiler(torch.device("cpu"))
