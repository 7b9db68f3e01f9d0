"""Learning from the uncut model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.arguments import Rule, a_function, a_number, an_int, check, optional
from secateur.errors import ScheduleError
from secateur.tracing import unwrap
from secateur.tracing.examples import arguments


class Distill(nn.Module):
    """A loss that makes a cut model answer as the uncut one does.

    >>> net = nn.Linear(4, 3)
    >>> loss = Distill(net, temperature=2.0, alpha=0.9)  # before the cut
    >>> x, labels = torch.ones(2, 4), torch.tensor([0, 2])
    >>> torch.allclose(loss(x, net(x), labels), 0.1 * F.cross_entropy(net(x), labels), atol=1e-6)
    True

    `loss(inputs, outputs, labels)` is alpha·T²·KL(teacher ‖ model) + (1 − alpha)·task, the mean over all examples and
    positions, with both distributions softened by the temperature T (Hinton, Vinyals and Dean, "Distilling the
    knowledge in a neural network", 2015). The teacher is a copy, made at once, so that cutting and training the model
    leave it alone; it is frozen, in eval mode and runs without gradients on `inputs`: a tensor, a tuple of arguments
    or a dict of keyword arguments. Outputs are logits, with the classes along `dim`, or an object that has `.logits`.
    `task(logits, labels)` is the cross-entropy if not told; with `alpha=1` there are no labels.
    """

    def __init__(
        self,
        teacher: nn.Module,
        *,
        temperature: float = 4.0,
        alpha: float = 0.5,
        dim: int = -1,
        task: Callable[[Tensor, Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        part = Rule("the teacher's part of the loss, from 0 to 1", a_number(least=0, most=1).holds)
        rules = {"temperature": a_number(above=0, below=1e6), "alpha": part, "dim": an_int(-64, 63)}
        check("Distill", ScheduleError, locals(), **rules, task=optional(a_function("a function of logits and labels")))
        self.teacher = copy.deepcopy(unwrap(teacher, name="teacher")).requires_grad_(False).eval()
        self.teacher.zero_grad()
        self.temperature = temperature
        self.alpha = alpha
        self.dim = dim
        self.task = task

    def forward(self, inputs: Any, outputs: Any, labels: Any = None) -> Tensor:
        """The loss of the model's outputs for the inputs."""
        logits = _logits(outputs)
        loss = logits.new_zeros(())
        if self.alpha > 0:
            loss = loss + self.alpha * self._teaching(inputs, logits)
        if self.alpha < 1:
            if labels is None:
                raise ScheduleError("Distill: without labels there is no task loss; pass them, or make it with alpha=1")
            task = self._cross_entropy if self.task is None else self.task
            loss = loss + (1 - self.alpha) * task(logits, labels)
        return loss

    def train(self, mode: bool = True) -> Distill:
        """The teacher stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def _teaching(self, inputs: Any, logits: Tensor) -> Tensor:
        args, kwargs = arguments(inputs)
        with torch.no_grad():
            taught = _logits(self.teacher(*args, **kwargs))
        if taught.shape != logits.shape:
            shapes = f"{tuple(taught.shape)}, the model {tuple(logits.shape)}"
            raise ScheduleError(f"Distill: the teacher puts out {shapes}; give both the same inputs")
        learnt, wanted = (self._soft(each) for each in (logits, taught))
        positions = logits.numel() // logits.shape[self.dim]
        return F.kl_div(learnt, wanted, reduction="sum", log_target=True) * self.temperature**2 / positions

    def _soft(self, logits: Tensor) -> Tensor:
        """Log-probabilities at the temperature, in at least single precision."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.log_softmax(logits.to(wide) / self.temperature, self.dim)

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        by_position = logits.movedim(self.dim, -1).flatten(0, -2)
        if labels.shape == logits.shape:  # probabilities
            return F.cross_entropy(by_position, labels.movedim(self.dim, -1).flatten(0, -2))
        return F.cross_entropy(by_position, labels.flatten())


def _logits(outputs: Any) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    if isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim() > 0:
        return logits
    raise ScheduleError(
        f"Distill: {type(outputs).__name__} is neither logits nor an object with `.logits`; pass the logits themselves"
    )
