"""Run a model once, on fake tensors, and record what its ops do to axes.

The run is that of a twin (`state.twin`), so the model is not touched. Its tensors are fake: they have shapes but no
memory, and ops on them take no time. Its ints are sizes that remember which attribute they came from, and what it is
called with is known to be input, which no cut changes. While it runs, two recorders listen, and what they hear goes to
a `Tracer`. Where a model needs values (a table that decides which way the code takes) it runs on real tensors.
"""

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from secateur import ops as ops  # registers the records
from secateur.axes import Atom, Boundary, Layout, fix
from secateur.compat import (
    BatchNorm,
    Convolution,
    FakeTensor,
    FakeTensorMode,
    storage_id,
    without_torch_function,
)
from secateur.errors import TraceError
from secateur.ops.value import Value, bind, forget, known, layouts_of
from secateur.sizes.size import Attr, Expr, Size, plain
from secateur.state.chances import same_chances
from secateur.state.collector import collected_meanwhile
from secateur.state.held import Place, every_module, read, signature, write
from secateur.state.twin import run_apart
from secateur.tracing.environment import gradients, laid_open
from secateur.tracing.examples import arguments, device_of, handed_out, mapped, tensors_in
from secateur.tracing.fakes import fake_of
from secateur.tracing.forced import Forced, forced
from secateur.tracing.recorders import FunctionRecorder, OpRecorder
from secateur.tracing.rehearsal import Numbers
from secateur.tracing.standins import watching
from secateur.tracing.tracer import Tracer
from secateur.tracing.untaken import Reached, branching, places
from secateur.tracing.widths import told_widths

# Layers whose own code does not read these attributes: torch's others compare or compute with them.
_PLAIN = (nn.Linear, Convolution, BatchNorm, nn.Embedding)

OUTPUT = Boundary("a dimension of the model's output")
Swaps = Sequence[tuple[str, str]]  # names of modules that change places


class InputDim(Boundary):
    """Why a dimension stays: it is that of an input; which one, it remembers."""

    place: tuple[int, int]

    @staticmethod
    def of(tensor: int, dim: int) -> "InputDim":
        """Of a dimension of one of the input's tensors, by number."""
        made = InputDim("a dimension of the model's input")
        made.place = tensor, dim
        return made


@dataclass(frozen=True)
class Beside:
    """A method that is called beside forward, by some modules, with what.

    That is what forward is given, or the tensor with this number of those that are `put_out`.
    """

    method: str
    owners: tuple[str, ...]
    put_out: int | None = None


@dataclass(frozen=True)
class ModelCall:
    """One call of the model: with what, and in which mode."""

    example: Any
    training: bool = False
    again: bool = False  # only to see what the model makes of what earlier calls left in it
    asked: bool = True  # what comes out is what the example asks for, so its sizes stay
    attributes: tuple[tuple[Place, Any], ...] = ()  # those that are otherwise, and what they hold then
    added: str = ""  # an argument that the user's example leaves out
    watched: tuple[str, ...] = ()  # variables of forward that are looked at when it returns
    beside: Beside | None = None
    forced: tuple[Forced, ...] = ()  # branches that are taken, whatever their tests come to


@dataclass
class Capture:
    """What tracing runs have shown: their record, and every tensor of the model by name."""

    tracer: Tracer = field(default_factory=Tracer)
    values: dict[str, Value] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # parameter, buffer or attribute
    places: dict[str, Place] = field(default_factory=dict)  # of tensors in plain attributes
    rewritten: set[str] = field(default_factory=set)  # those of them that the model's own code replaced
    flows: dict[str, list[Layout]] = field(default_factory=dict)  # what goes into modules and comes out of them
    numbers: Numbers | None = None  # what a single call did, and gave torch functions besides tensors and sizes
    joined: list[tuple[str, tuple[Layout, ...]]] = field(default_factory=list)  # tensors' dimensions in other runs
    placed: set[str] = field(default_factory=set)  # modules that ran in the place of others only
    turned: set[str] = field(default_factory=set)  # lines where data was made to decide the other way
    outputs: list[list[tuple[int, ...]]] = field(default_factory=list)  # shapes of what each call put out
    unasked: list[Layout] = field(default_factory=list)  # dimensions of what the example does not ask for
    watched: dict[str, Any] = field(default_factory=dict)  # what was looked at, with zeros for its tensors
    taken: set[Forced] = field(default_factory=set)  # branches that were taken by force
    reached: set[Reached] = field(default_factory=set)  # what ran of code that is watched


