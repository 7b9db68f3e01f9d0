"""A model at one moment, to go back to, whatever is done to it after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from secateur.surgery import named_tensors
from secateur.trace.held import Snapshot, Walk


class Moment:
    """A model as it is now: its tensors and their values, gradients, attributes and classes.

    >>> net = nn.Linear(2, 2)
    >>> moment, weight = Moment(net), net.weight.tolist()
    >>> net.weight = nn.Parameter(torch.zeros(1, 2))
    >>> moment.restore()
    >>> net.weight.tolist() == weight
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modes = Modes(model)
        self._snapshot = Snapshot(model)
        self._classes = [(module, type(module)) for module in model.modules()]
        tensors = {id(tensor): tensor for tensor in _tensors(model)}
        self._values = [(t, t.detach().clone(), _copy_of(t.grad if t.is_leaf else None)) for t in tensors.values()]

    def restore(self) -> None:
        """Make the model what it was, bit for bit: the same tensor objects with the same values."""
        self._snapshot.restore()
        for module, kind in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
        for tensor, value, grad in self._values:
            tensor.grad = None
            _put(tensor, value)
            tensor.grad = _copy_of(grad)
        self._modes.restore(self._model)


class Modes:
    """The mode of each module and which parameters take a gradient, by their names: they outlive a cut."""

    def __init__(self, model: nn.Module) -> None:
        self._training = {name: module.training for name, module in model.named_modules()}
        self._learning = {name: p.requires_grad for name, p in model.named_parameters()}

    def restore(self, model: nn.Module) -> None:
        """Put them back."""
        for name, module in model.named_modules():
            module.training = self._training.get(name, module.training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self._learning.get(name, parameter.requires_grad))


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and tensors in plain attributes, of which a run may write into any."""
    yield from (tensor for _, tensor in named_tensors(model))
    found: list[Tensor] = []

    def see(value: Any, _: object) -> Any:
        if isinstance(value, Tensor):
            found.append(value)
        return value

    Walk(model).replace(see)
    yield from found


def _copy_of(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _put(tensor: Tensor, value: Tensor) -> None:
    def kind(t: Tensor) -> tuple[object, ...]:
        return t.shape, t.stride(), t.dtype, t.device

    if kind(tensor) == kind(value):
        with torch.no_grad():
            tensor.copy_(value)
    else:  # made another by `model.to(…)`, or several positions share one place of memory
        tensor.data = value.clone()
