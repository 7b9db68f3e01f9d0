"""Load what `save` wrote, or a folder with a cut model, into a model of full size or into none."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from secateur.arguments import PATH, a_function, check, optional, shown
from secateur.compat import dtensor, own_box
from secateur.distributed import Undressed, agreed, is_sharded, meet, spread_like, together
from secateur.errors import FileError, SecateurError
from secateur.io.file import Header, about, check_order, class_name
from secateur.io.parts import Parts
from secateur.io.stored import Stored, header_of, opened
from secateur.io.tensors import State, fill, realised, set_extra
from secateur.pipeline.apply import plan_of, remember
from secateur.pipeline.rebuild import held_here
from secateur.pipeline.sharded import Shard, shard_empty
from secateur.planning.plans import Plan
from secateur.prune import custom_from_mask
from secateur.state.held import named_tensors
from secateur.state.transaction import Transaction, transaction
from secateur.surgery import carry_out
from secateur.surgery.bias import add_biases, check_biases
from secateur.surgery.blocks import shortened
from secateur.surgery.holders import check_alone, tell_holders, wrappers_follow
from secateur.tracing import unwrap
from secateur.tracing.constructor import Maker
from secateur.tracing.origins import Origin
from secateur.tracing.shell import buffers, shell, tables

Model = TypeVar("Model", bound=nn.Module)
_AS_BUILT = "build the model as it was built when it was saved"


@overload
def load(path: str | os.PathLike[str], model: Model, *, shard: Shard | None = None) -> Model: ...
@overload
def load(
    path: str | os.PathLike[str], model: None = None, *, make: Callable[..., nn.Module] | None = None
) -> nn.Module: ...
def load(path: Any, model: Any = None, *, make: Any = None, shard: Any = None) -> Any:
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

    In a process group, `shard` is the function that spreads the model over ranks (`fully_shard`, `parallelize_module`);
    every rank calls this. The model may be on the meta device: it is cut without values, `shard` is called on it, and
    each rank takes what is its own from the file or folder, whatever number of ranks wrote it.

    The file is not trusted: names, shapes, dtypes and every number that it rewrites must be those of this model.
    Whatever goes wrong, the model is as it was.
    """
    check_order(path, model, "load(path, model)")
    builder = optional(a_function("a class or function that builds the model"))
    check("load", FileError, locals(), path=PATH, make=builder)
    if model is not None and make is not None:
        raise FileError(f"{path}: make= builds the model, so it does not go with one that is there")
    if shard is not None:
        _check_shard(path, model, shard)
    with ExitStack() as stack:
        stack.enter_context(together("load", all_come=shard is not None))
        file = stack.enter_context(opened(stack.enter_context(about(path))))
        if model is None:
            return _from_nothing(file, make)
        inner = unwrap(model)
        header = header_of(file, inner)
        _check_model(inner, header)
        if shard is not None:
            _load_spread(inner, header, file, shard)
            return model
        if header.plan is not None:
            check_alone(inner, header.plan)  # before the transaction holds its tensors, too
        closing = stack.pop_all()
    told = nullcontext() if header.plan is None else wrappers_follow(inner, everywhere=False)
    with told, transaction(inner) as undo, closing:  # which may fail, too
        _carry_out(inner, header, file, undo)
    if header.plan is not None:
        tell_holders(inner, header.plan)
    return model


def _check_shard(path: Any, model: Any, shard: Any) -> None:
    if not callable(shard) or model is None:
        raise FileError(
            f"{path}: shard= is a function that spreads a model over ranks (lambda model: fully_shard(model)), for the "
            "model that is passed, on the meta device or not"
        )


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
    with _blamed():
        stored = _cut(model, header, file)
        state = State.of(model)
        values = _Values(file, stored, state.tensors, typed=undo is not None)
        if undo is None:
            _realise(model, values, header, file)
        else:
            plan = None if header.plan is None else _under_masks(header.plan, state.tensors)
            cut = set() if plan is None else set(plan.kept)  # these get their old memory back
            undo.keep(*(t for name, t in state.tensors.items() if name in values and name not in cut))
        fill(model, values if undo is not None else {name: values[name] for name in state.extra})


@contextmanager
def _blamed() -> Iterator[None]:
    """Sizes that contradict each other, or a set_extra_state, fail in ways of their own."""
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:
        raise FileError(f"it cannot be loaded: {type(error).__name__}: {error}; {_AS_BUILT}") from error


def _cut(model: nn.Module, header: Header, file: Stored) -> dict[str, str]:
    """Cut a model as a file tells; {the first name of each of its tensors: its name in the file}."""
    plan = None if header.plan is None else shortened(model, header.plan)
    add_biases(model, header.biases)
    _add_masks(model, set(file.keys()))
    stored = _matched(State.of(model), header, set(file.keys()) - set(header.tables))
    _check_sizes(State.of(model), stored, file)
    if header.plan is not None and plan is not None:
        carry_out(model, held_here(model, _under_masks(plan, State.of(model).tensors)))
        remember(model, header.plan)
    check_biases(model, header.biases)
    return stored


def _add_masks(model: nn.Module, names: set[str]) -> None:
    """Masks of `secateur.prune` where a file has them and the model, as it was built, does not."""
    for prefix, module in model.named_modules():
        for name, weight in list(module._parameters.items()):
            full = f"{prefix}.{name}".lstrip(".")
            if weight is not None and full not in names and {f"{full}_orig", f"{full}_mask"} <= names:
                custom_from_mask(module, name, torch.ones_like(weight))


