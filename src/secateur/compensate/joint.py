"""Fit the layers of a block together to what the block puts out in the uncut model.

A layer by itself cannot make up for what the one before it no longer computes. So, after each was fitted alone, block
after block takes some steps of gradient descent on how far its output is off; its inputs are those that the cut model
so far gives it. A block is a module in a list with two products at least, none of which is used twice in a run. That
is block reconstruction, as in BRECQ (Li et al., 2021, arxiv.org/abs/2102.05426). What batches that were held back do
not agree with is taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from secateur.calibrate import Parameters, Runs, Step, calibrating
from secateur.compat import without_modes
from secateur.compensate.alike import missed, picked, ways
from secateur.compensate.moments import held_back
from secateur.compensate.recipes import LayerFit
from secateur.planning.plans import Plan
from secateur.progress import progress
from secateur.surgery.blocks import LISTS
from secateur.tracing.examples import mapped, tensors_in

_RATES = (0.02, 0.005)  # of a tensor's root mean square, the first step; the second where the first does harm
_LEAST = 0.01  # the root mean square that a tensor is taken to have at least
_SEED = 0
_CACHES = "use_cache"  # of Transformers


@dataclass(frozen=True)
class _Sample:
    """What a block of the cut model gets on a batch, and what should come out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    want: Tensor


def fit_blocks(
    whole: nn.Module, cut: nn.Module, plan: Plan, batches: Sequence[Any], steps: int
) -> tuple[LayerFit, ...]:
    """Fit each block of a cut model, in the order of a run; those that came nearer to the uncut ones."""
    found: list[LayerFit] = []
    with calibrating(whole, cut):
        for module in (*whole.modules(), *cut.modules()):
            if hasattr(config := module.__dict__.get("config"), _CACHES):  # a block would be given what it added before
                setattr(config, _CACHES, False)
        entered, left = _Entered(cut), _Left(whole)
        with Runs(whole, batches, what="joint") as one, Runs(cut, batches, what="joint") as other:
            spans = _spans(cut, other)
            ends = [first for _, first in spans[1:]] + [None] * bool(spans)
            for (name, first), after in progress([*zip(spans, ends, strict=True)], "blocks"):
                samples = []
                for number in range(len(batches)):
                    with entered.of(name), left.of(name):
                        other.run(number, _until(first))
                        one.run(number, _until(after))
                        samples.append(_sample(entered.found, left.found))
                fit = _fitted(cut.get_submodule(name), name, plan, samples, steps)
                if fit is not None:
                    found.append(fit)
    return tuple(found)


def _until(name: str | None) -> Any:
    """Stop before the product with a parameter; None: do not."""

    def see(step: Step) -> Any:
        if step.name == name:
            step.hold()
            step.stop()
        return step.run()

    return None if name is None else see


class _Noted:
    """Notes something of a module's call."""

    def __init__(self) -> None:
        self._wanted: str | None = None
        self.found: Any = None

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Inside, that of the first call of some module."""
        self._wanted, self.found = name, None
        yield
        self._wanted = self.found = None

    def note(self, name: str, noted: Any) -> None:
        """What is to be noted of a call of a module."""
        if name == self._wanted and self.found is None:
            with without_modes():  # it is no op of the model's
                self.found = mapped(noted, Tensor.clone)


class _Entered(_Noted):
    """What a module is called with: arguments and keyword arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _, a, k, name=name: self.note(name, (a, k)), with_kwargs=True)


