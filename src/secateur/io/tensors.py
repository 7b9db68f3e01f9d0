"""What of a model goes into a file: parameters, persistent buffers, and extra state that is a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.errors import FileError
from secateur.state.held import Place, Walk

_EXTRA = "_extra_state"  # what a state dict calls the result of `get_extra_state`


@dataclass(frozen=True, eq=False)
class State:
    """A model's tensors by their names in the state dict: no copies, and tied ones under each of their names.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> State.of(nn.Sequential(layer, nn.ReLU(), layer)).groups()
    [('0.weight', '2.weight')]
    """

    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Tensor]

    @staticmethod
    def of(model: nn.Module) -> State:
        """The state of a model; refused where there is more to it than tensors that can be put back."""
        tensors = dict(_persistent(model))
        extra = {name: value for name, value in model.state_dict().items() if name not in tensors}
        for name, value in extra.items():
            if name.rpartition(".")[2] != _EXTRA or not isinstance(value, Tensor):
                what = f"{name} in the state dict of {type(model).__name__} is a {type(value).__name__}"
                raise FileError(f"{what}, no parameter and no buffer, which a file cannot hold; make it a buffer")
        return State(tensors, extra)

    def groups(self) -> list[tuple[str, ...]]:
        """The names of each tensor, those of a tied one together."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), []).append(name)
        return [tuple(group) for group in names.values()]

    def names(self) -> set[str]:
        return {*self.tensors, *self.extra}


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for owner, module in model.named_modules(remove_duplicate=False):
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    yield f"{owner}.{name}" if owner else name, tensor


def set_extra(model: nn.Module, name: str, value: Tensor) -> None:
    """Hand a module its extra state."""
    model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put values where a model has tensors, or extra state, of their names."""
    state = State.of(model)
    for name, tensor in state.tensors.items():
        if name in values:
            tensor.copy_(values[name])
    for name in state.extra:
        if name in values:
            set_extra(model, name, values[name].clone())


def realised(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a model that was made without weights tensors of these values; what is one tensor stays one."""
    new: dict[int, tuple[Tensor, Tensor]] = {}  # of each that is replaced, which is kept so that its id stays its own
    for owner, module in model.named_modules():
        for registered in (module._parameters, module._buffers):
            for key, tensor in registered.items():
                name = f"{owner}.{key}".lstrip(".")
                if tensor is not None and name in values and id(tensor) not in new:
                    new[id(tensor)] = tensor, _like(tensor, values[name])
                if tensor is not None and id(tensor) in new:
                    registered[key] = new[id(tensor)][1]

    def change(value: object, place: Place) -> object:
        if isinstance(value, Tensor) and str(place) in values:
            return values[str(place)].clone()
        return new[id(value)][1] if id(value) in new else value

    Walk(model).replace(change)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """A tensor of a value, which is a parameter if the other is one."""
    made = value.clone()
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(
            made, requires_grad=tensor.requires_grad and (made.is_floating_point() or made.is_complex())
        )
        made.__dict__.update(tensor.__dict__)
    return made
