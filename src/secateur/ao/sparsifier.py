"""The base of all sparsifiers: masks are attached to tensors, updated, saved, and made final."""

import abc
import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from secateur.ao import conversion
from secateur.ao.config import Group, get_arg_info_from_tensor_fqn, make_groups, module_to_fqn
from secateur.ao.errors import (
    SparsifierAssertionError,
    SparsifierAttributeError,
    SparsifierError,
    SparsifierKeyError,
    SparsifierRuntimeError,
    SparsifierTypeError,
    SparsifierValueError,
)
from secateur.ao.gates import suffixes
from secateur.ao.parametrization import FakeSparsity, find_mask
from secateur.compat import dtensor
from secateur.distributed import at_rest, moved
from secateur.state.transaction import transaction

_NOT_SAVED = frozenset({"module", "module_fqn", "tensor_name"})


class TensorState(dict[str, Any]):
    """
    >>> TensorState(mask=torch.ones(2)) == TensorState(mask=torch.ones(2))
    True

    What a sparsifier remembers of one tensor; a dict that can be compared although it holds tensors.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict) or self.keys() != other.keys():
            return False
        return all(
            torch.equal(value, other[key])
            if isinstance(value, Tensor) and isinstance(other[key], Tensor)
            else bool(value == other[key])
            for key, value in self.items()
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


class _Hooks:
    """What a kind of sparsifier may add to the common course of events."""

    def _check_tensor(self, group: Group) -> None:
        """Raise if the group's tensor cannot be masked in this way. Asked before masks are attached."""

    def _check(self, group: Group) -> None:
        """Raise if the group's settings make no sense. Asked before masks are attached and before a step."""

    def _attach_bias(self, group: Group, parametrization: nn.Module) -> None:
        """Let the bias follow the mask that was just attached to its weight."""

    def _detach_bias(self, group: Group) -> None:
        """Make final what `_attach_bias` did, just before the weight's mask is."""

    def _after_step(self) -> None:
        """Called when all masks are updated."""


