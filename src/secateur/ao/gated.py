"""Saliency pruning of recurrent layers, whose weights pack the rows of several gates."""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from secateur.ao.chains import Patterns
from secateur.ao.config import Group, sparsity_level
from secateur.ao.errors import SparsifierAssertionError, SparsifierValueError
from secateur.ao.parametrization import find_mask, mask_of, unmasked
from secateur.ao.rows import RowPruner, keep_salient
from secateur.ao.structured import squash_shared
from secateur.errors import SecateurWarning
from secateur.prune import _compute_norm


class _GatedSaliencyPruner(RowPruner):
    """Each weight is `_gates` blocks of as many rows as the layer has hidden units."""

    _gates: ClassVar[int]

    def __init__(
        self, defaults: Mapping[str, Any] | None, patterns: Patterns | None = None, coherent: bool = False
    ) -> None:
        super().__init__(defaults, patterns)
        self.coherent = coherent
        self._warned = False

    def _saliency(self, weight: Tensor) -> Tensor:
        return _compute_norm(weight, n=1, dim=0).view(self._gates, -1)

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Mask rows of one weight, or with `coherent` hidden units of the layer that it belongs to."""
        if not self.coherent:
            super().update_mask(module, tensor_name, **kwargs)
            return
        pair = _matrices(tensor_name)
        level = sparsity_level({"tensor_fqn": tensor_name, **kwargs}, *self._levels)
        masks = [mask_of(module, name) for name in pair]
        saliency = torch.cat([self._saliency(unmasked(module, name)) for name in pair]).sum(0, keepdim=True)
        kept = torch.cat([mask.bool().view(self._gates, -1) for mask in masks]).all(0, keepdim=True)
        units = keep_salient(saliency, kept, self._count(level, saliency.shape[1]))
        for mask in masks:
            mask.copy_(units.expand(self._gates, -1).flatten())

    def _check_tensor(self, group: Group) -> None:
        super()._check_tensor(group)
        rows = getattr(group["module"], group["tensor_name"]).shape[0]
        if rows % self._gates:
            kinds = ", ".join(sorted(each.__name__ for each in self._supported))
            raise SparsifierValueError(
                f"{group['tensor_fqn']}: {rows} rows do not divide into {self._gates} gates; "
                f"{type(self).__name__} prunes the weights of {kinds}"
            )

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not self.coherent:
            return
        pair = _matrices(group["tensor_name"])
        layer = [g for g in self.groups if g["module"] is group["module"] and g["tensor_name"] in pair]
        if len(pair) < 2 or len(layer) < 2:
            raise SparsifierAssertionError(
                f"{group['tensor_fqn']}: whole hidden units are rows of a layer's weight_ih and weight_hh; "
                "put both, and nothing else of the layer, in the config"
            )
        if any(g.get("sparsity_level") != group.get("sparsity_level") for g in layer):
            raise SparsifierValueError(
                f"{group['tensor_fqn']}: {' and '.join(pair)} have different sparsity levels; "
                "they share their hidden units, give them one level"
            )

    # -- a masked unit is silent only without its bias -------------------------------------------------------

    def _attach_bias(self, group: Group, parametrization: nn.Module) -> None:
        bias = _bias_name(group["tensor_name"])
        if self.coherent and group.get("prune_bias", True) and getattr(group["module"], bias, None) is not None:
            parametrize.register_parametrization(group["module"], bias, parametrization)

    def _detach_bias(self, group: Group) -> None:
        if self.coherent:
            squash_shared(group["module"], _bias_name(group["tensor_name"]))

    # -- gates that disagree ---------------------------------------------------------------------------------

    def _after_step(self) -> None:
        self._warned = self._warned or self._warn("would join")

    def _before_removal(self) -> None:
        self._warn("joins")

    def _warn(self, joins: str) -> bool:
        """Whether there was something to warn of."""
        name = self._disagreement()
        if name is not None:
            text = f"{name}: the gates do not mask the same hidden units, and prune() {joins} gates of different units"
            warnings.warn(f"{text}; use coherent=True to mask whole units", SecateurWarning, stacklevel=4)
        return name is not None

    def _disagreement(self) -> str | None:
        """The first weight whose mask takes other hidden units in one gate, or matrix, than in another."""
        if self.coherent:
            return None
        for group in self.groups:
            masks = [find_mask(group["module"], name) for name in _matrices(group["tensor_name"])]
            gates = torch.cat([mask.view(self._gates, -1) for mask in masks if mask is not None])
            if not bool((gates == gates[0]).all()):
                return str(group["tensor_fqn"])
        return None


class LSTMSaliencyPruner(_GatedSaliencyPruner):
    """
    >>> model = nn.Sequential(nn.LSTM(3, 4))
    >>> pruner = LSTMSaliencyPruner({"sparsity_level": 0.5}, coherent=True)
    >>> pruner.prepare(model, None)
    >>> pruner.step()
    >>> model[0].parametrizations.weight_ih_l0[0].mask.view(4, 4).sum(1)
    tensor([2, 2, 2, 2])

    Masks the fraction `sparsity_level` (rounded down) of the rows of `weight_ih_l{k}` and `weight_hh_l{k}`,
    by their L1 norm, apart for each of the gates W_i | W_f | W_g | W_o, so that all gates lose equally many.

    Rows so chosen belong to other hidden units in one gate than in the next; removing them by position joins
    gates of different units. A `SecateurWarning` says so, at the first step that leads there and before
    removal. With `coherent=True` whole hidden units are masked: those with the smallest L1 norm over all
    gates and both matrices, with their biases (unless `"prune_bias": False`), so that a masked unit that
    starts from zero stays zero and can be removed exactly. Both matrices of a layer must then be configured,
    at one level.
    """

    _gates: ClassVar[int] = 4
    _supported: ClassVar[frozenset[type[nn.Module]]] = frozenset({nn.LSTM})


class GRUSaliencyPruner(_GatedSaliencyPruner):
    """
    >>> model = nn.Sequential(nn.GRU(3, 4))
    >>> pruner = GRUSaliencyPruner({"sparsity_level": 0.25}, coherent=True)
    >>> pruner.prepare(model, None)
    >>> pruner.step()
    >>> model[0].parametrizations.weight_hh_l0[0].mask.view(3, 4).sum(1)
    tensor([3, 3, 3])

    `LSTMSaliencyPruner` for the gates W_r | W_z | W_n of a GRU.
    """

    _gates: ClassVar[int] = 3
    _supported: ClassVar[frozenset[type[nn.Module]]] = frozenset({nn.GRU})


def _matrices(tensor_name: str) -> tuple[str, ...]:
    """Both matrices, input to hidden and hidden to hidden, of the layer to which one of them belongs."""
    for part in ("weight_ih", "weight_hh"):
        if tensor_name.startswith(part):
            suffix = tensor_name.removeprefix(part)
            return f"weight_ih{suffix}", f"weight_hh{suffix}"
    return (tensor_name,)


def _bias_name(tensor_name: str) -> str:
    return tensor_name.replace("weight", "bias", 1)