def captured(
    model: nn.Module,
    calls: Sequence[ModelCall],
    made: list[Any],
    *,
    fake: bool,
    swapped: Swaps = (),
    contrary: Sequence[str] = (),
    begun: list[Capture] | None = None,
    flowing: bool = True,
    timed: bool = True,
) -> Capture:
    """Call a model, once or several times in a row, and record what its ops do to axes.

    Afterwards what it made is to be let go; `made` gets weak references to that. `swapped` modules change places,
    and at the lines in `contrary` what is decided by data is decided the other way. `begun` gets each record as it is
    begun, for what is known if it fails. `flowing`: what goes into modules and comes out of them is remembered.
    `timed`: so are ops one by one, with what they cost, and the numbers that functions are given; of a single call.
    """

    def start() -> _Recorded:
        capture = Capture()
        if begun is not None:
            begun.append(capture)
        return _Recorded(capture, fake, calls, made, swapped, contrary, flowing, timed and len(calls) == 1)

    with (
        nullcontext() if fake else collected_meanwhile(),
        forced([branch for call in calls for branch in call.forced]) as taken,
    ):
        capture = run_apart(model, start)
    capture.taken |= taken
    return capture


class _Recorded:
    """One tracing run."""

    def __init__(
        self,
        capture: Capture,
        fake: bool,
        calls: Sequence[ModelCall],
        made: list[Any],
        swapped: Swaps,
        contrary: Sequence[str],
        flowing: bool,
        timed: bool,
    ) -> None:
        self._capture, self._flowing = capture, flowing
        self.tracer = capture.tracer
        self.tracer.timed = timed
        self.mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        self._ops = OpRecorder(self.tracer, made, self.mode)
        self.tracer.sizes.listen(made)
        self._calls, self._swapped, self._contrary = calls, swapped, contrary
        self._device = device_of([call.example for call in calls])
        self._numbers: Numbers | None = None
        self._stand_ins: dict[int, Tensor] = {}
        self._real: list[Tensor] = []

    @property
    def strayed(self) -> bool:
        own = {storage_id(tensor) for tensor in self._real if tensor.layout is torch.strided}
        return any(t.layout is torch.strided and storage_id(t) in own for t in self._ops.strangers)

    def carry_out(self, model: nn.Module) -> Capture:
        """Run the model; what is known then."""
        with same_chances(), gradients(model), laid_open(model, self.tracer.sizes):
            try:
                self._run(model)
            finally:
                self.tracer.sizes.stop_listening()
                for tensor in self._ops.strangers:
                    forget(tensor)
                self._stand_ins.clear()
                own = {id(None), *map(id, self._ops.strangers)}  # what an op writes into, it also puts out
                self._ops.made[:] = [one for one in self._ops.made if id(one()) not in own]
        return self._capture

    def _run(self, model: nn.Module) -> None:
        watched = {id(function.__code__): function.__code__ for function in self._branching(model)}
        reached = dict[int, set[int]]()
        names = every_module(model)
        for module, name in names.items() if self._flowing or self.tracer.timed else ():
            self._follow(module, name)
        for one, other in self._swapped:
            _swap(model, one, other)
        before = signature(names) if any(call.again for call in self._calls) else []
        for number, call in enumerate(self._calls):
            if call.again and before == signature(names):
                self._capture.outputs.append([])
                continue
            for module in names:
                module.__dict__["training"] = call.training
            for place, value in call.attributes:
                write(model, place, _of_its_own(model, place, value))
            if call.beside is not None:
                self._call_beside(model, call.beside)
            args, kwargs = arguments(self._input(call.example, call.added))
            self.tracer.sizes.judges = not call.training  # a cut is exact if what it puts out is, in eval mode
            functions = FunctionRecorder(self.tracer, self._ops, self._contrary, watched, reached)
            self._numbers = Numbers(model, sizes=self.tracer.sizes) if self.tracer.timed else None
            with self.mode or nullcontext(), self._ops, functions:
                if not number and self.tracer.timed:  # what is true of a model's weights, the first run tells
                    self.tracer.said.update(_said_of_weights(names))
                with self._numbers or nullcontext(), watching(model, call.watched) as seen:
                    output = model(*args, **kwargs)
            self._capture.watched = {name: _zeros(value) for name, value in seen.items() if not _of_weights(value)}
            self._capture.numbers = self._capture.numbers or self._numbers
            self._capture.turned |= set(self._contrary) - functions.contrary
            self._capture.reached |= {place for code, at in reached.items() for place in places(watched[code], at)}
            self._outputs(model, output, call.asked)
        self._capture.rewritten |= {n for n, at in self._capture.places.items() if self._replaced(model, at)}

    def _branching(self, model: nn.Module) -> Iterable[FunctionType]:
        """The functions of which it is to be seen which branches are taken."""
        beside = (branching(model, call.beside.method) for call in self._calls if call.beside is not None)
        return (function for every in (branching(model), *beside) for function in every)

    def _call_beside(self, model: nn.Module, beside: Beside) -> None:
        """Let modules call another method: with those of forward's arguments that it takes by name, or in order."""

        def call(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            method = getattr(module, beside.method)
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            taken = inspect.signature(method).parameters
            needed = [name for name, p in taken.items() if p.default is p.empty]
            if beside.put_out is not None:
                made = method([*tensors_in(output)][beside.put_out])
            elif set(needed) <= set(given):
                made = method(**{name: given[name] for name in taken if name in given})
            else:
                made = method(*islice(cycle(given.values()), len(needed)))
            self._capture.unasked += [dim for tensor in tensors_in(made) for dim in layouts_of(tensor)]

        for owner in beside.owners:
            model.get_submodule(owner).register_forward_hook(call, with_kwargs=True)

    def _replaced(self, model: nn.Module, place: Place) -> bool:
        """Whether a plain attribute no longer holds what it was given."""
        try:
            return not any(read(model, place) is given for given in self._stand_ins.values())
        except (AttributeError, KeyError, IndexError, TypeError):
            return True

    def _follow(self, module: nn.Module, name: str) -> None:
        """Let the tracer know which module runs, and remember what goes through it."""
        tracer, around, flow = self.tracer, list[str](), self._capture.flows.setdefault(name, [])

        def enter(_module: Any, *given: Any) -> None:
            around.append(tracer.module)
            tracer.module = name
            if self._numbers is not None:
                self._numbers.entered(name)
            pass_on(given)

        def leave(_module: Any, _args: Any, output: Any) -> None:
            if around:
                tracer.module = around.pop()
            pass_on(output)

        def pass_on(tensors: Any) -> None:
            for tensor in tensors_in(tensors) if self._flowing else ():
                ordinary = type(tensor) in (FakeTensor, Tensor)  # of which recorders need not hear what is asked here
                with without_torch_function() if ordinary else nullcontext():
                    flow.extend(layouts_of(tensor))

        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave, prepend=True, always_call=True)

    def change(self, value: Any, place: Place, kind: str) -> Any:
        """What takes the place of a tensor or an int: a stand-in, or a size that remembers."""
        if not isinstance(value, Tensor):
            return self.tracer.sizes.size(value, Attr(place))
        if kind == "attribute":
            if id(value) in self._stand_ins:
                return self._stand_ins[id(value)]
            self._capture.places[str(place)] = place
        return self._stand_in(value, str(place), kind)

    def _stand_in(self, tensor: Tensor, name: str, kind: str) -> Tensor:
        values = self._capture.values
        fake = self._stand_ins.get(id(tensor))
        if fake is None:
            fake = self._stand_ins[id(tensor)] = self._fake(tensor).requires_grad_(tensor.requires_grad)
            self._real.append(tensor)
            if name not in values:
                values[name] = Value([Atom(n) for n in tensor.shape])
                values[name].storage.made_of = frozenset({name})
        value = known(fake)
        if value is None:
            value = bind(fake, values[name])
        values.setdefault(name, value)
        self._capture.kinds.setdefault(name, kind)
        return fake

    def _fake(self, tensor: Tensor) -> Tensor:
        fake = self._like(tensor)
        self._ops.made.append(weakref.ref(fake))
        return fake

    def _like(self, tensor: Tensor) -> Tensor:
        if self.mode is None:
            return tensor.detach().clone()
        device = self._device if tensor.is_meta else tensor.device
        if tensor.layout is not torch.strided:
            return self.mode.from_tensor(tensor.detach(), static_shapes=True)
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return fake_of(self.mode, meta, device)

    def _input(self, example: Any, added: str) -> Any:
        numbers = count()
        new = Boundary(f"a dimension of the model's input, if it is given {added}")
        others = {id(t) for t in tensors_in({k: v for k, v in example.items() if k != added})} if added else set()

        def stand_in(tensor: Tensor) -> Tensor:
            fake, number = self._fake(tensor), next(numbers)
            given = not added or id(tensor) in others
            reasons = (InputDim.of(number, dim) if given else new for dim in range(tensor.ndim))
            bind(fake, Value([Atom(n, reason) for n, reason in zip(tensor.shape, reasons, strict=True)]))
            return fake

        return mapped(example, stand_in)

    def _outputs(self, model: nn.Module, output: Any, asked: bool) -> None:
        outputs = list(tensors_in(handed_out(model, output)))
        if not outputs:
            raise TraceError(
                f"there is no tensor in what the model returns, a {type(output).__name__}; "
                "return tensors, also in tuples, dicts or dataclasses"
            )
        self._capture.outputs.append([tuple(tensor.shape) for tensor in outputs])
        for tensor in outputs:
            value = known(tensor)
            if value is not None:
                value.tie_rows()
                self._capture.unasked += () if asked else value.dims
                for dim in value.dims if asked else ():
                    fix(dim, OUTPUT)