class BaseSparsifier(_Hooks, abc.ABC):
    """
    >>> class FirstRow(BaseSparsifier):
    ...     def update_mask(self, module, tensor_name, **kwargs):
    ...         module.parametrizations[tensor_name][0].mask[0] = 0
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> sparsifier = FirstRow()
    >>> sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> sparsifier.step()
    >>> model[0].parametrizations.weight[0].mask
    tensor([[0., 0.],
            [1., 1.]])
    >>> sparsifier.squash_mask()

    `prepare` puts a mask on tensors of a model, `step` lets `update_mask` change each mask, `squash_mask`
    multiplies the masks into the tensors for good. A subclass writes `update_mask`.

    `defaults` holds settings that every tensor gets unless its config entry says otherwise. `groups` is the
    list of configured tensors, each a dict: "tensor_fqn", "module", "module_fqn", "tensor_name" and the
    settings. `state` maps a tensor's name to what is remembered of it, its "mask" among others.
    Any call that raises leaves the model and the sparsifier as they were.
    """

    _parametrization: ClassVar[type[nn.Module]] = FakeSparsity
    _supported: ClassVar[frozenset[type[nn.Module]]] = frozenset({nn.Linear})

    model: nn.Module
    config: Iterable[Mapping[str, Any]]

    def __init__(self, defaults: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if not isinstance(defaults, Mapping | None):
            raise SparsifierAssertionError(
                f"{type(self).__name__}: defaults is a {type(defaults).__name__}; pass a dict of settings"
            )
        self.defaults: dict[str, Any] = copy.deepcopy(dict(defaults or {}))
        self.state: dict[str, TensorState] = defaultdict(TensorState)
        self.groups: list[Group] = []
        self.enable_mask_update = True
        self._step_count = 0

    @abc.abstractmethod
    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Change the mask of one tensor in place. `kwargs` are the other entries of its group."""

    def step(self, use_path: bool = True) -> None:
        """Update every mask, or none of them if `enable_mask_update` is off. `use_path` has no effect."""
        self._step_count += 1
        if not self.enable_mask_update:
            return
        masks = (find_mask(group["module"], group["tensor_name"]) for group in self.groups)
        with torch.no_grad(), transaction(self) as undo:
            undo.keep(*(mask for mask in masks if mask is not None))
            for group in self.groups:
                self._check(group)
            for group in self.groups:
                self.update_mask(**group)
            self._after_step()

    # -- attaching -------------------------------------------------------------------------------------------

    def make_config_from_model(
        self,
        model: nn.Module,
        SUPPORTED_MODULES: Iterable[type[nn.Module]] | None = None,  # noqa: N803
    ) -> None:
        """Set `config` to the weights of all modules whose type is supported (nn.Linear, if not said)."""
        supported = self._supported if SUPPORTED_MODULES is None else frozenset(SUPPORTED_MODULES)
        found: dict[nn.Module, None] = {model: None} if type(model) in supported else {}
        stack = [] if found else [model]
        while stack:
            for child in stack.pop().children():
                if type(child) in supported:
                    found.setdefault(child)
                else:
                    stack.append(child)
        self.config = [
            {"tensor_fqn": f"{module_to_fqn(model, module)}.{name}".removeprefix(".")}
            for module in found
            for name in _weight_names(module)
        ]

    def prepare(self, model: nn.Module, config: Iterable[Mapping[str, Any]] | None = None) -> None:
        """Put a mask of ones on each tensor of `config`, or on all that are supported, in place.

        An entry names its tensor by "tensor_fqn", or by "module" (or "module_fqn") and "tensor_name", and may
        override any default. "mask" gives a first mask, "parametrization" another class to apply it.
        """
        if not isinstance(model, nn.Module):
            raise SparsifierTypeError(f"prepare: the model is a {type(model).__name__}; pass a torch.nn.Module")
        if not isinstance(config, Iterable | None):
            raise SparsifierTypeError(f"prepare: the config is a {type(config).__name__}; pass a list of dicts")
        with transaction(model, self):
            if config is None:
                self.make_config_from_model(model)
            else:
                self.config = list(config)
            groups = make_groups(model, self.config, self.defaults)
            self._check_free(groups)
            self.model = model
            names = {group["tensor_fqn"] for group in groups}
            self.groups = [group for group in self.groups if group["tensor_fqn"] not in names] + groups
            for group in groups:
                self._check_tensor(group)
                self._check(group)
            for group in groups:
                self.state[group["tensor_fqn"]] = TensorState(mask=self._attach(group))
            self._tell()

    def _check_free(self, groups: list[Group]) -> None:
        names = {group["tensor_fqn"] for group in groups}
        for group in self.groups:
            if group["tensor_fqn"] in names and find_mask(group["module"], group["tensor_name"]) is not None:
                raise SparsifierAssertionError(
                    f"{group['tensor_fqn']}: already prepared by this sparsifier; call squash_mask() first, "
                    "or use another sparsifier"
                )

    def _first_mask(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, dtensor() or ()):  # spread over ranks: its mask is whole on each
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return torch.ones_like(tensor, requires_grad=False)

    def _attach(self, group: Group, mask: Tensor | None = None) -> Tensor:
        """Put a mask on the group's tensor; returns it."""
        module, name, fqn = group["module"], group["tensor_name"], group["tensor_fqn"]
        at_rest(module)
        mask = group.get("mask") if mask is None else mask
        first = self._first_mask(getattr(module, name))
        if mask is not None and not isinstance(mask, Tensor):
            raise SparsifierTypeError(f"{fqn}: the mask is a {type(mask).__name__}; pass a torch.Tensor")
        mask = first if mask is None else mask.detach().clone().to(first.device)
        try:
            parametrization = group.get("parametrization", self._parametrization)(mask)
            parametrize.register_parametrization(module, name, parametrization)
            self._attach_bias(group, parametrization)
        except SparsifierError as error:
            raise type(error)(f"{fqn}: {error}") from error
        except Exception as error:
            raise SparsifierValueError(f"{fqn}: the mask cannot be attached: {error}") from error
        return getattr(parametrization, "mask", mask)

    def _tell(self) -> None:
        """Let FSDP2 know where the tensors are that masks were put on."""
        for group in self.groups:
            module, name = group["module"], group["tensor_name"]
            if parametrize.is_parametrized(module, name):
                moved((module, name), (module.parametrizations[name], "original"))

    # -- making masks final ----------------------------------------------------------------------------------

    def squash_mask(
        self,
        params_to_keep: tuple[str, ...] | None = None,
        params_to_keep_per_layer: Mapping[str, tuple[str, ...]] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Multiply every mask into its tensor and take the parametrization off.

        Settings named in `params_to_keep`, or for a module's name in `params_to_keep_per_layer`, are kept in
        a dict `sparse_params` on the module.
        """
        kept = [_kept_params(group, params_to_keep, params_to_keep_per_layer) for group in self.groups]
        for group in self.groups:
            if not parametrize.is_parametrized(group["module"], group["tensor_name"]):
                raise SparsifierValueError(
                    f"{group['tensor_fqn']}: carries no mask, so there is nothing to squash; "
                    "call prepare() before squash_mask(), and squash_mask() once"
                )
        with transaction(*{id(group["module"]): group["module"] for group in self.groups}.values()):
            for group, sparse_params in zip(self.groups, kept, strict=True):
                self._make_final(group)
                if sparse_params:
                    group["module"].sparse_params = sparse_params

    def _make_final(self, group: Group) -> None:
        """Multiply one mask into its tensor for good."""
        module, name = group["module"], group["tensor_name"]
        self._detach_bias(group)
        _take_off(module, name)
        if isinstance(module, nn.RNNBase):
            setattr(module, name, getattr(module, name))  # its list of weights would hold the masked copy for a while
            module.flatten_parameters()

    def convert(
        self,
        module: nn.Module,
        mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
        inplace: bool = False,
        parameterization: type[nn.Module] = FakeSparsity,
    ) -> nn.Module:
        """Exchange the masked modules inside `module` for `mapping[type].from_dense(masked module)`.

        Works on a copy unless `inplace`. Masked means: carrying a parametrization of type `parameterization`.
        """
        return conversion.convert(module, mapping, inplace, parameterization)

    # -- saving ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs: "groups" without their modules, and "state" with the masks.

        As with a module's state_dict, the tensors are those in use, not copies.
        """
        state = {name: dict(entry) for name, entry in self.state.items()}
        for group in self.groups:
            mask = find_mask(group["module"], group["tensor_name"])
            if mask is not None and group["tensor_fqn"] in state:
                state[group["tensor_fqn"]]["mask"] = mask
        groups = [{key: value for key, value in group.items() if key not in _NOT_SAVED} for group in self.groups]
        return {"state": state, "groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over masks, groups and state that `state_dict` returned, for the model given to `prepare`.

        Masks are copied onto the model's, or attached where it has none. With `strict=False` tensors that the
        model lacks are passed over.
        """
        if not hasattr(self, "model"):
            raise SparsifierAttributeError("load_state_dict: no model yet; call prepare(model, config) first")
        if not isinstance(state_dict, Mapping) or not {"state", "groups"} <= state_dict.keys():
            raise SparsifierKeyError("load_state_dict: no 'state' or no 'groups'; pass what state_dict() returned")
        saved = {name: TensorState(entry) for name, entry in state_dict["state"].items()}
        groups = copy.deepcopy(list(state_dict["groups"]))
        if any("tensor_fqn" not in group for group in groups):
            raise SparsifierKeyError("load_state_dict: a group has no 'tensor_fqn'; pass what state_dict() returned")
        settings = {str(group["tensor_fqn"]): group for group in groups}
        with transaction(self.model, self):
            places = self._find_places(saved.keys() | settings.keys(), strict)
            self.groups = [{**group, **places[name]} for name, group in settings.items() if name in places]
            self.state = defaultdict(TensorState)
            for name, entry in saved.items():
                if name in places:
                    self.state[name] = self._load_mask({**settings.get(name, {}), **places[name]}, entry)
            self._tell()

    def _find_places(self, names: Iterable[str], strict: bool) -> dict[str, Group]:
        places = {}
        for name in names:
            place = get_arg_info_from_tensor_fqn(self.model, name)
            if isinstance(place["module"], nn.Module) and hasattr(place["module"], place["tensor_name"]):
                places[name] = place
            elif strict:
                raise SparsifierRuntimeError(
                    f"{name}: in the saved state, but not in the model; load into the same architecture, "
                    "or pass strict=False to pass it over"
                )
        return places

    def _load_mask(self, group: Group, entry: TensorState) -> TensorState:
        loaded = entry.get("mask")
        if loaded is None:
            return entry
        name = group["tensor_fqn"]
        current = find_mask(group["module"], group["tensor_name"])
        expected = self._first_mask(getattr(group["module"], group["tensor_name"])) if current is None else current
        if not isinstance(loaded, Tensor) or loaded.shape != expected.shape:
            shape = tuple(loaded.shape) if isinstance(loaded, Tensor) else type(loaded).__name__
            raise SparsifierRuntimeError(
                f"{name}: the saved mask is {shape} and the model's {tuple(expected.shape)}; "
                "load into a model of the same shape"
            )
        if current is None:
            current = self._attach(group, mask=loaded)
        else:
            current.data = loaded.detach().clone().to(current.device)
        return TensorState(entry, mask=current)

    def __repr__(self) -> str:
        text = f"{type(self).__name__} ("
        for index, group in enumerate(self.groups):
            text += f"\n\tGroup {index}\n\t    module: {group['module']}\n"
            text += "".join(f"\t    {key}: {group[key]}\n" for key in sorted(group) if key != "module")
        return text + ")"


def _take_off(module: nn.Module, name: str) -> None:
    """Leave a tensor with its mask multiplied in, in its own memory where it is spread over ranks."""
    masks: Any = module.parametrizations[name]  # type: ignore[index]
    at_rest(masks)
    original = masks.original
    spread = isinstance(original, dtensor() or ())
    if spread:
        original.detach().copy_(getattr(module, name).detach())
    parametrize.remove_parametrizations(module, name, leave_parametrized=not spread)
    moved((masks, "original"), (module, name))


def _weight_names(module: nn.Module) -> list[str]:
    if isinstance(module, nn.RNNBase):
        return [f"weight_{part}{suffix}" for suffix in suffixes(module) for part in ("ih", "hh")]
    return ["weight"]


def _kept_params(
    group: Group, everywhere: Iterable[str] | None, per_layer: Mapping[str, Iterable[str]] | None
) -> dict[str, Any]:
    wanted = [*(everywhere or ()), *((per_layer or {}).get(group["module_fqn"]) or ())]
    for key in wanted:
        if key not in group:
            raise SparsifierKeyError(
                f"{group['tensor_fqn']}: no setting {key!r} to keep; it has {', '.join(sorted(group))}"
            )
    return {key: group[key] for key in wanted}
