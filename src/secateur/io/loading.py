"""Load what `save` wrote into a model of full size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secateur.apply import plan_of, remember
from secateur.errors import FileError, SecateurError
from secateur.io.file import Header, about, class_name, opened
from secateur.io.state import State, set_extra
from secateur.plan.json import shown
from secateur.surgery import Cut
from secateur.surgery.bias import add_biases, check_biases
from secateur.trace import unwrap
from secateur.trace.held import Snapshot

Model = TypeVar("Model", bound=nn.Module)
_AS_BUILT = "build the model as it was built when it was saved"


def load(path: str | os.PathLike[str], model: Model) -> Model:
    """Load a file that `save` wrote into a freshly built, full-size model, in place; returns the model.

    >>> import tempfile
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
    with about(path) as source, opened(source) as file:
        inner = unwrap(model)
        header = Header.read(file.metadata())
        _check_model(inner, header)
        _Loading(inner).carry_out(header, file)
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


class _Loading:
    """A cut and new values for a model, all or nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._snapshot = Snapshot(model)
        state = State.of(model)
        self._full = {id(tensor): tensor for tensor in state.tensors.values()}
        self._extra = {name: value.clone() for name, value in state.extra.items()}
        self._overwritten: list[tuple[Tensor, Tensor]] = []  # the model's own tensors, and the values they had
        self._cut: Cut | None = None

    def carry_out(self, header: Header, file: Any) -> None:
        try:
            add_biases(self._model, header.biases)
            stored = _matched(State.of(self._model), header, set(file.keys()))
            values = {name: file.get_tensor(key) for name, key in stored.items()}  # mapped, not yet read
            if header.plan is not None:
                self._cut = Cut(self._model, header.plan)
                remember(self._model, header.plan)
            check_biases(self._model, header.biases)
            state = State.of(self._model)
            for name, tensor in state.tensors.items():
                if name in values:
                    _check_tensor(name, values[name], tensor)
            self._fill(state, values)
        except BaseException as error:
            self._undo()
            if isinstance(error, SecateurError) or not isinstance(error, Exception):
                raise
            # Sizes that contradict each other, or a set_extra_state, fail in ways of their own.
            raise FileError(f"it cannot be loaded: {type(error).__name__}: {error}; {_AS_BUILT}") from error

    @torch.no_grad()
    def _fill(self, state: State, values: Mapping[str, Tensor]) -> None:
        for name, tensor in state.tensors.items():
            if name in values:
                if id(tensor) in self._full:
                    self._overwritten.append((tensor, tensor.clone()))
                tensor.copy_(values[name])
        for name in state.extra:
            set_extra(self._model, name, values[name].clone())

    @torch.no_grad()
    def _undo(self) -> None:
        for name, value in self._extra.items():
            with contextlib.suppress(Exception):  # the user's code; what it holds is put back below
                set_extra(self._model, name, value)
        if self._cut is not None:
            self._cut.undo()
        self._snapshot.restore()
        for tensor, value in self._overwritten:
            with contextlib.suppress(RuntimeError):  # one that takes no new values has its own still
                tensor.copy_(value)


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
