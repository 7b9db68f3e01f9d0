"""Layers that become products of two: what lies in between is a new axis, the rank, which can be cut like any other.

At full rank nothing changes: one of the two holds the weight as it was, the other is the identity. So low rank is an
exact change of the model, then the best basis of the new axis (`pipeline.bases`), then an ordinary cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from secateur.errors import ApplyError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def split_layers(model: nn.Module, names: Collection[str]) -> None:
    """Make each of some layers two, in place: exact types only, and all that hold one weight together.

    >>> net = nn.Sequential(nn.Linear(3, 5))
    >>> split_layers(net, ["0"])
    >>> net
    Sequential(
      (0): Sequential(
        (0): Linear(in_features=3, out_features=3, bias=False)
        (1): Linear(in_features=3, out_features=5, bias=True)
      )
    )

    Nothing changes before all of it fits. Each stays the object that it is, so all that call it call both.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = {id(modules[name]): modules[name] for name in names if name in modules}
    for name in names:
        why = f"{type(model).__name__} has no such module" if name not in modules else why_whole(modules[name])
        if why:
            raise ApplyError(f"{name!r:.80} cannot be made a product of two layers: {why}")
    weights = {id(layer.weight) for layer in chosen.values()}
    for home, module in modules.items():
        if id(module) not in chosen and any(id(held) in weights for held in module._parameters.values()):
            raise ApplyError(f"{home} has the weight of a layer that is to become two; both have to, or none")
    for layer in chosen.values():
        _become(layer, *_two(layer))


def why_whole(layer: nn.Module) -> str:
    """Why a layer cannot be made two; nothing if it can."""
    if type(layer) not in (nn.Linear, nn.Embedding, *_CONVOLUTIONS):
        return f"it is a {type(layer).__name__}, not a plain linear layer, convolution or embedding"
    if layer._parameters.get("weight") is None:
        return "its weight is computed, not held"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse):
        return "it is an embedding with max_norm or sparse gradients"
    if isinstance(layer, nn.Embedding) and layer.num_embeddings < layer.embedding_dim:
        return "it is an embedding of fewer entries than dimensions"
    if isinstance(layer, _CONVOLUTIONS) and (layer.groups != 1 or layer.padding_mode != "zeros"):
        return "it is a convolution in groups, or padded with something else than zeros"
    return ""


def together_with(model: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """Some layers and all that share a weight with one of them, each object by its first name."""
    modules = dict(model.named_modules())
    weights = [modules[name]._parameters.get("weight") for name in names if name in modules]
    tied = (
        name
        for name, module in modules.items()
        if any(module._parameters.get("weight") is weight for weight in weights if weight is not None)
    )
    return tuple(dict.fromkeys((*names, *tied)))


def _two(layer: Any) -> tuple[nn.Module, nn.Module]:
    """Two layers that do together what one does; one of them has its weight, the other is the identity."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    outputs, inputs = weight.shape[:2]
    if isinstance(layer, nn.Embedding):
        first: Any = nn.Embedding(outputs, inputs, layer.padding_idx, device="meta")
        first.__dict__.update(scale_grad_by_freq=layer.scale_grad_by_freq)
        return _with(first, weight), _with(_linear(inputs, inputs), _identity(layer, inputs))
    early = inputs <= outputs and math.prod(weight.shape[2:]) == 1  # the identity comes first
    rank = inputs if early else outputs
    one, other = _identity(layer, rank), weight
    if isinstance(layer, nn.Linear):
        first, second = _linear(inputs, rank), _linear(rank, outputs)
    else:
        kind: Any = type(layer)
        how = {key: getattr(layer, key) for key in ("stride", "padding", "dilation")}
        first = kind(inputs, rank, layer.kernel_size, **how, bias=False, device="meta")
        second = kind(rank, outputs, 1, bias=False, device="meta")
        one = nn.Parameter(one[(...,) + (None,) * (weight.ndim - 2)].detach(), requires_grad=weight.requires_grad)
    return _with(first, one if early else other), _with(second, other if early else one, bias)


def _linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False, device="meta")


def _identity(layer: Any, size: int) -> nn.Parameter:
    weight = layer.weight
    eye = torch.eye(size, dtype=weight.dtype, device=weight.device)
    return nn.Parameter(eye, requires_grad=weight.requires_grad)


def _with(layer: Any, weight: nn.Parameter, bias: nn.Parameter | None = None) -> Any:
    layer._parameters["weight"] = weight
    if bias is not None:
        layer._parameters["bias"] = bias
    return layer


def _become(layer: nn.Module, first: nn.Module, second: nn.Module) -> None:
    """Make a layer the sequence of two, with the hooks and the mode that it has."""
    own: Mapping[str, Any] = nn.Sequential(first, second).train(layer.training).__dict__
    for key in [key for key in layer.__dict__ if key not in own]:
        del layer.__dict__[key]  # what it says of widths is said by the two
    layer.__dict__.update({key: own[key] for key in ("_parameters", "_buffers", "_modules")})
    layer.__class__ = nn.Sequential


__all__ = ["split_layers", "together_with", "why_whole"]
