"""What follows a cut behind the tracer's back: numbers that are made of sizes, and the way that code takes.

A size tells of its use, but not of all: in `4.0 / x.shape[-1]` and `8.5 < x.shape[-1]` Python asks the float, not the
size; NumPy and text answer with what has no memory. What depends on sizes shows when they change: the model runs once
more on fake tensors, with every axis halved. A number that a torch function is then given for another one is made of
sizes; and if other modules run, other functions are called, or the model fails, then the axis must stay whole.
Reasons to do so are a size that was made into text or a key, and a number that no attribute, no code and no size, by
arithmetic of its own, accounts for.
"""

from __future__ import annotations

import ast
import dis
import inspect
import math
import sys
import textwrap
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.axes import Atom, Layout, size_after
from secateur.compat import FakeTensorMode, TorchDispatchMode, TorchFunctionMode
from secateur.nn.attention import MultiheadAttention
from secateur.sizes.explain import Ear, Explainer, constants, each_number, is_capture, of_the_model
from secateur.sizes.size import Attr, Size
from secateur.state.chances import same_chances
from secateur.state.held import Place
from secateur.state.leftovers import let_go
from secateur.state.twin import run_apart
from secateur.tracing.environment import gradients, laid_open, line_of
from secateur.tracing.equations import Equations
from secateur.tracing.examples import arguments, device_of, mapped, tensors_in
from secateur.tracing.fakes import fake_of
from secateur.tracing.outlines import carried_out
from secateur.tracing.widths import told_widths

Number = int | float | complex
NumberCall = tuple[str, tuple[Number | None, ...]]  # a function and the plain numbers it was given; None: a size
_READS = {"__get__", "device.default"}  # of what a tensor is, by whomever
_MOST_TRIALS = 32  # to find the axes that must stay whole
_OF_MATH = frozenset(("pi", "e", "tau", "sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tanh", "radians"))
_FLOATS = map(torch.finfo, (torch.float64, torch.float32, torch.float16, torch.bfloat16))
_LIMITS = {math.inf, -math.inf, *(n for f in _FLOATS for n in (f.min, f.max, f.eps, f.tiny))}  # masks are made of these
_DEEPEST = 60  # frames that are asked whether a number is one of their constants


@dataclass(frozen=True)
class Turn:
    """What is another when sizes are: a number, or (`fatal`) the way that the model takes."""

    what: str
    where: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class Numbers(TorchFunctionMode):
    """Notes the modules that run, the torch functions that are called and the plain numbers that these are given, or
    compares them with those of a run."""

    def __init__(
        self, model: nn.Module, known: Sequence[NumberCall] | None = None, sizes: Explainer | None = None
    ) -> None:
        super().__init__()
        self._sizes = sizes or Explainer()  # which knows what numbers are made of sizes
        self.calls: list[NumberCall] = []
        self.unaccounted = False  # whether some number is neither held by the model nor written in its code
        self._held = {v for m in model.modules() for v in m.__dict__.values() if type(v) is float}
        self.number: Turn | None = None  # the first number that is another than in the known run
        self.path: Turn | None = None  # where something else is called
        self._known = known

    def entered(self, module: str) -> None:
        """A module runs."""
        self._note(module, ())

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _READS:
            numbers = tuple(_numbers((args, kwargs)))
            self._note(name, numbers)
            if numbers and self._known is None and not self.unaccounted:
                self.unaccounted = any(not self._held_or_written(n) for n in numbers)
        return func(*args, **(kwargs or {}))

    def _held_or_written(self, number: Number | None) -> bool:
        if number is None or self._sizes.is_told(number):
            return True
        if type(number) is not float:
            return _written(number)
        return number in self._held or number in _LIMITS or _written(number) or _comes_of_constants(number)

    def _note(self, name: str, numbers: tuple[Number | None, ...]) -> None:
        self.calls.append((name, numbers))
        if self._known is None or self.path is not None:
            return
        at = len(self.calls) - 1
        known = self._known[at] if at < len(self._known) else ("", ())
        if known[0] != name or len(known[1]) != len(numbers):
            self.path = Turn("with fewer of them the model takes another way", Explainer().where(), fatal=True)
        elif self.number is None and any(a is not None and a != b for a, b in zip(known[1], numbers, strict=True)):
            self.number = Turn("its size is used as a number", Explainer().where(), fatal=False)

    def turn(self) -> Turn | None:
        """What is another than in the known run."""
        if self.path is None and self._known is not None and len(self.calls) < len(self._known):
            self.path = Turn("with fewer of them the model stops before its end", "", fatal=True)
        return self.path or self.number


