"""Cut a model that is spread over ranks: its shapes first, on the meta device; then its tensors, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.distributed import Undressed, meet, spread_like, whole
from secateur.errors import ApplyError, SecateurError, VerifyError
from secateur.planning.plans import Kept, Plan
from secateur.state.transaction import transaction
from secateur.surgery import carry_out
from secateur.surgery.cut import select
from secateur.surgery.holders import tell_of_new
from secateur.tracing import trace

Shard = Callable[[Any], object]


def apply_sharded(
    model: nn.Module, plan: Plan, shard: Shard, optimizer: torch.optim.Optimizer | None, verify: bool
) -> None:
    """Cut a sharded model in place and shard it anew; every rank calls this. All or nothing, on every rank."""
    device = next((_device(tensor) for tensor in model.parameters()), torch.device("cpu"))
    undressed = Undressed.of(model)
    try:
        with transaction(model):
            carry_out(model, plan)
            if verify and plan.axes and plan.example is not None:
                _check_runs(model, plan)
            meet("apply: sharding anew")
            _shard(model, shard, device)
            new = _filled(model, undressed.tensors, plan)
            follow = None if optimizer is None else _following(optimizer, new, plan, undressed.tensors)
            meet("apply: done")  # on every rank, or on none
            if follow is not None:
                follow()
    except BaseException:
        undressed.restore()
        raise
    tell_of_new({name: tensor for name, tensor in undressed.tensors.items() if isinstance(tensor, nn.Parameter)})


def _device(tensor: Tensor) -> torch.device:
    return tensor.to_local().device if hasattr(tensor, "to_local") else tensor.device


def _check_runs(model: nn.Module, plan: Plan) -> None:
    """The cut model, without values, must run on the example and take as many multiply-accumulates as was planned."""
    try:
        found = trace(model, plan.example, variants=False).macs()
    except SecateurError as error:
        raise VerifyError(f"the cut model does not run on the example: {error}. The model is as it was.") from error
    if found != plan.macs.after:
        raise VerifyError(
            f"the cut model takes {found:,} multiply-accumulates on the example, but {plan.macs.after:,} were planned. "
            "The model is as it was."
        )


def _shard(model: nn.Module, shard: Shard, device: torch.device) -> None:
    """Have the user's function shard a model without values, then make room for these."""
    tied = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
    made = shard(model)
    if made is not None and made is not model:
        raise ApplyError(
            f"shard= gave back another {type(made).__name__}; it shards a model in place, such as "
            "shard=lambda model: fully_shard(model)"
        )
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    for registry, _ in buffers:
        registry.clear()  # these have their values
    model.to_empty(device=device)
    for registry, held in buffers:
        registry.update(held)
    now = dict(model.named_parameters(remove_duplicate=False))
    firsts: dict[int, str] = {}
    for name, before in tied.items():
        first = firsts.setdefault(before, name)
        if now[name] is not now[first]:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._parameters[key] = now[first]


def _filled(model: nn.Module, old: Mapping[str, Tensor], plan: Plan) -> dict[str, nn.Parameter]:
    """Move the values of each parameter, and of its gradient, into the new shards; the new parameters by name."""
    new = dict(model.named_parameters())
    for name, param in new.items():
        kept = plan.kept.get(name, {})
        with torch.no_grad():
            param.copy_(_moved(old[name], kept, param))
        if old[name].grad is not None:
            param.grad = _moved(old[name].grad, kept, param)  # type: ignore[arg-type]
    return new


def _moved(tensor: Tensor, kept: Kept, like: Tensor) -> Tensor:
    """What stays of a tensor, spread as another one is."""
    with torch.no_grad():
        return spread_like(select(whole(tensor), kept), like)


def _following(
    optimizer: torch.optim.Optimizer, new: Mapping[str, Tensor], plan: Plan, old: Mapping[str, Tensor]
) -> Callable[[], None]:
    """What makes an optimizer go on with the new parameters, with what it remembers of the old ones cut along."""
    names = {id(old[name]): name for name in new}
    groups, state = [], {}
    for group in optimizer.param_groups:
        groups.append([new[names[id(param)]] if id(param) in names else param for param in group["params"]])
        for param in group["params"]:
            name = names.get(id(param))
            if name is None or param not in optimizer.state:
                continue
            entry = optimizer.state[param]
            state[param] = (
                new[name],
                {
                    key: _moved(value, plan.kept.get(name, {}), new[name])
                    if isinstance(value, Tensor) and value.shape == param.shape and value.dim()
                    else value
                    for key, value in entry.items()
                },
            )

    def follow() -> None:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        for param, (successor, entry) in state.items():
            del optimizer.state[param]
            optimizer.state[successor] = entry

    return follow


__all__ = ["apply_sharded"]