def _under_masks(plan: Plan, names: Collection[str]) -> Plan:
    """A plan for weights that have got masks since, and so other names."""
    now = {name: (f"{name}_orig", f"{name}_mask") for name in plan.kept if name not in names}
    now = {name: parts for name, parts in now.items() if all(part in names for part in parts)}

    def renamed(mapping: Mapping[str, Any]) -> dict[str, Any]:
        return {new: value for name, value in mapping.items() for new in now.get(name, (name,))}

    return replace(plan, kept=renamed(plan.kept), shapes=renamed(plan.shapes)) if now else plan


class _Values(Mapping[str, Tensor]):
    """The values of a file by the names of a model, each read when it is asked for, and refused if it does not fit."""

    def __init__(self, file: Stored, stored: Mapping[str, str], tensors: Mapping[str, Tensor], *, typed: bool) -> None:
        self._file, self._stored, self._tensors, self._typed = file, stored, tensors, typed

    def beside(self, names: Iterable[str]) -> _Values:
        """With further ones, which the model has under the names of the file."""
        more = {name: name for name in names}
        return _Values(self._file, {**self._stored, **more}, self._tensors, typed=self._typed)

    def __getitem__(self, name: str) -> Tensor:
        value = self._file.get_tensor(self._stored[name])
        if name in self._tensors:
            _check_tensor(name, value, self._tensors[name], self._typed)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _load_spread(model: nn.Module, header: Header, file: Stored, shard: Shard) -> None:
    """Cut a model without values, have it sharded, and give each rank its own part of each tensor. All or nothing."""
    if is_sharded(model):
        raise FileError("the model is spread over ranks already; pass it as it was built, load shards it")
    agreed("load", "".join(header.metadata().values()))
    if extra := State.of(model).extra:
        raise FileError(f"{shown(min(extra))} is extra state, which does not go with shard=; load it without")
    undressed = Undressed.of(model)
    try:
        with transaction(model) as undo, _blamed():
            stored = _cut(model, header, file)
            undo.keep(*(buffer for buffer in model.buffers() if not buffer.is_meta))
            meet("load: sharding")
            shard_empty(model, shard)
            _fill_parts(model, header, file, stored)
            meet("load: done")  # on every rank, or on none
    except BaseException:
        undressed.restore()
        raise


@torch.no_grad()
def _fill_parts(model: nn.Module, header: Header, file: Stored, stored: Mapping[str, str]) -> None:
    """Give each tensor of a sharded model what this rank has of it; buffers without values become tensors."""
    unstored = dict(buffers(model))
    where = {**stored, **{name: name for name in header.tables if name in unstored}}
    empty: dict[str, Tensor] = {}
    device = next(model.parameters()).device
    for name, tensor in (*State.of(model).tensors.items(), *unstored.items()):
        if name not in where:
            continue
        _check_shape(name, file.shape(where[name]), tensor)
        if tensor.is_meta:
            empty[name] = file.get_tensor(where[name]).to(device)
        elif name in stored:
            _fill_part(name, file, where[name], tensor)
    realised(model, empty)
    _check_values(model)


def _fill_part(name: str, file: Stored, key: str, tensor: Tensor) -> None:
    """Give a tensor that is real, and may be spread over ranks, its values."""
    box = own_box(tensor) if isinstance(file, Parts) and isinstance(tensor, dtensor() or ()) else None
    if box is None or not isinstance(file, Parts):
        value, part = spread_like(file.get_tensor(key), tensor), tensor
    else:
        value, part = file.get_part(key, *box), tensor.to_local()  # type: ignore[attr-defined]
    _check_tensor(name, value, part, typed=True)
    part.copy_(value)


def _realise(model: nn.Module, values: _Values, header: Header, file: Stored) -> None:
    """Real tensors in a model that was made without weights."""
    have = dict(tables(model))
    for name in header.tables:
        if name not in have or file.shape(name) != tuple(have[name].shape):
            raise FileError(f"it holds {shown(name)}, which the model does not have, or in another shape")
    realised(model, values.beside(header.tables))
    _check_values(model)


def _check_values(model: nn.Module) -> None:
    for name, tensor in (*named_tensors(model), *tables(model)):
        if tensor.is_meta:
            raise FileError(f"it does not hold {shown(name)}; pass a model with its values, load(path, model)")


def _check_sizes(state: State, stored: dict[str, str], file: Stored) -> None:
    """Refuse what is larger than the full-size model has it, before it is unpacked into memory."""
    for name, tensor in state.tensors.items():
        if name in stored and math.prod(file.shape(stored[name])) > tensor.numel():
            sizes = f"{list(file.shape(stored[name]))[:16]} in the file, {list(tensor.shape)} in the model"
            raise FileError(f"{shown(name)} is {sizes}; {_AS_BUILT}")


def _check_shape(name: str, shape: tuple[int, ...], tensor: Tensor) -> None:
    if shape != tuple(tensor.shape):
        sizes = f"{list(shape)[:16]} in the file, {list(tensor.shape)} in the model after the cut"
        raise FileError(f"{name} is {sizes}; {_AS_BUILT}")


def _check_tensor(name: str, value: Tensor, tensor: Tensor, typed: bool) -> None:
    if tensor.is_meta and typed:
        raise FileError(f"{name} of the model is on the meta device; call model.to_empty(device=…) first")
    _check_shape(name, tuple(value.shape), tensor)
    if value.dtype != tensor.dtype and (typed or value.is_floating_point() != tensor.is_floating_point()):
        remedy = _AS_BUILT
        if value.is_floating_point() and tensor.is_floating_point():
            remedy = f"call model.to({value.dtype}) before loading, or save the model as {tensor.dtype}"
        raise FileError(f"{name} is {value.dtype} in the file, {tensor.dtype} in the model; {remedy}")
