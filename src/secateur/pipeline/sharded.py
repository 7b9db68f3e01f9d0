"""Cut a model that is spread over ranks: its shapes first, on the meta device; then its tensors, one at a time.

What runs it on data has it whole on every rank meanwhile. In either case the user's own function shards the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate.blame import check_values
from secateur.distributed import Undressed, emptied, is_sharded, meet, spread_like, whole
from secateur.errors import ApplyError, VerifyError
from secateur.planning.plans import Kept, Plan
from secateur.state.transaction import transaction
from secateur.state.twin import copied
from secateur.surgery import carry_out
from secateur.surgery.cut import select
from secateur.surgery.holders import tell_of_new
from secateur.tracing import unwrap
from secateur.verify.beside import prove

Shard = Callable[[Any], object]
_SHARD = (
    "shard= is the function that sharded the model (lambda model: fully_shard(model)), for a model that is spread over "
    "ranks"
)


def unwrapped(model: Any, shard: object, what: str = "") -> nn.Module:
    """The model inside of a wrapper; refused if it is spread over ranks and `shard` is not the function that did it, or
    if it has no values and `what` needs these."""
    inner = unwrap(model, sharded=shard is not None)
    if shard is not None and not (callable(shard) and is_sharded(inner)):
        raise ApplyError(_SHARD)
    if what:
        check_values(inner, inner.parameters(), what)
    return inner


@contextmanager
def sharded_anew(
    model: nn.Module,
    shard: Shard | None,
    plan: Plan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    values: bool = True,
) -> Iterator[Mapping[str, Tensor]]:
    """Inside, a model is as it was before it was sharded, its parameters whole on every rank, or without `values`; at
    the end it is sharded anew, on every rank or on none. Gradients and the state of an optimizer follow a plan that is
    carried out inside. Gives the tensors that it had. Every rank calls this; without `shard`, nothing is done."""
    if shard is None:
        yield {}
        return
    device = next((_device(tensor) for tensor in model.parameters()), torch.device("cpu"))
    undressed = Undressed.of(model, parameters=values, buffers=True)
    old = undressed.tensors
    try:
        with transaction(model) as undo:
            undo.keep(*model.buffers())
            yield old
            meet("sharding anew")
            made = emptied(model) if values else {}
            shard_empty(model, shard, device)
            kept = {} if plan is None else plan.kept
            new = dict(model.named_parameters())
            for name, param in new.items():
                value = made.pop(name) if values else select(whole(old[name]), kept.get(name, {}))
                with torch.no_grad():
                    param.copy_(spread_like(value, param))
                was = None if plan is None else old.get(plan.removed.before(name))
                if was is not None and was.grad is not None:
                    param.grad = _moved(was.grad, kept.get(name, {}), param)
            follow = None if optimizer is None or plan is None else _following(optimizer, new, plan, old)
            meet("sharded anew")  # on every rank, or on none
            if follow is not None:
                follow()
    except BaseException:
        undressed.restore()
        raise
    tell_of_new({name: tensor for name, tensor in old.items() if isinstance(tensor, nn.Parameter)})


def cut_shapes(model: nn.Module, plan: Plan, old: Mapping[str, Tensor], verify: bool) -> None:
    """Cut a model without values, and prove that right with those that it had, one at a time."""

    def value(name: str) -> Tensor:
        return whole(old[name])

    before = _copy(model) if verify and plan.example is not None else None
    carry_out(model, plan)
    if before is not None:
        prove(before, model, plan, (value, lambda name: select(value(name), plan.kept.get(name, {}))))


def _copy(model: nn.Module) -> nn.Module:
    """The model without values, to look back at after the cut."""
    try:
        return copied(model, lambda _: True)
    except Exception as error:  # any code of the user's may run here
        what = f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}"
        raise VerifyError(f"the cut is proved on a copy, and {what}; pass verify=False to go without") from error


def _device(tensor: Tensor) -> torch.device:
    return tensor.to_local().device if hasattr(tensor, "to_local") else tensor.device


def shard_empty(model: nn.Module, shard: Shard, device: torch.device | None = None) -> None:
    """Have the user's function shard a model without values, then make room for these, where the mesh is if not told.

    Buffers stay as they are.
    """
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
    model.to_empty(device=device or _mesh_device(model))
    for registry, held in buffers:
        registry.update(held)
    now = dict(model.named_parameters(remove_duplicate=False))
    if other := next(iter(now.keys() ^ tied.keys()), None):
        raise ApplyError(f"shard= changed more than how tensors are spread: the model had or now has {other}")
    firsts: dict[int, str] = {}
    for name, before in tied.items():
        first = firsts.setdefault(before, name)
        if now[name] is not now[first]:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._parameters[key] = now[first]


def _mesh_device(model: nn.Module) -> torch.device:
    """The device of the mesh that some parameter is spread over."""
    kinds = [param.device_mesh.device_type for param in model.parameters() if hasattr(param, "device_mesh")]
    if not kinds:
        raise ApplyError(
            "shard= left no parameter spread over ranks; it is the function that calls fully_shard or "
            "parallelize_module on the model"
        )
    return torch.device(kinds[0])


def _moved(tensor: Tensor, kept: Kept, like: Tensor) -> Tensor:
    """What stays of a tensor, spread as another one is."""
    with torch.no_grad():
        return spread_like(select(whole(tensor), kept), like)


def _following(
    optimizer: torch.optim.Optimizer, new: Mapping[str, Tensor], plan: Plan, old: Mapping[str, Tensor]
) -> Callable[[], None]:
    """What makes an optimizer go on with the new parameters, with what it remembers of the old ones cut along."""
    names = {id(old[was]): name for name in new if (was := plan.removed.before(name)) in old}
    gone = set(map(id, old.values())) - set(names)  # with their blocks
    groups, state = [], {}
    for group in optimizer.param_groups:
        left = [param for param in group["params"] if id(param) not in gone]
        groups.append([new[names[id(param)]] if id(param) in names else param for param in left])
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
        for param in [param for param in optimizer.state if id(param) in gone]:
            del optimizer.state[param]
        for param, (successor, entry) in state.items():
            del optimizer.state[param]
            optimizer.state[successor] = entry

    return follow


__all__ = ["Shard", "cut_shapes", "shard_empty", "sharded_anew", "unwrapped"]
