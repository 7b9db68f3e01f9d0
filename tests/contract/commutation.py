"""The commutation law: cutting what goes into an op, or what comes out of it, is the same.

A rule says which dimensions of an op's inputs and outputs are one axis, which must stay whole, along which
cutting is not exact, and where removed positions of the output are zero. The law takes the rule at its word and
runs the op:

    op(cut_to(inputs)) == cut_to(op(inputs)),  with the inputs zero at removed positions

for random cuts of whatever the rule leaves free. It finds a wrong rule, and a tie that a rule forgot.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.axes import Atom, Layout, Mask, free_atoms, keep_mask, size_after
from secateur.errors import VerifyError
from secateur.ops.record import function_record, is_op, record_of
from secateur.ops.value import Value, bind, value_of
from secateur.planning.counts import components, settle
from secateur.state.held import Place
from secateur.tracing.equations import Equations
from secateur.tracing.tracer import Tracer

Masks = Mapping[Atom, Mask]

_ZERO = (1.0, 0.5, 0.9)  # how likely an input is zero along a dimension, draw by draw


@dataclass(frozen=True)
class Seen:
    """One op as its rule describes it: what went in, what came out, in the order of the call."""

    tracer: Tracer
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class SizeOf:
    """An int argument that is a size: `value` now; after a cut, the size of the layouts that `of` finds.

    >>> SizeOf(6, lambda seen: seen.outputs[0].dims[0]).value
    6

    Where `of` gives several layouts, all must keep equally many positions. A negative one stays negative: a bound
    counted from the end, a width that crops.
    """

    value: int
    of: Callable[[Seen], Layout | Sequence[Layout]]


@dataclass(frozen=True)
class Verdict:
    """What a rule was found to do: how many axes were cut in all draws, and where the law did not hold."""

    cuts: int
    inexact: int
    failures: tuple[str, ...]


def commutation(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    draws: int = 4,
    seed: int = 0,
    values: bool = True,
    run: Callable[..., Any] | None = None,
) -> Verdict:
    """Try the rule of an op on arguments of your choice.

    >>> a, b = torch.randn(4, 6).double(), torch.randn(6, 3).double()
    >>> commutation(torch.ops.aten.mm.default, (a, b)).failures
    ()

    `op` is an ATen op with a rule, or a torch function with a rule for the whole of it. Every tensor among the
    arguments gets an axis of its own for each dimension. Ints are passed as they are; one that is a size, and
    so must follow a cut, is given as a `SizeOf`. In the first draw all inputs are zero at removed positions; in
    the others along a random choice of dimensions. Each draw cuts the axes that are exact and compares the
    results, then cuts all that are free and compares the shapes. Where the rule says that removed positions of an
    output are zero, they must be.

    `values=False` compares nothing but shapes: for ops that draw numbers or leave memory as it is. `run`
    computes the op where it cannot run on this machine.
    """
    rng = random.Random(seed)
    cuts = inexact = 0
    failures: dict[str, None] = {}
    for draw in range(draws):
        trial = Trial(op, args, dict(kwargs or {}), run or op, rng, _ZERO[draw % len(_ZERO)])
        exact = [atom for atom in trial.atoms if not atom.notes]
        for chosen in (exact, trial.atoms):
            masks = trial.draw(chosen, rng)
            found = trial.violations(masks, numbers=values and chosen is exact, zeros=values)
            failures.update(dict.fromkeys(found))
            cuts += len(masks) if chosen is exact else 0
        inexact += len(trial.atoms) - len(exact)
    return Verdict(cuts, inexact, tuple(failures))


class Trial:
    """One op on one set of arguments, with the axes that its rule gives them."""

    def __init__(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        run: Any,
        rng: random.Random,
        zero: float,
    ) -> None:
        self.op = op
        self.given = (list(args), kwargs)
        self.run = run
        self.tensors = list(leaves(self.given, Tensor))
        tracer = Tracer()
        inputs = tuple(_fresh(tensor, rng, zero) for tensor in self.tensors)
        self.zero = [value.zero for value in inputs]  # as promised to the rule
        clones = [tensor.clone() for tensor in self.tensors]
        for tensor, value in zip(clones, inputs, strict=True):
            bind(tensor, value)
        call_args, call_kwargs = _filled(self.given, iter(clones), lambda size: size.value)
        out = run(*call_args, **call_kwargs)
        _apply_rule(tracer, op, call_args, call_kwargs, out)
        outputs = tuple(value_of(tensor) for tensor in leaves(out, Tensor))
        self.seen = Seen(tracer, inputs, outputs)
        self.size_layouts = {id(size): _layouts(size.of(self.seen)) for size in leaves(self.given, SizeOf)}
        for first, *others in self.size_layouts.values():
            for other in others:
                tracer.sizes.equal_counts(first, other, "one size argument")
        every = list(chain.from_iterable(_own_layouts(value) for value in (*inputs, *outputs)))
        self.sizes = Equations.of(tracer, _no_place, lambda: {a: "" for layout in every for a in free_atoms(layout)})
        self.atoms = list(dict.fromkeys(atom for layout in every for atom in free_atoms(layout)))

    def draw(self, atoms: Iterable[Atom], rng: random.Random) -> dict[Atom, Mask]:
        """A random mask for each axis; counts that must agree do."""
        by_size: dict[int, int] = {}
        tied = {atom for group, _ in components(self.sizes) for atom in group}
        wanted = {}
        for atom in atoms:
            count = rng.randint(1, atom.size - 1)
            wanted[atom] = by_size.setdefault(atom.size, count) if atom in tied else count
        masks = {}
        for atom, count in settle(self.sizes, wanted).items():
            if count < atom.size:
                mask = np.zeros(atom.size, np.bool_)
                mask[rng.sample(range(atom.size), count)] = True
                masks[atom] = mask
        return masks

    def violations(self, masks: Masks, *, numbers: bool, zeros: bool) -> Iterator[str]:
        """Where running the op on cut inputs and cutting its outputs differ."""
        zeroed, small = [], []
        for tensor, value, zero in zip(self.tensors, self.seen.inputs, self.zero, strict=True):
            whole = tensor.clone()
            for i, dim in enumerate(value.dims):
                if zero[i]:
                    whole.index_fill_(i, _indices(~keep_mask(dim, masks)), 0)
            zeroed.append(whole)
            small.append(cut_to(whole, value.dims, masks))
        try:
            full_out = self.outputs(zeroed, lambda size: size.value)
            small_out = self.outputs(small, lambda size: self._size_after(size, masks))
        except (RuntimeError, ValueError, IndexError) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            yield f"the op fails on inputs zeroed or cut to {[tuple(t.shape) for t in small]}: {first}"
            return
        for k, (value, full, cut) in enumerate(zip(self.seen.outputs, full_out, small_out, strict=True)):
            for name, part, whole, less in rows(f"output {k}", value, full, cut):
                expected = cut_to(whole, part.dims, masks)
                if expected.shape != less.shape:
                    yield f"{name}: cut inputs give {tuple(less.shape)}, its layouts {tuple(expected.shape)}"
                elif numbers and not close(expected, less):
                    yield f"{name}: cut inputs give other numbers than a cut of the output"
                if zeros:
                    yield from _false_zeros(name, part, whole, masks)

    def _size_after(self, size: SizeOf, masks: Masks) -> int:
        counts = {atom: int(mask.sum()) for atom, mask in masks.items()}
        count = size_after(self.size_layouts[id(size)][0], counts)
        return count if size.value >= 0 else -count

    def filled(self, tensors: list[Tensor], size: Callable[[SizeOf], int]) -> Any:
        """The arguments, with these tensors and sizes in the place of theirs."""
        return _filled(self.given, iter(tensors), size)

    def outputs(self, tensors: list[Tensor], size: Callable[[SizeOf], int]) -> list[Tensor]:
        """What the op makes of these tensors and sizes."""
        args, kwargs = self.filled([tensor.clone() for tensor in tensors], size)
        return list(leaves(self.run(*args, **kwargs), Tensor))

    def cut_outputs(self, masks: Masks) -> list[Tensor]:
        """What the op makes of what is left of its inputs."""
        pairs = zip(self.tensors, self.seen.inputs, strict=True)
        small = [cut_to(tensor, value.dims, masks) for tensor, value in pairs]
        return self.outputs(small, lambda size: self._size_after(size, masks))


def _fresh(tensor: Tensor, rng: random.Random, zero: float) -> Value:
    """A tensor with an axis of its own for each dimension; whether all elements are alike can be seen."""
    dims = [Atom(n) for n in tensor.shape]
    if tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
        return Value(dims, not tensor.any(), alike=True)
    return Value(dims, [rng.random() < zero for _ in dims])


def _apply_rule(tracer: Tracer, op: Any, args: Any, kwargs: Any, out: Any) -> None:
    found = record_of(op) if is_op(op) else function_record(op)
    if found is None:
        raise VerifyError(f"{op} has no rule to check; register one with secateur.ops.record.op")
    if is_op(op):
        tracer.record(op, tuple(args), kwargs, out)
    else:
        tracer.whole(found, op, args, kwargs, out)


def _no_place(place: Place) -> int:
    raise AssertionError(f"no argument is held by a model, yet {place} was asked for")


def _own_layouts(value: Value) -> Sequence[Layout]:
    return value.dims if value.rows is None else (*value.dims[:-1], *value.rows)


def _layouts(found: Layout | Sequence[Layout]) -> Sequence[Layout]:
    return found if isinstance(found, list | tuple) else (found,)


def leaves(item: Any, kind: type) -> Iterator[Any]:
    """Everything of a kind in nested arguments, in order."""
    if isinstance(item, kind):
        yield item
    elif isinstance(item, dict):
        yield from leaves(list(item.values()), kind)
    elif isinstance(item, list | tuple):
        for part in item:
            yield from leaves(part, kind)


def _filled(item: Any, tensors: Iterator[Tensor], size: Callable[[SizeOf], int]) -> Any:
    """Nested arguments with other tensors in the place of theirs, and numbers in the place of sizes."""
    if isinstance(item, Tensor):
        return next(tensors)
    if isinstance(item, SizeOf):
        return size(item)
    if isinstance(item, dict):
        return {key: _filled(value, tensors, size) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_filled(part, tensors, size) for part in item)
    return item


def _indices(mask: Mask) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask))


def cut_to(tensor: Tensor, dims: Sequence[Layout], masks: Masks) -> Tensor:
    for i, dim in enumerate(dims):
        tensor = tensor.index_select(i, _indices(keep_mask(dim, masks)))
    return tensor


def rows(name: str, value: Value, full: Tensor, cut: Tensor) -> Iterator[tuple[str, Value, Tensor, Tensor]]:
    """A tensor as a whole, or row by row where each row's last dimension is an axis of its own."""
    if value.rows is None:
        yield name, value, full, cut
        return
    zero = [value.is_zero(i) for i in range(1, len(value.dims))]
    for r, row in enumerate(value.rows):
        yield f"{name} row {r}", Value((*value.dims[1:-1], row), zero), full[r], cut[r]


def _false_zeros(name: str, value: Value, full: Tensor, masks: Masks) -> Iterator[str]:
    for i, dim in enumerate(value.dims):
        if value.is_zero(i) and bool(full.index_select(i, _indices(~keep_mask(dim, masks))).any()):
            yield f"{name} dim {i}: said to be zero at removed positions, and is not"


def close(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = torch.finfo(a.dtype).eps ** 0.6
    finite = a[a.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1.0), equal_nan=True)
