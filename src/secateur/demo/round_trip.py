"""A small language model of Transformers, cut in two ways, saved, and opened again."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.compensate import LeastSquares
from secateur.demo.job import deterministic
from secateur.io import load
from secateur.pipeline.apply import apply
from secateur.planning import Params, plan
from secateur.progress import progress
from secateur.tracing import trace

_WORDS, _LENGTH, _BATCH = 32, 16, 64
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


@dataclass(frozen=True)
class RoundTrip:
    """What became of a model that was cut, saved and opened again."""

    opened_with: str
    accuracy: tuple[float, float]  # before the cut, and of the opened model
    params: tuple[int, int]
    same: bool  # the opened model puts out, bit for bit, what the cut one does
    fields: dict[str, Any]  # of config.json, that the cut changed


def round_trips(seed: int = 0, *, quick: bool = False) -> tuple[RoundTrip, ...]:
    """Train a small Llama to count, cut it to 70% of its parameters, save it, and open what was written.

    Once so that its config.json says all, for `from_pretrained`; once with widths of its own in each layer, for
    `secateur.load`. Needs Transformers.
    """
    import transformers
    from transformers.utils import logging

    with deterministic(seed), _without_bars(logging):
        config = transformers.LlamaConfig(
            **_SIZES, num_attention_heads=4, num_key_value_heads=2, vocab_size=_WORDS, max_position_embeddings=64
        )
        model = transformers.LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(seed)
        _train(model, generator, 5 if quick else 80)
        held_back = _counting(generator, 256)
        batches = [{"input_ids": _counting(generator, _BATCH)} for _ in range(2)]
        twice = []
        for loadable in (True, False):
            small = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config.to_dict()))
            small.load_state_dict(model.state_dict())
            twice.append(_round_trip(small.eval(), batches, held_back, loadable))
    return tuple(twice)


@contextlib.contextmanager
def _without_bars(logging: Any) -> Iterator[None]:
    """No progress of Transformers' own: its files are small."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _round_trip(model: Any, batches: list[dict[str, Tensor]], held_back: Tensor, loadable: bool) -> RoundTrip:
    from transformers import AutoModelForCausalLM

    before = _accuracy(model, held_back), sum(p.numel() for p in model.parameters())
    graph = trace(model, {"input_ids": held_back[:1]})
    decided = plan(graph, Params(0.7), loadable=loadable)
    apply(model, decided, compensate=LeastSquares(batches))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        opens = AutoModelForCausalLM.from_pretrained if loadable else load
        again = opens(Path(folder)).eval()
        with torch.no_grad():
            same = torch.equal(again(held_back).logits, model(held_back).logits)
        after = _accuracy(again, held_back), sum(p.numel() for p in again.parameters())
    name = "from_pretrained" if loadable else "secateur.load"
    (was, count), (now, left) = before, after
    return RoundTrip(name, (was, now), (count, left), same, dict(decided.fields))


def _counting(generator: torch.Generator, count: int) -> Tensor:
    """Sequences that go up by one and the same step, from anywhere, and start again at the last number."""
    starts = torch.randint(_WORDS, (count, 1), generator=generator)
    steps = torch.randint(1, 8, (count, 1), generator=generator)
    return (starts + steps * torch.arange(_LENGTH)) % _WORDS


def _train(model: Any, generator: torch.Generator, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in progress(range(steps), "teaching a small Llama to count"):
        words = _counting(generator, _BATCH)
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def _accuracy(model: nn.Module, words: Tensor) -> float:
    """How often the next number is right, from the third on: two tell the step."""
    said = model(input_ids=words).logits.argmax(-1)
    return float((said[:, 1:-1] == words[:, 2:]).float().mean())
