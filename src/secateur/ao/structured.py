"""The base of the structured pruners: row masks, and biases that follow them."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from secateur.ao.chains import Patterns
from secateur.ao.config import Group
from secateur.ao.errors import SparsifierAssertionError, SparsifierRuntimeError, SparsifierTypeError
from secateur.ao.example import record, stop_recording
from secateur.ao.parametrization import BiasHook, FakeStructuredSparsity, is_called, parametrizations
from secateur.ao.removal import Reasons, Removal, remove
from secateur.ao.sparsifier import BaseSparsifier
from secateur.compat import dtensor
from secateur.distributed import is_managed


class BaseStructuredSparsifier(BaseSparsifier):
    """
    >>> class SecondRow(BaseStructuredSparsifier):
    ...     def update_mask(self, module, tensor_name, **kwargs):
    ...         module.parametrizations[tensor_name][0].mask[1] = False
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> pruner = SecondRow({})
    >>> pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    >>> pruner.step()
    >>> model(torch.ones(1, 4)).shape, model[0].parametrizations.weight[0].mask
    (torch.Size([1, 2]), tensor([ True, False,  True]))

    A sparsifier whose masks hold one value for each row (index along dim 0: output features, filters, gate
    rows), and whose `prune` removes the rows that are masked.

    While prepared, the bias of a linear or convolution layer is its parameter `_bias` and is added after the
    layer by a `BiasHook`: without the masked rows, unless the config says `"prune_bias": False`. `patterns`
    maps a chain of layers to the function that prunes it, for chains that should be treated specially.
    """

    _parametrization: ClassVar[type[nn.Module]] = FakeStructuredSparsity
    _supported: ClassVar[frozenset[type[nn.Module]]] = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM})

    def __init__(self, defaults: Mapping[str, Any] | None, patterns: Patterns | None = None) -> None:
        super().__init__(defaults)
        self.patterns = dict(patterns or {})
        self.removal = Removal()

    def prepare(self, model: nn.Module, config: Iterable[Mapping[str, Any]] | None = None) -> None:
        """Put a row mask on each tensor of `config`, or on all that are supported, in place; see `BaseSparsifier`."""
        super().prepare(model, config)
        record(model)

    def squash_mask(self, *args: Any, **kwargs: Any) -> None:
        """Multiply every mask into its tensor, at full size; see `BaseSparsifier`."""
        super().squash_mask(*args, **kwargs)
        stop_recording(self.model)

    def prune(self, *, example: Any = None, strict: bool = False) -> nn.Module:
        """Remove the masked rows, and what they fed, from the model, in place; returns the model.

        >>> class SecondRow(BaseStructuredSparsifier):
        ...     def update_mask(self, module, tensor_name, **kwargs):
        ...         module.parametrizations[tensor_name][0].mask[1] = False
        >>> pruner = SecondRow({"prune_bias": False})
        >>> pruner.prepare(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), [{"tensor_fqn": "0.weight"}])
        >>> pruner.step()
        >>> pruner.prune()
        Sequential(
          (0): Linear(in_features=4, out_features=2, bias=True)
          (1): ReLU()
          (2): Linear(in_features=2, out_features=2, bias=True)
        )
        >>> pruner.removal.removed, pruner.kept_masked
        ({'0.weight': 1}, ())

        A row goes with its channel, wherever that leads: through norms, residual sums, concatenations and
        depthwise convolutions to the layers that read it, or into an output, which then has fewer channels.
        What a masked channel still carries (its bias, through what follows) is taken into the biases of its
        readers. The pruned model then puts out what the masked one did, which is checked. Rows of which that
        cannot be had stay, as zeros; `kept_masked` says why. Two things are done as `torch.ao` does them,
        although they are not exact, and are listed in `removal.inexact`: hidden units of a recurrent layer go
        also where their biases are not masked or their gates disagree; and of a row that is off with its bias,
        or has none, nothing is carried on, also where the activation of zero is not zero. `strict=True` raises
        instead of leaving or listing anything.

        `example` is what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        Without one, the model is run as it was last called since `prepare`, or as its first layer suggests.
        Patterns go first. If anything fails, the model is as it was, masks and all.
        """
        if not self.groups:
            raise SparsifierRuntimeError("prune: nothing is prepared; call prepare(model, config) and step() first")
        self._before_removal()
        with torch.no_grad():
            self.removal = remove(self, example, strict)
        return self.model

    @property
    def kept_masked(self) -> Reasons:
        """The tensors of which `prune` had to leave masked rows, as zeros, each with the reason."""
        return self.removal.kept_masked

    def _before_removal(self) -> None:
        """Called before rows are removed."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over a saved state, as every sparsifier does; `"prune_bias"` is part of it."""
        super().load_state_dict(state_dict, strict)
        for group in self.groups:
            for hook in _bias_hooks(group).values():
                hook.prune_bias = group["module"].prune_bias = group.get("prune_bias", True)

    def _check_tensor(self, group: Group) -> None:
        if is_managed(group["module"]) or isinstance(getattr(group["module"], group["tensor_name"]), dtensor() or ()):
            raise SparsifierTypeError(
                f"{group['tensor_fqn']}: it is spread over ranks, and whole rows of it cannot be removed there; prune "
                "the model before it is sharded, or cut it with sec.apply(model, plan, shard=fn)"
            )
        if _has_row_mask(group["module"], group["tensor_name"]):
            raise SparsifierAssertionError(
                f"{group['tensor_fqn']}: its rows are masked already by another pruner; "
                "call prune() or squash_mask() on that first"
            )

    def _first_mask(self, tensor: Tensor) -> Tensor:
        return torch.ones(tensor.shape[:1], dtype=torch.bool, device=tensor.device)

    def _attach_bias(self, group: Group, parametrization: nn.Module) -> None:
        module, prune_bias = group["module"], group.get("prune_bias", True)
        if group["tensor_name"] != "weight" or getattr(module, "bias", None) is None:
            return
        if is_called(module):
            module.register_parameter("_bias", module.bias)
            module.bias = None
            module.prune_bias = prune_bias
            module.register_forward_hook(BiasHook(parametrization, prune_bias))
        elif isinstance(module, nn.Linear) and prune_bias:
            parametrize.register_parametrization(module, "bias", parametrization)

    def _detach_bias(self, group: Group) -> None:
        module = group["module"]
        for key, hook in _bias_hooks(group).items():
            bias = module._bias
            if hook.prune_bias:
                bias.data = bias.data * hook.param.mask
            del module._forward_hooks[key], module._bias, module.prune_bias
            module.bias = bias
        if group["tensor_name"] == "weight":
            squash_shared(module, "bias")


def _bias_hooks(group: Group) -> dict[int, BiasHook]:
    hooks = group["module"]._forward_hooks if group["tensor_name"] == "weight" else {}
    return {key: hook for key, hook in hooks.items() if isinstance(hook, BiasHook)}


def squash_shared(module: nn.Module, name: str) -> None:
    """Make a row mask final that a tensor shares with the weight whose rows it follows."""
    if _has_row_mask(module, name):
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def _has_row_mask(module: nn.Module, name: str) -> bool:
    return any(isinstance(p, FakeStructuredSparsity) for p in parametrizations(module, name))
