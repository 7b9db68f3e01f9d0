"""Load what `save` wrote into a model of full size."""

import math
import os
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

from secateur.errors import FileError, PlanError, SecateurError
from secateur.io.file import Header, about, check_order, class_name, opened
from secateur.io.packed import Unpacking
from secateur.io.tensors import State, fill, set_extra
from secateur.pipeline.apply import plan_of, remember
from secateur.planning.json import shown
from secateur.planning.plans import Plan
from secateur.state.held import Place
from secateur.state.transaction import Transaction, transaction
from secateur.surgery import carry_out
from secateur.surgery.bias import add_biases, check_biases
from secateur.surgery.cut import reached
from secateur.surgery.holders import check_alone, tell_holders
from secateur.tracing import unwrap

Model = TypeVar("Model", bound=nn.Module)
_AS_BUILT = "build the model as it was built when it was saved"


def load(path: str | os.PathLike[str], model: Model) -> Model:
    """Load a file that `save` wrote into a freshly built, full-size model, in place; returns the model.

    >>> import tempfile, torch
    >>> from secateur.io import save
    >>> path = f"{tempfile.mkdtemp()}/net.safetensors"
    >>> net = nn.Linear(2, 2)
    >>> save(net, path)
    >>> torch.equal(load(path, nn.Linear(2, 2)).weight, net.weight)
    True

    The model is cut by the plan in the file and gets its weights; its device, dtypes, modes and what requires
    a gradient stay. It can be cut and saved again. The file is not trusted: names, shapes, dtypes and every
    int that it rewrites must be those of this model. Whatever goes wrong, the model is as it was.
    """
    check_order(path, model, "load(path, model)")
    with about(path):
        inner = unwrap(model)
    with transaction(inner) as undo, about(path) as source, opened(source) as file:
        header = Header.read(file.metadata())
        _check_model(inner, header)
        _carry_out(inner, header, file, undo)
    if header.plan is not None:
        tell_holders(inner, header.plan)
    return model


def _check_model(model: nn.Module, header: Header) -> None:
    here, there = class_name(model), header.class_name
    if there != here:
        raise FileError(f"it holds a {shown(there)}, the model is a {here}; build one of the same class")
    if plan_of(model) is not None:
        raise FileError("the model has been cut already; build it anew, at full size, and load into that")


def _matched(state: State, header: Header, keys: set[str]) -> dict[str, str]:
    """{the first name of each tensor of the model: its name in the file}, if both have the same tensors."""
    source = header.source(keys)
    _check_names(state.names() - set(source), "it lacks")
    _check_names(set(source) - state.names(), "the model lacks")
    here = {frozenset(group) for group in state.groups()}
    there = {frozenset((key, *header.tied.get(key, ()))) for key in keys - set(state.extra)}
    tied = [group for group in here ^ there if len(group) > 1]
    if tied:
        where = ("the model", "the file") if tied[0] in here else ("the file", "the model")
        names = " and ".join(sorted(tied[0])[:3])
        raise FileError(f"{names} are one tensor in {where[0]}, but not in {where[1]}; {_AS_BUILT}")
    firsts = [group[0] for group in state.groups()]
    return {name: source[name] for name in (*firsts, *state.extra)}


def _check_names(names: set[str], problem: str) -> None:
    if names:
        some = ", ".join(shown(name) for name in sorted(names)[:3])
        raise FileError(f"{problem} {some} ({len(names)} in all); {_AS_BUILT}")


def _carry_out(model: nn.Module, header: Header, file: Unpacking, undo: Transaction) -> None:
    """The cut that a file tells of, and its values."""
    for name, value in State.of(model).extra.items():
        undo.before_roll_back(partial(set_extra, model, name, value.clone()))
    try:
        add_biases(model, header.biases)
        stored = _matched(State.of(model), header, set(file.keys()))
        _check_sizes(State.of(model), stored, file)
        values = {name: file.get_tensor(key) for name, key in stored.items()}  # mapped, not yet read
        if header.plan is not None:
            plan = _held_here(model, header.plan)
            carry_out(model, plan)
            check_alone(model, plan)
            remember(model, header.plan)
        check_biases(model, header.biases)
        state = State.of(model)
        for name, tensor in state.tensors.items():
            if name in values:
                _check_tensor(name, values[name], tensor)
        cut = set() if header.plan is None else set(header.plan.kept)  # these get their old memory back
        undo.keep(*(t for name, t in state.tensors.items() if name in values and name not in cut))
        fill(model, values)
    except SecateurError:
        raise
    except Exception as error:  # sizes that contradict each other, or a set_extra_state, fail in ways of their own
        raise FileError(f"it cannot be loaded: {type(error).__name__}: {error}; {_AS_BUILT}") from error


def _check_sizes(state: State, stored: dict[str, str], file: Unpacking) -> None:
    """Refuse what is larger than the full-size model has it, before it is unpacked into memory."""
    for name, tensor in state.tensors.items():
        if name in stored and math.prod(file.shape(stored[name])) > tensor.numel():
            sizes = f"{list(file.shape(stored[name]))[:16]} in the file, {list(tensor.shape)} in the model"
            raise FileError(f"{shown(name)} is {sizes}; {_AS_BUILT}")


def _held_here(model: nn.Module, plan: Plan) -> Plan:
    """A plan without tensors in plain attributes that are empty before a model has run: caches."""
    modules = dict(model.named_modules())

    def held(place: Place) -> bool:
        try:
            return reached(modules, place) is not None
        except PlanError:  # it is refused where the plan is carried out
            return True

    return replace(plan, kept_in_attributes=tuple(each for each in plan.kept_in_attributes if held(each[0])))


def _check_tensor(name: str, value: Tensor, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise FileError(f"{name} of the model is on the meta device; call model.to_empty(device=…) first")
    if value.shape != tensor.shape:
        sizes = f"{list(value.shape)[:16]} in the file, {list(tensor.shape)} in the model after the cut"
        raise FileError(f"{name} is {sizes}; {_AS_BUILT}")
    if value.dtype != tensor.dtype:
        remedy = _AS_BUILT
        if value.is_floating_point() and tensor.is_floating_point():
            remedy = f"call model.to({value.dtype}) before loading, or save the model as {tensor.dtype}"
        raise FileError(f"{name} is {value.dtype} in the file, {tensor.dtype} in the model; {remedy}")
