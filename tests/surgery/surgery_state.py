"""Everything that a failed cut must leave as it was, as a value that can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def tensor_state(tensor: Tensor | None) -> Any:
    """Which object it is, its bits, and what hangs on it."""
    if tensor is None:
        return None
    bits = tensor.detach().contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []
    grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.flatten().tolist())
    hooks = [list(found or {}) for found in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]
    extra = {key: id(value) for key, value in vars(tensor).items()} if isinstance(tensor, nn.Parameter) else {}
    kind = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
    return (id(tensor), kind, bits, grad, hooks, extra)


def model_state(model: nn.Module) -> Any:
    """Classes, tensors, attributes, containers, hooks and flags of every module."""
    found = []
    for name, module in model.named_modules():
        plain = {
            key: (id(value), repr(value) if isinstance(value, list | dict | tuple) else None)
            for key, value in module.__dict__.items()
            if key not in ("_parameters", "_buffers", "_modules")
        }
        tensors = {key: tensor_state(tensor) for key, tensor in (*module._parameters.items(), *module._buffers.items())}
        children = [(key, id(child)) for key, child in module._modules.items()]
        found.append((name, type(module), module.training, plain, tensors, children))
    return found


def optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    """Groups and per-parameter state, by identity and by bits."""
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = [
        (id(p), {k: (v.tolist() if isinstance(v, Tensor) else v) for k, v in entry.items()})
        for p, entry in optimizer.state.items()
    ]
    return groups, settings, state


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """The model, the optimizer, and the state of torch outside of both."""
    outside = (
        torch.get_rng_state().tolist(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.nn.functional.multi_head_attention_forward,
        torch.is_grad_enabled(),
    )
    return model_state(model), None if optimizer is None else optimizer_state(optimizer), outside
