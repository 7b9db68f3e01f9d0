"""A model whose outputs are read like any layer, and what its layers read while it runs."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from secateur.ao.errors import SparsifierValueError
from secateur.compat import tree_map
from secateur.tracing.examples import Inputs, tensors_in
from secateur.verify.run import outputs

TensorChange = Callable[[str, Tensor], Tensor]

_INNER = "model."


class Opened(nn.Module):
    """
    >>> layer = nn.Linear(3, 2)
    >>> opened = Opened(layer, [torch.zeros(1, 2)])
    >>> [name for name, _ in opened.named_parameters()], len(opened((torch.ones(1, 3),), {}))
    (['output0', 'model.weight', 'model.bias'], 1)

    `model`, with each output that is a floating-point tensor contracted with a random weight of as many
    elements. A dimension of such an output can then be cut like one between two layers, and the weight's
    layout tells which elements of the output stay.
    """

    def __init__(self, model: nn.Module, made: Sequence[Tensor]) -> None:
        super().__init__()
        self.model = model
        self._stacked = frozenset(_stacked(model, made))
        for i, out in enumerate(self.pieces(made)):
            if out.is_floating_point():
                self.register_parameter(f"output{i}", nn.Parameter(torch.randn(out.numel(), device=out.device)))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        made = self.pieces(self.model(*args, **kwargs))
        weights = ((out, self._parameters.get(f"output{i}")) for i, out in enumerate(made))
        return [out if weight is None else out.flatten() @ weight.to(out.dtype) for out, weight in weights]

    def pieces(self, output: Any) -> list[Tensor]:
        """The tensors of an output; the states of a recurrent module layer by layer, since each has its own units."""
        rows = dict(self._stacked)
        made = enumerate(tensors_in(output))
        return [piece for i, out in made for piece in ([out[r] for r in range(rows[i])] if i in rows else [out])]


def _stacked(model: nn.Module, made: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Which outputs look like the stacked states of a recurrent module of the model, and of how many layers."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    counts = {module.num_layers * (2 if module.bidirectional else 1) for module in recurrent} - {1}
    for i, out in enumerate(made):
        if out.dim() in (2, 3) and out.shape[0] in counts:
            yield i, out.shape[0]


def inner(name: str) -> str:
    """What the model itself calls a tensor or module of the opened one."""
    return name.removeprefix(_INNER)


def outer(name: str) -> str:
    """What the opened model calls a tensor or module of the model itself."""
    return f"{_INNER}{name}"


def is_output(name: str) -> bool:
    """Whether a tensor of an opened model stands for an output."""
    return not name.startswith(_INNER)


def run(model: nn.Module, call: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """The tensors that a model (not opened) puts out, in eval mode and in the given precision."""
    return outputs(Opened(model, ()), call, dtype)


def precise_run(model: nn.Module, call: Inputs) -> tuple[list[Tensor], torch.dtype]:
    """What a model puts out in double precision or, where it cannot run in that, in single; and which it was."""
    error: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            return run(model, call, dtype), dtype
        except Exception as problem:  # the user's forward
            error = error or problem
    raise SparsifierValueError(
        f"prune: the model does not run on the example ({type(error).__name__}: {error}); "
        "pass one that it runs on as prune(example=...)"
    ) from error


def varied(call: Inputs, seed: int) -> Inputs:
    """A call with other numbers of the same shapes, dtypes and, for integers, range."""
    generator = torch.Generator().manual_seed(seed)

    def vary(item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.numel() or item.dtype == torch.bool or item.is_complex():
            return item
        if item.is_floating_point():
            return torch.randn(item.shape, generator=generator).to(item)
        low, high = int(item.min()), int(item.max())
        return torch.randint(low, high + 1, item.shape, generator=generator).to(item)

    return tree_map(vary, call)


def flipped(model: nn.Module) -> TensorChange:
    """A change of every parameter's signs: of a matrix at random, but always alike, of a vector all.

    What is zero stays so, and a channel that no input reaches with the present signs, by a bias that keeps its
    activation at zero, is reached with others.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def change(name: str, tensor: Tensor) -> Tensor:
        if name not in names or not tensor.is_floating_point():
            return tensor
        if tensor.dim() < 2:
            return -tensor
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        signs = torch.randint(0, 2, tensor.shape, generator=generator).mul_(2).sub_(1)
        return tensor * signs.to(tensor)

    return change


@dataclass(frozen=True)
class Span:
    """The least and the largest value that each column of what a layer reads takes."""

    low: Tensor
    high: Tensor

    @property
    def constant(self) -> Tensor:
        """Which columns always have the same value, up to rounding."""
        tolerance = 1e-10 if self.low.dtype == torch.float64 else 1e-5
        return (self.high - self.low) <= tolerance * torch.maximum(self.low.abs(), self.high.abs())


def observe(
    opened: Opened, calls: Sequence[Inputs], readers: Mapping[str, nn.Module], dtype: torch.dtype, change: TensorChange
) -> dict[str, Span]:
    """What each reader's weight, and each output's, is contracted with, over all calls."""
    ends: dict[str, list[Tensor]] = defaultdict(list)

    def add(name: str, rows: Tensor) -> None:
        ends[name] += [rows.amin(0), rows.amax(0)]

    def leave(name: str, out: Any) -> None:
        if name == _INNER.removesuffix("."):
            for i, tensor in enumerate(opened.pieces(out)):
                add(f"output{i}", tensor.reshape(1, -1))

    def enter(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: add(name, _rows(module, args[0] if args else kwargs["input"]))

    with ExitStack() as stack:
        for name, module in readers.items():
            stack.callback(module.register_forward_pre_hook(enter(name), with_kwargs=True).remove)
        for call in calls:
            outputs(opened, call, dtype, change, seen=leave)
    return {name: Span(torch.stack(seen).amin(0), torch.stack(seen).amax(0)) for name, seen in ends.items()}


def _rows(module: nn.Module, x: Tensor | PackedSequence) -> Tensor:
    """What a layer reads, as a matrix with one column for each of its input channels."""
    if isinstance(x, PackedSequence):
        return x.data
    channels = -len(getattr(module, "kernel_size", ())) - 1
    return x.movedim(channels, -1).reshape(-1, x.shape[channels])
