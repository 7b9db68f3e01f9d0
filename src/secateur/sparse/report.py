"""What `sparsify` did, as values."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch

from secateur.calibrate.fisher import answers
from secateur.sparse.patterns import Pattern
from secateur.tracing.examples import tensors_in

_LARGEST = 700  # loss whose exponential is a number


@dataclass(frozen=True)
class SparseLayer:
    """One weight: its size and zeros, and how far its output is off on the data, as a share of its mean square.

    `before` is the error that the dense weight has on the inputs that it gets from the layers before it, `after` the
    error with zeros on the same inputs.
    """

    name: str
    shape: tuple[int, ...]
    zeros: int
    zeros_before: int
    before: float
    after: float

    @property
    def size(self) -> int:
        """How many weights there are."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def sparsity(self) -> float:
        """The fraction of zeros."""
        return self.zeros / max(1, self.size)


@dataclass(frozen=True)
class Agreement:
    """The sparse model beside the dense one on some batches.

    >>> print(Agreement(0.01, 0.985, (2.0, 2.5), 4))
    output on 4 batches: off by 0.01 of its mean square, the same largest output in 98.5%
    loss on them: 2.0000 before, 2.5000 after

    `error` is the mean squared difference of the outputs over the mean square of the dense model's; `same` the share of
    positions where the largest output is the same one, None where outputs are no scores; `loss` the mean of the losses
    of the dense and the sparse model where they put out such a number, as Transformers do for batches with labels.
    """

    error: float
    same: float | None
    loss: tuple[float, float] | None
    batches: int

    @property
    def perplexity(self) -> tuple[float, float] | None:
        """Of a language model, whose loss is the mean over the tokens: e to that."""
        return None if self.loss is None else (_exp(self.loss[0]), _exp(self.loss[1]))

    def __str__(self) -> str:
        agreed = "" if self.same is None else f", the same largest output in {self.same:.1%}"
        lost = "" if self.loss is None else "\nloss on them: {:.4f} before, {:.4f} after".format(*self.loss)
        return f"output on {self.batches} batches: off by {self.error:.4g} of its mean square{agreed}{lost}"


def _exp(loss: float) -> float:
    return math.inf if loss > _LARGEST else math.exp(loss)


def _losses(output: Any) -> list[float]:
    """The first number that a model puts out, if there is any."""
    return [float(tensor) for tensor in tensors_in(output) if tensor.is_floating_point() and not tensor.ndim][:1]


@dataclass
class Differences:
    """Sums over batches that an `Agreement` is made of.

    >>> seen = Differences()
    >>> seen.add(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]]))
    >>> seen.agreement()
    Agreement(error=0.64, same=0.0, loss=None, batches=1)
    """

    off: float = 0.0
    size: float = 0.0
    same: float = 0.0
    positions: float = 0.0
    losses: list[tuple[float, float]] = field(default_factory=list)
    batches: int = 0

    def add(self, dense: Any, sparse: Any, vocabularies: Set[int] = frozenset()) -> None:
        """Take in what both models put out for a batch: the logits, where these are told from caches and the like."""
        self.batches += 1
        self.losses += list(zip(_losses(dense), _losses(sparse), strict=True))
        (wanted, scores), (found, _) = (answers(out, vocabularies) for out in (dense, sparse))
        for a, b in ((a.float(), b.float()) for a, b in zip(wanted, found, strict=True) if a.ndim):
            self.off += float((a - b).square().sum(dtype=torch.float64))
            self.size += float(a.square().sum(dtype=torch.float64))
            if scores and a.ndim < 4:  # those of pictures have their classes elsewhere
                self.same += float((a.argmax(-1) == b.argmax(-1)).sum())
                self.positions += a.numel() / a.shape[-1]

    def agreement(self) -> Agreement | None:
        """Over all batches; None without any."""
        if not self.batches:
            return None
        error = self.off / self.size if self.size else self.off
        same = self.same / self.positions if self.positions else None
        means = [sum(losses) / len(losses) for losses in zip(*self.losses, strict=True)]
        return Agreement(error, same, (means[0], means[1]) if means else None, self.batches)


@dataclass(frozen=True)
class Sparsified:
    """What `sparsify` did to each weight, and to what the model puts out.

    >>> layers = (SparseLayer("fc.weight", (4, 4), 8, 0, 0.0, 0.0123),)
    >>> print(Sparsified("NM(n=2, m=4)", "ADMM", layers, {"head.weight": "the head"}, None, 1.0))
    weight       zeros  error before   after
    fc.weight    50.0%        0.0000  0.0123
    50.0% of 16 weights in 1 tensors are zero (NM(n=2, m=4), ADMM)
    left alone: head.weight (the head)
    took 1.0 s
    """

    pattern: str
    method: str
    layers: tuple[SparseLayer, ...]
    left_alone: dict[str, str]
    held_back: Agreement | None
    seconds: float

    @property
    def sparsity(self) -> float:
        """The fraction of zeros of all weights that got some."""
        return sum(layer.zeros for layer in self.layers) / max(1, sum(layer.size for layer in self.layers))

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=6)
        lines = [f"{'weight':<{width}}  {'zeros':>7}  error before   after"]
        lines += [f"{a.name:<{width}}  {a.sparsity:>7.1%}  {a.before:>12.4f}  {a.after:>6.4f}" for a in self.layers]
        size = sum(layer.size for layer in self.layers)
        count = len(self.layers)
        lines.append(
            f"{self.sparsity:.1%} of {size:,} weights in {count} tensors are zero ({self.pattern}, {self.method})"
        )
        if self.left_alone:
            lines.append("left alone: " + ", ".join(f"{name} ({why})" for name, why in self.left_alone.items()))
        if self.held_back is not None:
            lines.append(str(self.held_back))
        return "\n".join([*lines, f"took {self.seconds:.1f} s"])


def described(pattern: Pattern, method: object) -> tuple[str, str]:
    """A pattern and a method in a word each."""
    name = getattr(method, "__name__", None) or type(method).__name__
    return str(pattern), name
