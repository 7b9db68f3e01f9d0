"""Run a model on the user's data and see every product with a parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.calibrate.products import Parameters, Product, product
from secateur.nn.attention import multi_head_attention_forward
from secateur.trace.capture import arguments, untouched
from secateur.trace.environment import unscripted

aten = torch.ops.aten

Run = Callable[[], Any]


class Watch(TorchDispatchMode):
    """Sees every op; products with a parameter go to `on_product(product, run)`, which gives the result.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> seen = []
    >>> def note(product, run):
    ...     seen.append(product.name)
    ...     return run()
    >>> with calibrating(net), Watch(net, note):
    ...     _ = net(torch.zeros(3, 4))
    >>> seen
    ['0.weight', '2.weight']

    With `on_op`, every op goes there: `on_op(op, args, kwargs, run)`.
    """

    def __init__(
        self,
        model: nn.Module,
        on_product: Callable[[Product, Run], Any],
        on_op: Callable[[Any, tuple[Any, ...], dict[str, Any], Run], Any] | None = None,
    ) -> None:
        super().__init__()
        self.parameters = Parameters.of(model)
        self._on_product = on_product
        self._on_op = on_op

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.linear.default or func is aten.matmul.default:  # in inference mode these arrive whole
            with self:
                return func.decompose(*args, **kwargs)

        def run() -> Any:
            return func(*args, **kwargs)

        found = None if kwargs else product(func, args, self.parameters)
        if found is not None:
            return self._on_product(found, run)
        return run() if self._on_op is None else self._on_op(func, args, kwargs, run)


@contextmanager
def calibrating(*models: nn.Module) -> Iterator[None]:
    """Models in eval mode with nothing hidden in fused kernels; as they were afterwards."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(untouched(model))
        stack.enter_context(torch.inference_mode(False))  # in that mode convolutions arrive in other ops
        stack.enter_context(torch.no_grad())
        stack.enter_context(unscripted())
        torch.backends.mha.set_fastpath_enabled(False)
        F.multi_head_attention_forward = multi_head_attention_forward
        if any(isinstance(module, nn.LSTM) for model in models for module in model.modules()):
            with warnings.catch_warnings():  # about switches for other hardware
                warnings.simplefilter("ignore")
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))  # its LSTM is one op
        for model in models:
            stack.enter_context(_experts_one_by_one(model))
            for module in model.modules():
                module.__dict__["training"] = False
        yield


@contextmanager
def _experts_one_by_one(model: nn.Module) -> Iterator[None]:
    """Transformers' experts each by its own products, where they would otherwise go through one op together."""
    name = "_experts_implementation"
    found = {id(c): c for m in model.modules() if (c := m.__dict__.get("config")) is not None and hasattr(c, name)}
    before = [(config, getattr(config, name)) for config in found.values()]
    try:
        for config, _ in before:
            setattr(config, name, "eager")
        yield
    finally:
        for config, value in before:
            setattr(config, name, value)


def call(model: nn.Module, example: Any) -> Any:
    """The model on an example: a tensor, a tuple of arguments or a dict of keyword arguments."""
    args, kwargs = arguments(example)
    return model(*args, **kwargs)
