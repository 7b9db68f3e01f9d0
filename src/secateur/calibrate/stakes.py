"""How much a change of each layer's outputs would change what the model puts out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.calibrate.products import Parameters
from secateur.calibrate.watch import calibrating, call
from secateur.errors import CalibrationError
from secateur.trace.capture import tensors_in

aten = torch.ops.aten

Part = tuple[str, int]  # a parameter, and where in its storage the part that is read begins


class _Backward(TorchDispatchMode):
    """Sees the gradient of every product with a parameter on its way back."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self._parameters = parameters
        self.squares: dict[Part, Tensor] = {}
        self.rows: dict[Part, int] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.convolution_backward.default:
            squares = args[0].unflatten(1, (args[9], -1)).square().flatten(3).sum((0, 3))
            self._note(args[2], squares, args[0][:, 0].numel())
        elif func is aten.mm.default:
            self._note(args[1], args[0].square().sum(0, keepdim=True), len(args[0]))
        elif func is aten.bmm.default:
            self._note(args[1], args[0].square().sum(1), args[0].shape[1])
        return func(*args, **(kwargs or {}))

    def _note(self, weight: Tensor, squares: Tensor, rows: int) -> None:
        name = self._parameters.name(weight)
        if name is not None:
            part = (name, int(weight.storage_offset()))
            known = self.squares.get(part)
            if known is None or known.shape == squares.shape:
                self.squares[part] = squares.double().cpu() if known is None else known + squares.cpu()
                self.rows[part] = self.rows.get(part, 0) + rows


def stakes(model: nn.Module, batches: Iterable[Any], seed: int = 0) -> dict[Part, Tensor]:
    """For each product with a parameter, the mean squared effect of each of its outputs, as (groups, outputs).

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    >>> {part: tuple(square.shape) for part, square in stakes(net, [torch.ones(4, 3)]).items()}
    {('1.weight', 0): (1, 1)}

    The derivative of a random projection of the model's output has, on average, the square of the output's own.
    Outputs that look like the logits of classes are projected so that it is the square of a change of their
    probabilities.
    """
    generator = torch.Generator().manual_seed(seed)
    watch = _Backward(Parameters.of(model))
    wanted = [p for p in model.parameters() if p.is_floating_point()]
    frozen = [p for p in wanted if not p.requires_grad]
    try:
        with calibrating(model), torch.enable_grad():
            for parameter in frozen:
                parameter.requires_grad_(True)
            for batch in batches:
                total = _projected(call(model, batch), generator)
                with watch:  # the graph is retained: a model may cache a part of it for its next run
                    torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=True)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    return {part: squares / watch.rows[part] for part, squares in watch.squares.items()}


def _projected(output: Any, generator: torch.Generator) -> Tensor:
    """A random projection of everything that a model puts out."""
    named = getattr(output, "logits", output.get("logits") if isinstance(output, Mapping) else None)
    found = [named] if isinstance(named, Tensor) else list(tensors_in(output))
    found = [tensor for tensor in found if tensor.is_floating_point() and tensor.requires_grad]
    if not found:
        raise CalibrationError("the model's output does not depend on its parameters in a way that has a derivative")
    classes = isinstance(named, Tensor) or (len(found) == 1 and found[0].ndim == 2 and found[0].shape[1] > 1)
    parts = []
    for tensor in found:
        values = tensor.detach().float().cpu()
        along = torch.randn(values.shape, generator=generator)
        if classes:  # by a class drawn from what the model itself believes: the Fisher information of its answer
            chances = values.softmax(-1).reshape(-1, values.shape[-1])
            drawn = torch.multinomial(chances, 1, generator=generator)
            along = (torch.zeros_like(chances).scatter_(1, drawn, 1.0) - chances).reshape(values.shape)
        parts.append((tensor * along.to(tensor)).sum())
    return torch.stack([part.float() for part in parts]).sum()