def _numbers(items: Any) -> Iterator[Number | None]:
    for item in items.values() if isinstance(items, dict) else items or ():
        kind = type(item)
        if kind in (tuple, list, dict, torch.Size):
            yield from _numbers(item)
        elif kind is Size:
            yield None
        elif is_number_argument(item):
            yield item


def is_number_argument(item: Any) -> bool:
    """Whether an argument of a function is a number, Python's or NumPy's."""
    return isinstance(item, int | float | complex | np.number) and not isinstance(item, bool)


def _written(number: Number) -> bool:
    """Whether a number is a constant of the code that is running; a float, of the very expression."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(_DEEPEST):
        if frame is None or is_capture(frame):
            return False
        written = constants(frame.f_code) if type(number) is int else _beside(frame.f_code, frame.f_lasti)
        if (type(number), number) in written:
            return True
        frame = frame.f_back
    return False


@cache
def _beside(code: CodeType, at: int) -> frozenset[tuple[type, complex]]:
    """The numbers that are written on the lines of the expression that an instruction is part of."""
    lines = [(start or 0, end or 0) for start, end, _, _ in code.co_positions()]  # one for every two bytes
    first, last = lines[at // 2]
    loads = [i for i in dis.get_instructions(code) if i.opname == "LOAD_CONST"]
    return frozenset(each_number([i.argval for i in loads if first <= lines[i.offset // 2][0] <= last]))


def _comes_of_constants(number: float) -> bool:
    """Whether a number is what constants and functions of `math` come to on the line of the model that is running."""
    frame = of_the_model(3)
    return frame is not None and (frame.f_lineno, number) in _constant_values(frame.f_code)


@cache
def _constant_values(code: CodeType) -> frozenset[tuple[int, float]]:
    """The lines of some code, each with what its expressions come to that are made of nothing but constants."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except Exception:  # it was typed in or made by code, or is part of a line
        return frozenset()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call | ast.BinOp) and all(map(_is_constant, ast.walk(node))):
            with suppress(ArithmeticError, ValueError, AttributeError, TypeError):
                value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}, "math": math})
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                found |= {(code.co_firstlineno - 1 + line, value) for line in lines}
    return frozenset(found)


def _is_constant(node: ast.AST) -> bool:
    """Whether part of an expression is a number, arithmetic or something of the module `math`."""
    if isinstance(node, ast.Name):
        return node.id == "math"
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and not node.keywords
    if isinstance(node, ast.Attribute):
        return node.attr in _OF_MATH
    kinds = ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.Load
    return isinstance(node, kinds) or (isinstance(node, ast.Constant) and type(node.value) in (int, float))


class _Trial:
    """A run on fake tensors of the sizes that some cut leaves."""

    strayed = False

    def __init__(
        self,
        example: Any,
        known: Sequence[NumberCall],
        shape: Callable[[str, Tensor], Sequence[int]],
        held: Mapping[Place, int],
        scales: Mapping[str, float],
    ) -> None:
        self._scales = scales
        self._example, self._known, self._shape, self._new = example, known, shape, held
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[int, Tensor] = {}
        self._ear = Ear(Explainer())
        self._ear.explainer = None  # its sizes tell nothing, but whoever still has one can be found
        self.fakes: list[weakref.ref[Any]] = [weakref.ref(self._ear)]

    def change(self, value: Any, place: Place, _kind: str) -> Any:
        if not isinstance(value, Tensor):
            return Size(int(self._new.get(place, value)), Attr(place), self._ear)
        if id(value) not in self._made:
            fake = self._fake(value, self._shape(str(place), value))
            self._made[id(value)] = fake.requires_grad_(value.requires_grad)
        return self._made[id(value)]

    def _fake(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        device = device_of(self._example) if tensor.is_meta else tensor.device
        fake = fake_of(self._mode, torch.empty(tuple(shape), dtype=tensor.dtype, device="meta"), device)
        self.fakes.append(weakref.ref(fake))
        return fake

    def carry_out(self, model: nn.Module) -> Turn | None:
        """What is another than in the known run; None where nothing is."""
        numbers = Numbers(model, self._known)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _m, _a, name=name: numbers.entered(name), prepend=True)
            module.__dict__["training"] = False
            if name in self._scales:  # as a cut leaves it
                module.__class__ = MultiheadAttention
                module.__dict__.update(scale=self._scales[name], _qkv_same_embed_dim=False)
            for attribute, width in told_widths(module):
                module.__dict__[attribute] = width
        try:
            self._run(model, numbers)
        except Exception as error:  # of the user's code, with sizes it does not know
            if numbers.path is None:
                first = (str(error).strip().splitlines() or [""])[0]
                where = line_of(error)
                return Turn(f"with fewer of them the model fails: {type(error).__name__}: {first}", where, fatal=True)
        return numbers.turn()

    def _run(self, model: nn.Module, numbers: Numbers) -> None:
        args, kwargs = arguments(mapped(self._example, lambda tensor: self._fake(tensor, tensor.shape)))
        with same_chances(), gradients(model), laid_open(model), self._mode, _Made(self._mode, self.fakes), numbers:
            model(*args, **kwargs)


