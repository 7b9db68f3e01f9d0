"""What is cut and measured: a model, its data, what counts as good, and how it recovers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.accuracy import data
from benchmarks.accuracy.training import Batch, Recipe, draws
from torch import Tensor, nn
from torch.utils.data import Dataset

import secateur as sec

Inputs = Tensor | dict[str, Tensor]
Augment = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Task:
    """A model with everything that cutting it and judging the result takes.

    A score is better when it is higher, and the damage of a cut is what the score loses.
    """

    name: str
    load: Callable[[], nn.Module]
    calibration: Callable[[int], list[Batch]]
    tests: Callable[[], list[Batch]]
    training: Callable[[int], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    score: Callable[[nn.Module, list[Batch]], float]
    recipe: Recipe
    n_screen: int
    seeds: int = 3  # at most so many
    recoveries: int = 3  # how many of them are fine-tuned
    timed: int = 32
    factors: tuple[float, ...] = (1.5, 2.1, 2.55, 4.0)
    goal: float = 2.1
    quantity: str = "MACs"
    examples: Callable[[], Dataset[tuple[Tensor, Tensor]]] | None = None  # of the training data, to draw from at length
    show: Callable[[float], str] = "{:.2f}%".format

    def example(self, size: int = 1) -> Inputs:
        """The first `size` inputs of the test data."""
        return first(self.tests(), size)

    def cost(self, model: nn.Module) -> int:
        """What the budget counts."""
        if self.quantity == "MACs":
            return sec.macs(model, self.example())
        return sum(p.numel() for p in model.parameters())

    def budget(self, factor: float) -> Any:
        """The target that asks for `factor` times less."""
        return sec.Macs(1 / factor) if self.quantity == "MACs" else sec.Params(1 / factor)

    def screen(self) -> list[Batch]:
        """The part of the test data that every configuration is scored on."""
        tests = self.tests()
        n = 0
        for i, batch in enumerate(tests):
            if n >= self.n_screen:
                return tests[:i]
            n += size(batch[0])
        return tests


def size(inputs: Inputs) -> int:
    """How many examples a batch of inputs holds."""
    return len(inputs if isinstance(inputs, Tensor) else next(iter(inputs.values())))


def first(batches: list[Batch], n: int) -> Inputs:
    """The first `n` inputs; the first batch has to hold as many."""
    inputs = batches[0][0]
    return inputs[:n] if isinstance(inputs, Tensor) else {name: part[:n] for name, part in inputs.items()}


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """The model's output, whether it takes a tensor or names."""
    return model(inputs) if isinstance(inputs, Tensor) else model(**inputs)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The classifier's loss."""
    return F.cross_entropy(run(model, batch[0]), batch[1])


@torch.inference_mode()
def accuracy(model: nn.Module, batches: list[Batch]) -> float:
    """Percent of the examples whose class is right."""
    right = sum(int((run(model, inputs).argmax(-1) == labels).sum()) for inputs, labels in batches)
    return 100 * right / sum(len(labels) for _, labels in batches)


def binary_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a single logit."""
    return F.binary_cross_entropy_with_logits(run(model, batch[0]), batch[1])


@torch.inference_mode()
def binary_accuracy(model: nn.Module, batches: list[Batch]) -> float:
    """Percent of the examples whose logit has the right sign."""
    right = sum(int(((run(model, inputs) > 0) == (labels > 0.5)).sum()) for inputs, labels in batches)
    return 100 * right / sum(len(labels) for _, labels in batches)


def _batches(x: Tensor, y: Tensor, prepare: Callable[[Tensor], Tensor], size: int = 128) -> list[Batch]:
    return [(prepare(inputs), labels) for inputs, labels in zip(x.split(size), y.split(size), strict=True)]


def flipped(images: Tensor, seed: int) -> Tensor:
    """Images, some of them mirrored, moved by up to two pixels."""
    chance = torch.Generator().manual_seed(seed)
    mirrored = torch.where(torch.rand(len(images), 1, 1, 1, generator=chance) < 0.5, images, images.flip(-1))
    down, right = torch.randint(-2, 3, (2,), generator=chance).tolist()
    return F.pad(mirrored, (2, 2, 2, 2))[..., 2 + down :, 2 + right :][..., : images.shape[-2], : images.shape[-1]]


class Drawn(Dataset[tuple[Tensor, Tensor]]):
    """Examples one by one, each made otherwise every time that it is asked for."""

    def __init__(self, split: data.Split, prepare: Callable[[Tensor], Tensor], augment: Augment) -> None:
        self._split, self._prepare, self._augment = split, prepare, augment

    def __len__(self) -> int:
        return len(self._split.train_y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        seed = int(torch.randint(2**31, ()))
        return self._augment(self._prepare(self._split.train_x[i : i + 1]), seed)[0], self._split.train_y[i]


def supervised(
    name: str,
    load: Callable[[], nn.Module],
    split: Callable[[], data.Split],
    recipe: Recipe,
    *,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    augment: Augment = lambda x, seed: x,
    n_calibration: int = 1024,
    n_screen: int = 10_000,
    **more: Any,
) -> Task:
    """A task with inputs and labels, split into training and test data."""
    split = cache(split)

    def calibration(seed: int) -> list[Batch]:
        chosen = next(draws(len(split().train_y), n_calibration, seed=1000 + seed))
        return _batches(split().train_x[chosen], split().train_y[chosen], prepare)

    @cache
    def tests() -> list[Batch]:
        return _batches(split().test_x, split().test_y, prepare)

    def training(seed: int) -> Iterator[Batch]:
        train_x, train_y = split()[:2]
        for step, chosen in enumerate(draws(len(train_y), recipe.batch, seed)):
            yield augment(prepare(train_x[chosen]), seed * 1_000_000 + step), train_y[chosen]

    return Task(
        name=name,
        load=load,
        calibration=calibration,
        tests=tests,
        training=training,
        examples=lambda: Drawn(split(), prepare, augment),
        recipe=recipe,
        n_screen=n_screen,
        **{"loss": cross_entropy, "score": accuracy, **more},
    )
