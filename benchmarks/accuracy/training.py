"""One way to train: the same for the first training and for the recovery after a cut."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import secateur as sec

if TYPE_CHECKING:
    from benchmarks.accuracy.tasks import Task

Batch = tuple[Any, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How many steps of how many examples, and how fast. The rate goes up for a tenth of the steps, then to zero."""

    steps: int
    batch: int
    rate: float
    optimizer: str = "adam"
    decay: float = 0.0


def draws(n: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches of indices below `n` without end: every index once before any comes again."""
    chance = torch.Generator().manual_seed(seed)
    while True:
        yield from (part for part in torch.randperm(n, generator=chance).split(batch) if len(part) == min(batch, n))


def fit(
    model: nn.Module, batches: Iterator[Batch], loss: Callable[[nn.Module, Batch], Tensor], recipe: Recipe
) -> nn.Module:
    """Train in place; the model comes back in eval mode."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(weights, recipe.rate, weight_decay=recipe.decay)
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(weights, recipe.rate, momentum=0.9, nesterov=True, weight_decay=recipe.decay)
    warm = max(1, recipe.steps // 10)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, warm)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, recipe.steps - warm))
    rate = torch.optim.lr_scheduler.SequentialLR(optimizer, [ramp, cosine], [warm])
    model.train()
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        loss(model, next(batches)).backward()
        nn.utils.clip_grad_norm_(weights, 1.0 if recipe.optimizer == "adam" else 5.0)
        optimizer.step()
        rate.step()
    return model.eval()


def recover(
    task: "Task",
    model: nn.Module,
    seed: int,
    *,
    labels: bool = True,
    steps: int | None = None,
    minutes: float = 600,
    fresh: bool = False,
    dtype: torch.dtype | None = None,
) -> sec.Recovered:
    """`sec.recover` from the uncut model, on the task's own training data, with its loss beside if there are labels.

    Steps beyond what was drawn go over the same batches again, in another order; or, if they are to be `fresh`, every
    batch is drawn anew from all examples but those that are held back.
    """
    batches: Any
    if fresh and task.examples is not None:
        torch.manual_seed(seed)
        batches = DataLoader(task.examples(), task.recipe.batch, shuffle=True)
    else:
        batches = list(islice(task.training(seed), 400 if steps is None else min(400, steps + 10)))

    def loss(output: Any, batch: Batch) -> Tensor:
        return task.loss(lambda *_, **__: output, batch)

    teacher = task.load().eval()
    for each in (model, teacher):  # a fifth less time for convolutions on a CPU
        each.to(memory_format=torch.channels_last)
    return sec.recover(
        model,
        teacher,
        batches,
        minutes=minutes,
        steps=steps,
        task=loss if labels else None,
        example=task.example(),
        dtype=dtype,
        seed=seed,
    )
