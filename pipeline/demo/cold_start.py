"""A supervised start that leaves something to learn.

In: words and their reversals. Out: the directory of a small Llama that answers some of the
questions. Its seed is its own: which start RL sets out from decides how long it takes, so every
run sets out from the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.demo.task import ASK, END, VOCABULARY, WORD_LENGTH, save_tokenizer
from pipeline.models.files import as_the_umask_says
from pipeline.models.loading import quiet

MAX_CONTEXT = 32

_SEED = 0
_BATCH = 128
_LEARNING_RATE = 4e-3
_WARMUP_STEPS = 20
_MAX_STEPS = 160
_CALIBRATION_WORDS = 512
_CHECK_EVERY = 2
# Enough right answers for rewards to differ inside a group, and far below what RL reaches.
_ENOUGH = 0.4


def cold_start(directory: Path, words: Sequence[str], *, enough: float = _ENOUGH, max_steps: int = _MAX_STEPS) -> float:
    """Train on `words` until `enough` are right, or for `max_steps`; save model and tokeniser into `directory`.

    Returns the exact match on words it was not trained on, with greedy decoding. A check on that
    figure ends the training rather than a number of steps, because rounding differs between
    processors and the figure rises steeply.
    """
    answers = sequences(words)
    calibration, training = answers[:_CALIBRATION_WORDS], answers[_CALIBRATION_WORDS:]
    with _own_randomness():
        model = new_model()
        accuracy = _train(model, training, calibration, enough, max_steps)
    with quiet():
        model.save_pretrained(directory)
        as_the_umask_says(directory)
        save_tokenizer(directory)
    return accuracy


def new_model() -> LlamaForCausalLM:
    """A Llama of 110,000 parameters with random weights.

    The base of its rotary positions suits 14 of them: with the usual 10,000 most frequencies
    stand still over so few, and some starts linger where RL cannot help them.
    """
    return LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,  # of 32: the smallest that vLLM has a kernel for on CPUs
            num_key_value_heads=2,
            max_position_embeddings=MAX_CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 30.0},
            bos_token_id=None,
            eos_token_id=VOCABULARY[END],
            pad_token_id=VOCABULARY[END],
            tie_word_embeddings=False,
        )
    )


def sequences(words: Sequence[str]) -> Tensor:
    """Prompt, answer and end of every word, [N, 2 * WORD_LENGTH + 2]."""
    return torch.tensor(
        [[VOCABULARY[token] for token in [*word, ASK, *reversed(word), END]] for word in words], dtype=torch.long
    )


def exact_match(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Share of rows whose answer greedy decoding would give.

    Greedy decoding gives the answer exactly when each of its tokens is the likeliest after those
    before it, so one forward pass tells.
    """
    with torch.no_grad():
        likeliest = _answer_logits(model, rows).argmax(dim=-1)  # [N, WORD_LENGTH + 1]
    return float((likeliest == _answers(rows)).all(dim=1).float().mean())


def _train(model: LlamaForCausalLM, training: Tensor, calibration: Tensor, enough: float, max_steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS))
    accuracy = 0.0
    for step in range(1, max_steps + 1):
        batch = training[torch.randint(len(training), (_BATCH,))]
        logits = _answer_logits(model, batch)
        loss = cross_entropy(logits.flatten(0, 1), _answers(batch).flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % _CHECK_EVERY == 0 and (accuracy := exact_match(model, calibration)) >= enough:
            break
    return accuracy


def _answer_logits(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=rows[:, :-1]).logits  # [N, 2 * WORD_LENGTH + 1, V]
    return logits[:, WORD_LENGTH:]  # what follows ">" and every token of the answer


def _answers(rows: Tensor) -> Tensor:
    return rows[:, WORD_LENGTH + 1 :]


@contextmanager
def _own_randomness() -> Iterator[None]:
    """One thread and one seed inside, everything as it was outside."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            yield
    finally:
        torch.set_num_threads(num_threads)
