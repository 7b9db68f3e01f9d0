"""Those outside of a model who hold its tensors: another model, an optimizer, a wrapper that shares out gradients."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.errors import ApplyError
from secateur.planning.plans import Plan
from secateur.state.held import named_tensors

T = TypeVar("T")
_SHAPES = WeakTensorKeyDictionary()  # {a parameter that was cut: the shapes that it had}
_GONE = WeakTensorKeyDictionary()  # {a parameter that a model no longer has: its name}


def check_alone(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that cuts tensors which another model holds too: it would no longer run."""
    names = {id(tensor): name for name, tensor in named_tensors(model) if plan.removed.after(name) in plan.kept}
    if not _others_hold(model, names) or _elsewhere(model, names) is None:
        return
    gc.collect()  # it may be gone already, but for a cycle
    if (found := _elsewhere(model, names)) is not None:
        raise ApplyError(
            f"{found[0]} is held by a {found[1]} outside of {type(model).__name__} too, which the cut would break; "
            "cut the model that both are part of, let go of the other, or give it a copy of its own"
        )


def _others_hold(model: nn.Module, names: Mapping[int, str]) -> bool:
    """Whether anything but the model refers to one of some tensors: if not, nobody has to be looked for."""
    held = [tensor for _, tensor in named_tensors(model) if id(tensor) in names]  # once for each registry that has it
    times = Counter(map(id, held))
    # Beside the registries and this list, the variable of the loop and the call itself refer to it.
    return any(sys.getrefcount(tensor) > 2 * times[id(tensor)] + 2 for tensor in held)


def _elsewhere(model: nn.Module, names: Mapping[int, str]) -> tuple[str, str] | None:
    """A tensor that a module outside of the model holds, and the kind of that module."""
    own = set(map(id, model.modules()))
    for module in _living(nn.Module):
        if id(module) not in own:
            for registry in ("_parameters", "_buffers"):
                for tensor in tuple((module.__dict__.get(registry) or {}).values()):
                    if id(tensor) in names:
                        return names[id(tensor)], type(module).__name__
    return None


def tell_holders(model: nn.Module, plan: Plan) -> None:
    """After a cut: whoever remembers tensors as they were says so when asked to go on, instead of computing wrongly.

    Graphs recorded before cannot be run backward any more. An optimizer that was not passed refuses a step as long as
    its state has the old shapes. A `DistributedDataParallel` from before, whose buckets have them, refuses to train.
    """
    cut = {id(tensor): plan.shapes[name] for name, tensor in named_tensors(model) if name in plan.kept}
    for name, tensor in named_tensors(model):
        if name in plan.kept:
            _SHAPES.setdefault(tensor, set()).add(tuple(plan.shapes[name]))
            with suppress(RuntimeError):  # one made for inference, which no graph keeps
                torch.autograd.graph.increment_version(tensor)
    _watch_steps()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for wrapper in _living(DistributedDataParallel):
            laid_out = [(p, tuple(cut[id(p)])) for p in wrapper.parameters() if id(p) in cut]
            if laid_out:
                wrapper.register_forward_pre_hook(partial(_check_buckets, laid_out))


def tell_of_new(old: Mapping[str, Tensor]) -> None:
    """After a cut that had to make new parameters: an optimizer that still has the old ones refuses a step."""
    for name, tensor in old.items():
        _GONE[tensor] = name
    _watch_steps()


def _living(kind: type[T]) -> Iterator[T]:
    return (obj for obj in gc.get_objects() if issubclass(type(obj), kind))


@cache
def _watch_steps() -> None:
    """Once: look at each optimizer before it takes a step. Fused ones do not compare shapes, and read what is there."""
    register_optimizer_step_pre_hook(_check_state)


def _check_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for i, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        if param in _GONE:
            raise ApplyError(
                f"{_GONE[param]} in this {type(optimizer).__name__} is no longer that of the model, which was cut and "
                "sharded anew; pass the optimizer to the cut (optimizer=…), or make a new one"
            )
        before = _SHAPES.get(param)
        entry = None if before is None else optimizer.state.get(param)
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, Tensor) and value.shape != param.shape and tuple(value.shape) in before:
                what = f"parameter {i} of this {type(optimizer).__name__} was cut to {tuple(param.shape)}"
                raise ApplyError(
                    f"{what}, but {key!r} in its state is {tuple(value.shape)}; "
                    "pass the optimizer to the cut (optimizer=…), or make a new one"
                )


def _check_buckets(laid_out: Sequence[tuple[Tensor, tuple[int, ...]]], wrapper: nn.Module, _: Any) -> None:
    syncs = torch.is_grad_enabled() and getattr(wrapper, "require_backward_grad_sync", True)
    if syncs and any(tuple(param.shape) != shape for param, shape in laid_out):
        raise ApplyError(
            "the model was cut after DistributedDataParallel had laid out its gradients, which it would no longer "
            "synchronise; wrap the model anew: DistributedDataParallel(wrapped.module)"
        )


__all__ = ["check_alone", "tell_holders", "tell_of_new"]
