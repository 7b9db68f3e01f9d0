"""A model's constructor is a program, too: where the sizes of its parameters come from.

The call that built a model is carried out once more with numbers that remember in the place of its arguments' ints and
floats (the fields). Every dimension of every parameter then comes out as an expression over fields:

    layers.0.mlp.up_proj.weight[0]  =  intermediate_size
    layers.0.self_attn.k_proj.weight[0]  =  num_key_value_heads * head_dim

So it is known, not guessed, which models the constructor can build. Parameters are on the meta device from the moment
that they are registered: only buffers, and what else the constructor computes, are real.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.axes import Atom, Concat, Layout, resolve
from secateur.compat import TorchFunctionMode
from secateur.errors import TraceError
from secateur.ops.value import bind, known
from secateur.sizes.real import Real, Whole
from secateur.sizes.size import Attr, Dim, Expr, Lit, Op, Remembering, Size, evaluate, plain
from secateur.state.chances import same_chances
from secateur.state.held import Key, Place, holder, is_number, items, native, put, rebuilt
from secateur.state.leftovers import classes, cleaned
from secateur.state.patches import patched
from secateur.tracing.environment import laid_open
from secateur.tracing.equations import Constraint
from secateur.tracing.recorders import FunctionRecorder, OpRecorder
from secateur.tracing.tracer import Tracer

T = TypeVar("T")
_DEEPEST = 8  # how far inside of arguments fields are looked for


@dataclass(frozen=True)
class Field(Place):
    """A number among the arguments of a constructor: `path` leads there from their names."""

    def __str__(self) -> str:
        text = ""
        for step in self.path:
            name = step.key if isinstance(step, Key) else step
            text += f".{name}" if isinstance(name, str) else f"[{name}]"
        return text.lstrip(".")


@dataclass(frozen=True)
class Maker:
    """How a model is built: a callable and its arguments, whose whole numbers and floats are its fields.

    >>> maker = Maker(nn.Linear, {"in_features": 4, "out_features": 8})
    >>> {str(place): value for place, value in maker.fields().items()}
    {'in_features': 4, 'out_features': 8}
    >>> maker.build({place: 2 * value for place, value in maker.fields().items()})
    Linear(in_features=8, out_features=16, bias=True)
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def fields(self) -> dict[Place, float]:
        """Every field with its value."""
        found: dict[Place, float] = {}
        self.changed(lambda place, value: found.setdefault(place, value))
        return found

    def build(self, values: Mapping[Place, float]) -> nn.Module:
        """The model with other values of some fields: parameters on the meta device, buffers real."""

        def run(meta: bool) -> nn.Module:
            arguments = self.changed(lambda place, value: values.get(place, value))
            with same_chances(), torch.no_grad(), without_weights(meta=meta):
                return self.function(**arguments)

        return _on_meta(run)

    def changed(self, change: Callable[[Field, float], float]) -> dict[str, Any]:
        """Copies of the arguments, with another number in the place of each."""
        memo: dict[int, Any] = {}
        return {
            name: _change(_own(each), Field("", (Key(name),)), change, memo) for name, each in self.arguments.items()
        }