def _of_its_own(model: nn.Module, place: Place, value: Any) -> Any:
    """A method of a module as one of the twin's."""
    return MethodType(value.__func__, model.get_submodule(place.owner)) if isinstance(value, MethodType) else value


def _zeros(item: Any) -> Any:
    return mapped(item, lambda tensor: torch.zeros(tuple(tensor.shape), dtype=tensor.dtype))


def _of_weights(item: Any) -> bool:
    """Whether tensors are made of the model's own, and of nothing else."""
    values = [value for value in map(known, tensors_in(item)) if value is not None]
    return bool(values) and all(value.storage.made_of for value in values)


def _said_of_weights(names: Mapping[nn.Module, str]) -> Iterator[tuple[Place, Expr]]:
    """Attributes that only say what weights are, as what they are made of, for code that computes with them."""
    for module, owner in names.items():
        if isinstance(module, _PLAIN) and module._parameters.get("weight") is not None:
            for name, size in told_widths(module):
                if isinstance(size, Size) and plain(size) == plain(module.__dict__[name]):
                    yield Place(owner, (name,)), size.expr


def _swap(model: nn.Module, one: str, other: str) -> None:
    """Let two modules of a twin change places."""
    (home, mine), (away, theirs) = (name.rpartition(".")[::2] for name in (one, other))
    here, there = model.get_submodule(home)._modules, model.get_submodule(away)._modules
    here[mine], there[theirs] = there[theirs], here[mine]
