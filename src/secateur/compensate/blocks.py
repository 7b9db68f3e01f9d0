"""Fit all layers of a block together: to what the block put out before the cut, from the inputs that it has now.

One layer after the other (`refit`), a layer can only make the best of the channels that are left; which of them the
layers before it compute was decided by the cut. Fitted together, they may compute other ones. There is no closed form
for that, as something bends between them, so it takes steps along the gradient of each block's squared error, which
does not leave the block: Belilovsky, Eickenberg and Oyallon (2019) train networks so, and Li et al., "BRECQ" (2021),
quantise them block by block. A block is an entry of a list of modules whose output is as wide as it was. One that does
no better on data that was held back stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import call
from secateur.progress import progress
from secateur.tracing.examples import tensors_in

_RATE = 0.02  # how far a step moves a weight, as a share of the root mean square of all in its tensor
_LEAST = 1e-3  # of that, where all are about zero

_PRECISE = (torch.float32, torch.float64)

Errors = dict[str, tuple[float, float]]  # of each block the squared error, and the variance of what should come out


def fit_blocks(
    whole: nn.Module, cut: nn.Module, batches: Sequence[Any], held: frozenset[int], rounds: int
) -> tuple[int, int]:
    """Fit each block of a cut model to that of the full-size one, in place; how many of how many are the better for it.

    Each of the rounds goes once over the batches that are not held back.
    """
    fit = [n for n in range(len(batches)) if n not in held]
    judges = sorted(held) or fit
    before = _errors(whole, cut, batches, judges)
    own = _own(cut, before)
    if not own:
        return 0, 0
    kept = {name: [p.detach().clone() for p in parameters] for name, parameters in own.items()}
    _descend(whole, cut, [batches[n] for _ in range(rounds) for n in fit], own)
    after = _errors(whole, cut, batches, judges)
    worse = [name for name in own if not _share(after[name]) < _share(before[name])]
    for name in worse:
        for parameter, value in zip(own[name], kept[name], strict=True):
            parameter.data.copy_(value)
    return len(own) - len(worse), len(own)


def _own(cut: nn.Module, names: Mapping[str, Any]) -> dict[str, list[nn.Parameter]]:
    """The parameters that each block has for itself; not in half precision, in which small steps are lost."""
    homes: dict[int, list[str]] = {}
    for name, parameter in cut.named_parameters(remove_duplicate=False):
        homes.setdefault(id(parameter), []).append(name)
    alone = {key for key, under in homes.items() if len(under) == 1}
    found = {
        name: [p for p in cut.get_submodule(name).parameters() if id(p) in alone and p.dtype in _PRECISE]
        for name in names
    }
    return {name: parameters for name, parameters in found.items() if parameters}


def _descend(whole: nn.Module, cut: nn.Module, batches: Sequence[Any], own: Mapping[str, list[nn.Parameter]]) -> None:
    """One step for each batch, ever smaller ones: Adam (Kingma and Ba, 2015), in units of the weights themselves."""
    parameters = [p for mine in own.values() for p in mine]
    learns = [p.requires_grad for p in parameters]
    groups = [{"params": [p], "lr": _RATE * max(float(p.detach().square().mean().sqrt()), _LEAST)} for p in parameters]
    gradients = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
            parameter.grad = None
        steps = torch.optim.Adam(groups)
        slower = torch.optim.lr_scheduler.CosineAnnealingLR(steps, len(batches))
        for batch in progress(batches, "blocks"):
            with torch.enable_grad():
                _compare(whole, cut, batch, own, _learn)
            steps.step()
            steps.zero_grad()
            slower.step()
    finally:
        for parameter, learnt, gradient in zip(parameters, learns, gradients, strict=True):
            parameter.grad = gradient
            parameter.requires_grad_(learnt)


def _learn(_: str, off: Tensor, scale: Tensor) -> None:
    if off.requires_grad:  # a block may not use what it has
        (off / scale).backward()


def _errors(whole: nn.Module, cut: nn.Module, batches: Sequence[Any], numbers: Sequence[int]) -> Errors:
    """How far the blocks are off on some batches."""
    found: Errors = {}

    def note(name: str, off: Tensor, scale: Tensor) -> None:
        was = found.get(name, (0.0, 0.0))
        found[name] = was[0] + float(off), was[1] + float(scale)

    for number in numbers:
        _compare(whole, cut, batches[number], None, note)
    return {name: sums for name, sums in found.items() if sums[1] > 0}


def _share(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1]


def _compare(
    whole: nn.Module,
    cut: nn.Module,
    batch: Any,
    names: Mapping[str, Any] | None,
    see: Callable[[str, Tensor, Tensor], object],
) -> None:
    """Run both models; of each block, show the squared error and the variance. Gradients do not leave a block."""
    want: dict[str, Tensor] = {}

    def keep(name: str, output: Tensor) -> None:
        want[name] = output.detach()

    def compared(name: str, output: Tensor) -> None:
        target = want.pop(name, None)  # of a block that runs more than once, the first
        if target is not None and target.shape == output.shape:
            wide = torch.promote_types(output.dtype, torch.float32)
            target = target.to(wide)
            scale = (target - target.mean(0, keepdim=True) if len(target) > 1 else target).square().mean()
            see(name, (output.to(wide) - target).square().mean(), scale.clamp_min(1e-12))

    with torch.no_grad(), _seen(whole, names, keep, apart=False):
        call(whole, batch)
    with _seen(cut, names, compared, apart=True):
        call(cut, batch)


@contextmanager
def _seen(
    model: nn.Module, names: Mapping[str, Any] | None, see: Callable[[str, Tensor], None], *, apart: bool
) -> Iterator[None]:
    """The outputs of blocks in each run; `apart`: each is cut off from those before it."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _detached(args), _detached(kwargs)

    def after(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            first = next((each for each in tensors_in(output) if each.is_floating_point()), None)
            if first is not None and first.ndim > 1:
                see(name, first)

        return hook

    handles: list[Any] = []
    try:
        for name, module in blocks_of(model) if names is None else ((n, model.get_submodule(n)) for n in names):
            handles.append(module.register_forward_hook(after(name)))
            if apart:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _detached(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.detach()
    if type(given) in (tuple, list):
        return type(given)(map(_detached, given))
    return {key: _detached(value) for key, value in given.items()} if type(given) is dict else given


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The entries of lists that hold more than one layer, the outermost.

    >>> inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> [name for name, _ in blocks_of(nn.Sequential(inner, nn.ReLU(), nn.ModuleDict({"a": inner})))]
    ['0']
    """
    taken: list[str] = []
    for home, entries in model.named_modules():
        for key, module in entries._modules.items() if isinstance(entries, nn.ModuleList | nn.Sequential) else ():
            name = f"{home}.{key}".lstrip(".")
            if module is None or any(f"{name}.".startswith(f"{outer}.") for outer in taken):
                continue
            if sum(1 for each in module.modules() if each._parameters) > 1:
                taken.append(name)
                yield name, module


__all__ = ["blocks_of", "fit_blocks"]
