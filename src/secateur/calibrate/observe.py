"""Run a model on the user's data and see every product with a parameter."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from secateur.calibrate.products import ParameterProduct, Parameters, product
from secateur.compat import TorchDispatchMode
from secateur.ops.product import WHOLE
from secateur.state.patches import OWN_ATTENTION, SLOW_ATTENTION, UNSCRIPTED, patched
from secateur.state.transaction import untouched
from secateur.tracing.examples import arguments

_EXPERTS = "_experts_implementation"

Compute = Callable[[], Any]


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
        on_product: Callable[[ParameterProduct, Compute], Any],
        on_op: Callable[[Any, tuple[Any, ...], dict[str, Any], Compute], Any] | None = None,
    ) -> None:
        super().__init__()
        self.parameters = Parameters.of(model)
        self._on_product = on_product
        self._on_op = on_op

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WHOLE:
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
        stack.enter_context(untouched(*models))
        stack.enter_context(torch.inference_mode(False))  # in that mode convolutions arrive in other ops
        stack.enter_context(torch.no_grad())
        stack.enter_context(patched(UNSCRIPTED, SLOW_ATTENTION, OWN_ATTENTION))
        modules = [module for model in models for module in model.modules()]
        if any(isinstance(module, nn.LSTM) for module in modules):
            with warnings.catch_warnings():  # about switches for other hardware
                warnings.simplefilter("ignore")
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))  # its LSTM is one op
        for module in modules:
            module.__dict__["training"] = False
            config = module.__dict__.get("config")
            if hasattr(config, _EXPERTS):  # Transformers' experts each by its own products, not through one op together
                setattr(config, _EXPERTS, "eager")
        yield


def call(model: nn.Module, example: Any) -> Any:
    """The model on an example: a tensor, a tuple of arguments or a dict of keyword arguments."""
    args, kwargs = arguments(example)
    return model(*args, **kwargs)