class _Left(_Noted):
    """What a module puts out: the first tensor of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _, __, out, name=name: self.note(name, _first(out)))


def _first(output: Any) -> Tensor | None:
    return next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)


def _sample(given: tuple[Any, Any] | None, want: Tensor | None) -> _Sample | None:
    return None if given is None or want is None else _Sample(given[0], given[1], want)


def _spans(model: nn.Module, runs: Runs) -> list[tuple[str, str]]:
    """The blocks in the order of a run, each with the parameter of its first product."""
    order = [read.name for read in runs.record().products]
    times, tied = Counter(order), Parameters.of(model).tied
    entries = [
        f"{home}.{key}".lstrip(".")
        for home, entries in model.named_modules()
        if isinstance(entries, LISTS)
        for key in entries._modules
    ]
    inside = {name: [n for n, each in enumerate(order) if each.startswith(f"{name}.")] for name in entries}
    several = {name: at for name, at in inside.items() if len(at) > 1}
    least = {n: at for n, at in several.items() if not any(other.startswith(f"{n}.") for other in several)}
    found, done = list[tuple[str, str]](), -1
    for name, at in sorted(least.items(), key=lambda item: item[1][0]):
        whole = at == list(range(at[0], at[-1] + 1))
        if whole and at[0] > done and all(times[order[n]] == 1 and order[n] not in tied for n in at):
            found.append((name, order[at[0]]))
            done = at[-1]
    return found


def _fitted(block: nn.Module, name: str, plan: Plan, samples: Sequence[_Sample | None], steps: int) -> LayerFit | None:
    """Fit a block; None where it is not fitted, or comes no nearer."""
    taken: Sequence[_Sample] = [sample for sample in samples if sample is not None]
    own = {n: p for n, p in block.named_parameters() if p.is_floating_point()}
    if len(taken) < len(samples) or not own or not _repeats(block, taken[0]):
        return None
    made = _first(block(*taken[0].args, **taken[0].kwargs))
    assert made is not None
    maps = [*ways(name, made.shape, taken[0].want.shape, plan)]
    if not maps:
        return None
    positions = min(maps, key=lambda way: float(missed(made, picked(taken[0].want, way))))
    taken = _laid_out(block, [_Sample(each.args, each.kwargs, picked(each.want, positions)) for each in taken])
    held = held_back(len(taken))
    judges = [taken[n] for n in sorted(held)]
    others = [each for n, each in enumerate(taken) if n not in held]
    before = _off(block, {}, judges)
    for rate in _RATES:
        try:
            values = _descended(block, own, others, steps, rate)
        except Exception:  # code of the user's that has no derivative
            return None
        after = _off(block, values, judges)
        if after < before:
            for n, value in values.items():
                own[n].data.copy_(value)
            return LayerFit(name, before, after, "its layers together")
    return None


def _laid_out(block: nn.Module, samples: Sequence[_Sample]) -> Sequence[_Sample]:
    """Images with their channels last, where the block takes them so: a CPU convolves them in about half the time."""
    if not any(isinstance(layer, nn.Conv2d) for layer in block.modules()):
        return samples
    found = [
        _Sample(mapped(s.args, _channels_last), mapped(s.kwargs, _channels_last), _channels_last(s.want))
        for s in samples
    ]
    try:
        block(*found[0].args, **found[0].kwargs)
    except Exception:  # any code of the user's may run here: views of what lies otherwise
        return samples
    return found


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _repeats(block: nn.Module, sample: _Sample) -> bool:
    """Whether a block does the same with the same, also when it is called by itself."""
    try:
        once, again = (_first(block(*sample.args, **sample.kwargs)) for _ in range(2))
    except Exception:  # any code of the user's may run here
        return False
    return once is not None and again is not None and once.ndim == sample.want.ndim and bool(torch.equal(once, again))


def _output(block: nn.Module, values: Mapping[str, Tensor], sample: _Sample) -> Tensor:
    made = _first(functional_call(block, dict(values), sample.args, sample.kwargs))
    assert made is not None
    return made


def _off(block: nn.Module, values: Mapping[str, Tensor], judges: Sequence[_Sample]) -> float:
    """How far a block with some values is off."""
    off = [float(missed(_output(block, values, each), each.want)) for each in judges]
    return sum(off) / len(off)


def _descended(
    block: nn.Module, own: Mapping[str, Tensor], samples: Sequence[_Sample], steps: int, rate: float
) -> dict[str, Tensor]:
    """The values of a block's parameters after some steps of Adam, with rates that fall to zero."""
    values = {name: tensor.detach().clone().requires_grad_() for name, tensor in own.items()}
    rates = [rate * max(_LEAST, float(value.detach().float().square().mean().sqrt())) for value in values.values()]
    optimizer = torch.optim.Adam([{"params": [v], "lr": r} for v, r in zip(values.values(), rates, strict=True)])
    for step, sample in enumerate(_order(samples, steps)):
        for group, first in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = first * (1 - step / steps)
        with torch.enable_grad():
            loss = missed(_output(block, values, sample), sample.want)
        gradients = torch.autograd.grad(loss, list(values.values()), allow_unused=True)
        for value, gradient in zip(values.values(), gradients, strict=True):
            value.grad = gradient
        optimizer.step()
    return {name: value.detach() for name, value in values.items()}


def _order(samples: Sequence[_Sample], steps: int) -> Iterator[_Sample]:
    """So many of them, each as often as the others, in an order that is always the same."""
    generator, left = torch.Generator().manual_seed(_SEED), list[int]()
    for _ in range(steps):
        left = left or torch.randperm(len(samples), generator=generator).tolist()
        yield samples[left.pop()]