def _own(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # only its own code can make one, so it is shared, and nothing in it is a field
        return _Shared(value)


@dataclass(frozen=True)
class _Shared:
    value: Any


def _change(value: Any, place: Field, change: Callable[[Field, float], float], memo: dict[int, Any]) -> Any:
    if isinstance(value, _Shared):
        return value.value
    if is_number(value) or type(value) is float:
        return change(place, value)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return rebuilt(value, [_change(v, _at(place, i), change, memo) for i, v in enumerate(value)])
    store = None if isinstance(value, Tensor | nn.Module) else holder(value)
    if store is None or id(store) in memo or len(place.path) > _DEEPEST:
        return value
    memo[id(store)] = store
    for step, each in list(items(store, value)):
        new = _change(each, _at(place, step), change, memo)
        if new is not each:
            put(store, step, new)
    return value


def _at(place: Field, step: Any) -> Field:
    return Field(place.owner, (*place.path, step))


def _on_meta(run: Callable[[bool], T]) -> T:
    """What is made without weights or, where code computes with weights that it has just made, with them."""
    try:
        return run(True)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
    return run(False)


@contextmanager
def without_weights(most: float = math.inf, *, meta: bool = True) -> Iterator[None]:
    """Parameters are put on the meta device as they are registered, and remember what was known of their data."""
    seen = itertools.count()
    made = WeakTensorKeyDictionary()  # what a parameter became that is registered twice; it may go before that
    register, new = nn.Module.register_parameter, nn.Parameter.__new__

    def registered(self: nn.Module, name: str, param: Any) -> None:
        if type(param) is nn.Parameter:
            if next(seen) >= most:
                raise TraceError("its constructor makes far more parameters than there are")
            if meta and param not in made and not param.is_meta:
                made[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            param = made.get(param, param)
        register(self, name, param)

    def parameter(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        param = new(cls, data, *args, **kwargs)
        value = known(data)
        if value is not None:
            bind(param, value)
        return param

    with patched((nn.Module, "register_parameter", registered), (nn.Parameter, "__new__", parameter)), _Unfilled():
        yield


_FILLING = "normal_ uniform_ fill_ zero_ erfinv_ clamp_ mul_ add_"
_FILL = {getattr(Tensor, name) for name in _FILLING.split()}
_FILL |= {nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_}


class _Unfilled(TorchFunctionMode):
    """Leaves out what fills weights, which have no data here: it takes most of a constructor's time."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILL:
            given = [*args, *kwargs.values()]
            if given[0].is_meta and not any(isinstance(other, Tensor) for other in given[1:]):
                return given[0]
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Constructed:
    """What a constructor makes: every dimension of every tensor and every number of every module, out of its fields."""

    dims: Mapping[str, tuple[Sized, ...]]  # of parameters and buffers
    numbers: Mapping[Place, Expr]  # whole numbers that modules hold
    scales: Mapping[Place, Expr]  # floats that they hold, which are made of more than one field alone
    fields: Mapping[Place, float]
    constraints: tuple[Constraint, ...]  # what it asks of its fields

    def now(self, expr: Expr) -> float:
        """The value of an expression with the fields as they are."""
        return evaluate(expr, {}, self.fields.__getitem__)


@dataclass(frozen=True)
class Sized:
    """A dimension's size, and where it was given."""

    size: int
    expr: Expr
    where: str


def constructed(maker: Maker, model: nn.Module) -> Constructed:
    """Follow a constructor. `model` is one that it has built before: its code is that of the model's classes."""
    return _on_meta(partial(_constructed, maker, model))


def _constructed(maker: Maker, model: nn.Module, meta: bool) -> Constructed:
    tracer = Tracer(timed=False)
    made: list[Any] = []
    recorder = OpRecorder(tracer, made)
    tracer.sizes.listen(made)
    tracer.sizes.reals = True

    def remembering(place: Field, value: float) -> float:
        expr = Attr(place)
        return tracer.sizes.size(value, expr) if isinstance(value, int) else tracer.sizes.real(value, expr)

    arguments = maker.changed(remembering)
    try:
        weights = without_weights(meta=meta)
        with cleaned(model), same_chances(), torch.no_grad(), laid_open(model), weights, _whole(model):
            built = _run(recorder, tracer, maker.function, arguments)
        if not isinstance(built, nn.Module):
            raise TraceError(f"make= builds a model, not a {type(built).__name__}")
        return _result(built, tracer, maker.fields())
    finally:
        tracer.sizes.stop_listening()


def _run(recorder: OpRecorder, tracer: Tracer, function: Any, arguments: Mapping[str, Any]) -> Any:
    with recorder, FunctionRecorder(tracer, recorder), _Unfilled():
        return function(**arguments)


@contextmanager
def _whole(model: nn.Module) -> Iterator[None]:
    """`int` and the square root remember, in the modules of a model's code and of the functions that these call."""
    lacking = [vars(home) for home in _homes(model) if "int" not in vars(home)]
    for names in lacking:
        names["int"] = Whole
    try:
        with patched((math, "sqrt", _root)):
            yield
    finally:
        for names in lacking:
            names.pop("int", None)


def _homes(model: nn.Module) -> list[types.ModuleType]:
    """The Python modules of a model's classes, and of functions of their libraries that can be called by name there."""
    names = dict.fromkeys(kind.__module__ for kind in classes(model))
    own = {name.partition(".")[0] for name in names} - {"torch"}
    left = list(names)
    while left:
        for each in list(vars(sys.modules[home]).values()) if (home := left.pop()) in sys.modules else ():
            if isinstance(each, types.FunctionType) and (named := each.__module__ or "").partition(".")[0] in own:
                left += [named] if named not in names else []
                names[named] = None
    return [sys.modules[name] for name in names if name in sys.modules]


_sqrt = math.sqrt


def _root(value: Any) -> Any:
    return value**0.5 if isinstance(value, Size | Real) else _sqrt(value)


def _result(built: nn.Module, tracer: Tracer, fields: Mapping[Place, float]) -> Constructed:
    sizes = tracer.sizes
    given: dict[Layout, tuple[Expr, str]] = {}
    for equation in sizes.equations:
        given.setdefault(resolve(equation.layout), (equation.expr, equation.where))
    named = (*built.named_parameters(remove_duplicate=False), *built.named_buffers(remove_duplicate=False))
    dims = {}
    for name, tensor in named:
        value = known(tensor)
        layouts = value.dims if value is not None else [Atom(n, "made elsewhere") for n in tensor.shape]
        dims[name] = tuple(Sized(plain(layout.size), *_expression(layout, given)) for layout in layouts)
    constraints = [Constraint(c.symbol, c.left, c.right, c.outcome, c.where) for c in sizes.comparisons]
    alike = [c for c in constraints if c.symbol in ("==", "!=")]  # what only rounds or limits is found by building
    free = [c for c in alike if not any(map(_is_vague, (c.left, c.right)))]
    held = {place: value for place, value in numbers_in(built).items() if isinstance(value, Remembering)}
    whole = {place: value.expr for place, value in held.items() if isinstance(value, int)}
    scales = {place: v.expr for place, v in held.items() if isinstance(v, float) and not isinstance(v.expr, Attr)}
    return Constructed(dims, whole, scales, fields, tuple(free))


def _expression(layout: Layout, given: Mapping[Layout, tuple[Expr, str]]) -> tuple[Expr, str]:
    """The size of a layout as an expression over fields, and where it was given."""
    layout = resolve(layout)
    if layout in given and not _speaks_of_axes(given[layout][0]):
        return given[layout]
    if isinstance(layout, Atom) or not layout.parts:
        return Lit(layout.size), ""
    symbol = "+" if isinstance(layout, Concat) else "*"
    (first, where), *others = (_expression(part, given) for part in layout.parts)
    for expr, _ in others:
        first = Op(symbol, first, expr)
    return first, where


def _is_vague(expr: Expr) -> bool:
    """Whether it is not known what a side of a comparison is made of: `0.9 * size` is a float without memory."""
    return _speaks_of_axes(expr) or (isinstance(expr, Lit) and isinstance(expr.value, float))


def _speaks_of_axes(expr: Expr) -> bool:
    if isinstance(expr, Op):
        return _speaks_of_axes(expr.left) or _speaks_of_axes(expr.right)
    return isinstance(expr, Dim)


def numbers_in(model: nn.Module) -> dict[Place, Any]:
    """The whole numbers and floats that a model's modules hold, also in plain containers and objects."""
    return held_in(model, lambda value: is_number(value) or isinstance(value, float))


def switches_in(model: nn.Module) -> dict[Place, Any]:
    """What else decides what a model computes: the classes of its modules, and the flags and words that these hold.

    >>> {str(place): value for place, value in switches_in(nn.ReLU(inplace=True)).items()}
    {'': 'ReLU', 'training': True, 'inplace': True}
    """
    kinds = {Place(name, ()): type(module).__name__ for name, module in model.named_modules()}
    return {**kinds, **held_in(model, lambda value: isinstance(value, bool | str))}


def held_in(model: nn.Module, wanted: Callable[[Any], bool]) -> dict[Place, Any]:
    """What is wanted of all that a model's modules hold, also in plain containers and objects."""
    found: dict[Place, Any] = {}
    seen: set[int] = set()

    def visit(value: Any, place: Place) -> None:
        if wanted(value):
            found[place] = value
        elif isinstance(value, tuple) and not isinstance(value, torch.Size):
            for i, each in enumerate(native(value).__iter__(value)):
                visit(each, place.at(i))
        elif not isinstance(value, Tensor | nn.Module) or not place.path:
            store = holder(value)
            if store is not None and id(store) not in seen and len(place.path) <= _DEEPEST:
                seen.add(id(store))
                for step, each in items(store, value):
                    visit(each, place.at(step))

    for name, module in model.named_modules():
        visit(module, Place(name, ()))
    return found


__all__ = ["Constructed", "Field", "Maker", "Sized", "constructed", "held_in", "numbers_in", "switches_in"]
__all__ += ["without_weights"]
