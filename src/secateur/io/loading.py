"""Load what `save` wrote, or a folder with a cut model, into a model of full size or into none."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar, overload

from torch import Tensor, nn

from secateur.errors import FileError, SecateurError
from secateur.io.file import Header, about, check_order, class_name
from secateur.io.stored import Stored, header_of, opened
from secateur.io.tensors import State, fill, realised, set_extra
from secateur.pipeline.apply import plan_of, remember
from secateur.pipeline.rebuild import held_here
from secateur.planning.json import shown
from secateur.state.held import named_tensors
from secateur.state.transaction import Transaction, transaction
from secateur.surgery import carry_out
from secateur.surgery.bias import add_biases, check_biases
from secateur.surgery.blocks import shortened
from secateur.surgery.holders import check_alone, tell_holders, wrappers_follow
from secateur.tracing import unwrap
from secateur.tracing.constructor import Maker
from secateur.tracing.origins import Origin
from secateur.tracing.shell import shell, tables

Model = TypeVar("Model", bound=nn.Module)
_AS_BUILT = "build the model as it was built when it was saved"


@overload
def load(path: str | os.PathLike[str], model: Model) -> Model: ...
@overload
def load(
    path: str | os.PathLike[str], model: None = None, *, make: Callable[..., nn.Module] | None = None
) -> nn.Module: ...
def load(path: Any, model: Any = None, *, make: Any = None) -> Any:
    """Load a file that `save` wrote, or a folder with a cut model; returns the model.

    >>> import secateur as sec, tempfile, torch
    >>> path = f"{tempfile.mkdtemp()}/net.safetensors"
    >>> net = nn.Linear(2, 2)
    >>> sec.save(net, path)
    >>> torch.equal(sec.load(path, nn.Linear(2, 2)).weight, net.weight)
    True

    Without `model` it is built at its cut size, and then filled: the full-size model is never in memory. For models of
    Transformers, diffusers, timm and torchvision the file says how. For any other, `make` is the class or function that
    builds it, which is called with the arguments that `trace(..., make=functools.partial(Net, width=64))` was given; a
    `functools.partial` is called as it is. A file cannot name any other code. The model is on the CPU, in the dtypes
    and the mode in which it was saved; parameters that did not learn do not, and Transformers' `generation_config` is
    back.

    With `model`, freshly built and of full size, that is cut by the plan in the file and gets its weights, in place;
    its device, dtypes, modes and what requires a gradient stay. It can be cut and saved again.

    The file is not trusted: names, shapes, dtypes and every number that it rewrites must be those of this model.
    Whatever goes wrong, the model is as it was.
    """
    check_order(path, model, "load(path, model)")
    if model is not None and make is not None:
        raise FileError(f"{path}: make= builds the model, so it does not go with one that is there")
    with ExitStack() as stack:
        file = stack.enter_context(opened(stack.enter_context(about(path))))
        if model is None:
            return _from_nothing(file, make)
        inner = unwrap(model)
        header = header_of(file, inner)
        _check_model(inner, header)
        if header.plan is not None:
            check_alone(inner, header.plan)  # before the transaction holds its tensors, too
        closing = stack.pop_all()
    told = nullcontext() if header.plan is None else wrappers_follow(inner, everywhere=False)
    with told, transaction(inner) as undo, closing:  # which may fail, too
        _carry_out(inner, header, file, undo)
    if header.plan is not None:
        tell_holders(inner, header.plan)
    return model


def _from_nothing(file: Stored, make: Callable[..., nn.Module] | None) -> nn.Module:
    """The model of a file, built without weights, cut, and filled."""
    said = header_of(file)
    origin = said.origin or Origin("", said.class_name, None)
    if said.origin is None and not isinstance(make, functools.partial):
        why = f" ({ascii(said.unbuilt)[1:-1]})" if said.unbuilt else ""
        raise FileError(f"it does not say how the model is built{why}; pass one of full size, load(path, model)")
    try:
        maker = Maker(make, {}) if isinstance(make, functools.partial) else origin.maker(make)
        model = shell(maker, len(file.keys()), closed=make is None)  # whoever passes code trusts it
    except SecateurError:
        raise
    except Exception as error:  # the constructor's own code, with arguments from a file
        raise FileError(f"it could not be built: {type(error).__name__}: {error}"[:500]) from error
    header = header_of(file, model)
    _check_model(model, header)
    _carry_out(model, header, file, None)
    header.settings.put(model)
    return model.train(header.training)


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


def _carry_out(model: nn.Module, header: Header, file: Stored, undo: Transaction | None) -> None:
    """The cut that a file tells of, and its values; without `undo` in a model that was made without weights."""
    if undo is not None:
        for name, value in State.of(model).extra.items():
            undo.before_roll_back(partial(set_extra, model, name, value.clone()))
    try:
        plan = None if header.plan is None else shortened(model, header.plan)
        add_biases(model, header.biases)
        stored = _matched(State.of(model), header, set(file.keys()) - set(header.tables))
        _check_sizes(State.of(model), stored, file)
        values = {name: file.get_tensor(key) for name, key in stored.items()}  # mapped, not yet read
        if header.plan is not None and plan is not None:
            carry_out(model, held_here(model, plan))
            remember(model, header.plan)
        check_biases(model, header.biases)
        state = State.of(model)
        for name, tensor in state.tensors.items():
            if name in values:
                _check_tensor(name, values[name], tensor, undo is not None)
        if undo is None:
            _realise(model, values, header, file)
        else:
            cut = set() if header.plan is None else set(header.plan.kept)  # these get their old memory back
            undo.keep(*(t for name, t in state.tensors.items() if name in values and name not in cut))
        fill(model, values if undo is not None else {name: values[name] for name in state.extra})
    except SecateurError:
        raise
    except Exception as error:  # sizes that contradict each other, or a set_extra_state, fail in ways of their own
        raise FileError(f"it cannot be loaded: {type(error).__name__}: {error}; {_AS_BUILT}") from error


def _realise(model: nn.Module, values: dict[str, Tensor], header: Header, file: Stored) -> None:
    """Real tensors in a model that was made without weights."""
    have = dict(tables(model))
    held = {}
    for name in header.tables:
        if name not in have or file.shape(name) != tuple(have[name].shape):
            raise FileError(f"it holds {shown(name)}, which the model does not have, or in another shape")
        held[name] = file.get_tensor(name)
    realised(model, {**values, **held})
    for name, tensor in (*named_tensors(model), *tables(model)):
        if tensor.is_meta:
            raise FileError(f"it does not hold {shown(name)}; pass a model of full size, load(path, model)")


def _check_sizes(state: State, stored: dict[str, str], file: Stored) -> None:
    """Refuse what is larger than the full-size model has it, before it is unpacked into memory."""
    for name, tensor in state.tensors.items():
        if name in stored and math.prod(file.shape(stored[name])) > tensor.numel():
            sizes = f"{list(file.shape(stored[name]))[:16]} in the file, {list(tensor.shape)} in the model"
            raise FileError(f"{shown(name)} is {sizes}; {_AS_BUILT}")


def _check_tensor(name: str, value: Tensor, tensor: Tensor, typed: bool) -> None:
    if tensor.is_meta and typed:
        raise FileError(f"{name} of the model is on the meta device; call model.to_empty(device=…) first")
    if value.shape != tensor.shape:
        sizes = f"{list(value.shape)[:16]} in the file, {list(tensor.shape)} in the model after the cut"
        raise FileError(f"{name} is {sizes}; {_AS_BUILT}")
    if value.dtype != tensor.dtype and (typed or value.is_floating_point() != tensor.is_floating_point()):
        remedy = _AS_BUILT
        if value.is_floating_point() and tensor.is_floating_point():
            remedy = f"call model.to({value.dtype}) before loading, or save the model as {tensor.dtype}"
        raise FileError(f"{name} is {value.dtype} in the file, {tensor.dtype} in the model; {remedy}")