class _Made(TorchDispatchMode):
    """Notes what a run makes."""

    def __init__(self, mode: FakeTensorMode, fakes: list[weakref.ref[Any]]) -> None:
        super().__init__()
        self._mode, self._fakes = mode, fakes

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = carried_out(self._mode, func, args, kwargs or {})
        self._fakes += map(weakref.ref, tensors_in(out))
        return out


def rehearsed(
    model: nn.Module,
    example: Any,
    known: Sequence[NumberCall],
    layouts: Mapping[str, Sequence[Layout]],
    equations: Equations,
    atoms: Sequence[Atom],
    exact: Collection[Atom],
) -> dict[Atom, Turn]:
    """What of the model's run is another when axes are shorter, by axis; of numbers only for `exact` ones."""

    attentions = {name: m for name, m in model.named_modules() if type(m) is nn.MultiheadAttention}
    scales = {name: 1 / math.sqrt(attention.head_dim) for name, attention in attentions.items()}

    @cache
    def trial(cut: tuple[Atom, ...]) -> Turn | None:
        counts = _admissible(cut, equations)
        held = equations.changed_places(counts)

        def shape(name: str, tensor: Tensor) -> Sequence[int]:
            return [size_after(d, counts) for d in layouts[name]] if name in layouts else tensor.shape

        trials: list[_Trial] = []

        def start() -> _Trial:
            trials.append(_Trial(example, known, shape, held, scales))
            return trials[-1]

        try:
            return run_apart(model, start, wholly=True)
        finally:
            fakes = [fake for each in trials for fake in each.fakes]
            trials.clear()
            let_go(fakes)

    def fatal(cut: tuple[Atom, ...]) -> Turn | None:
        if trial.cache_info().currsize > _MOST_TRIALS:
            raise _HardlyError("too many of them matter")
        found = trial(cut)
        return found if found is not None and found.fatal else None

    if trial(tuple(atoms)) is None:
        return {}
    if fatal(tuple(atoms)) is not None and trial(()) is not None:
        raise _HardlyError("it does not run in this way with its own sizes either")
    whole = _which(tuple(atoms), fatal)
    return {**_which(tuple(a for a in atoms if a in exact and a not in whole), trial), **whole}


class _HardlyError(Exception):
    """The model hardly runs with other sizes."""


def _which(atoms: tuple[Atom, ...], turn: Callable[[tuple[Atom, ...]], Turn | None]) -> dict[Atom, Turn]:
    """The axes that make a difference, found by halving."""
    found = turn(atoms) if atoms else None
    if found is None:
        return {}
    if len(atoms) == 1:
        return {atoms[0]: found}
    half = len(atoms) // 2
    parts = {**_which(atoms[:half], turn), **_which(atoms[half:], turn)}
    return parts or dict.fromkeys(atoms, found)  # only together, as axes that must keep equally many


def _admissible(cut: Sequence[Atom], equations: Equations) -> dict[Atom, int]:
    """Half of each axis, but for as few as will do of those that then break what the model's own arithmetic demands."""
    counts = {atom: max(1, atom.size // 2) for atom in cut}
    while broken := [c for c in equations.constraints if not equations.holds(c, counts)]:
        involved = [atom for c in broken for atom in equations.atoms_of(c.left, c.right) if atom in counts]
        if not involved:
            break
        fewer = ({a: n for a, n in counts.items() if a is not spared} for spared in dict.fromkeys(involved))
        mended = [one for one in fewer if equations.holds(broken[0], one)]  # one that stays whole is often enough
        counts = mended[0] if mended else {a: n for a, n in counts.items() if a not in involved}
    return counts


__all__ = ["NumberCall", "Numbers", "Turn", "is_number_argument", "rehearsed"]
