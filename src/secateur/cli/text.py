"""Text as data: windows of tokens, as the model's own tokenizer makes them, and how well a model reads them."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.cli.exits import InputError, UsageError
from secateur.cli.packages import optional
from secateur.progress import progress
from secateur.state.transaction import untouched

_LENGTH = 512  # tokens of a window, unless the model takes fewer
_LEAST = 8  # windows; one of eight is not fitted
_READ = 32  # windows at most that perplexity is taken on

Window = dict[str, Tensor]


def is_text(data: str | None) -> bool:
    """Whether `--data` names a text, not a function.

    >>> is_text("corpus.txt"), is_text("net.py:batches"), is_text(None)
    (True, False, False)
    """
    return data is not None and ":" not in data and Path(data).suffix.lower() in (".txt", ".text", ".md")


def fitted(data: str, model: str) -> Sequence[Window]:
    """The windows of a text that a model may be fitted to."""
    found = _windows(data, model)
    return found[: len(found) - len(found) // _LEAST]


def held_back(data: str, model: str) -> Sequence[Window]:
    """The other windows of a text, which judge."""
    found = _windows(data, model)
    return found[len(found) - len(found) // _LEAST :][:_READ]


def perplexity(data: str, spec: str, model: nn.Module) -> float:
    """How well a model foretells the next token, on the part of a text that it is not fitted to."""
    losses = []
    with untouched(model), torch.no_grad():
        for module in model.modules():
            module.__dict__["training"] = False
        for window in progress(held_back(data, spec), "perplexity"):
            output = model(**window)
            logits = getattr(output, "logits", None)
            if not isinstance(logits, Tensor) or logits.ndim != 3:
                raise InputError(f"{spec} puts out no logits of a next token, so a text cannot judge it")
            losses.append(float(F.cross_entropy(logits[0, :-1].float(), window["input_ids"][0, 1:])))
    return math.exp(sum(losses) / len(losses))


@functools.lru_cache(maxsize=1)
def _windows(data: str, model: str) -> list[Window]:
    kind, _, name = model.partition(":")
    if kind != "transformers" or not Path(name).is_dir():
        raise UsageError(f"--data {data}: a text is read by a model's own tokenizer; give transformers:FOLDER as MODEL")
    tokens = _tokens(data, name)
    config = optional("transformers", "--data").AutoConfig.from_pretrained(name, trust_remote_code=False)
    length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    count = len(tokens) // length
    if count < _LEAST:
        raise InputError(f"{data} has {len(tokens)} tokens; it takes {_LEAST * length}, {_LEAST} windows of {length}")
    size = getattr(config, "vocab_size", None)
    if size is not None and int(tokens.max()) >= size:
        raise InputError(f"{name}: its tokenizer makes tokens up to {int(tokens.max())}, the model knows {size}")
    return [{"input_ids": window.unsqueeze(0)} for window in tokens[: count * length].view(count, length)]


def _tokens(data: str, folder: str) -> Tensor:
    transformers: Any = optional("transformers", "--data")
    try:
        text = Path(data).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{data} cannot be read as text: {error}") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        numbers = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # whatever is in the folder
        raise InputError(f"{folder} has no tokenizer that reads {data} ({type(error).__name__}: {error})") from error
    return torch.tensor(numbers, dtype=torch.long)
