"""Those outside of a model who hold its tensors, or copies: another model, an optimizer, a wrapper, an average."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.compat import bound_to_shapes, lay_out_anew
from secateur.distributed import everywhere as on_every_rank
from secateur.errors import ApplyError
from secateur.planning.plans import Plan
from secateur.state.held import named_tensors

T = TypeVar("T")
_FEW = 32  # tensors whose holders are found sooner than all modules that there are
_SHAPES = WeakTensorKeyDictionary()  # {a parameter that was cut: the shapes that it had}
_ANEW = "wrap the model anew, on every rank: DistributedDataParallel(wrapped.module)"
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
    """Whether another module may hold one of some tensors: if not, it has to be looked for nowhere."""
    held = [tensor for _, tensor in named_tensors(model) if id(tensor) in names]  # once for each registry that has it
    times = Counter(map(id, held))
    # Beside the registries and this list, the variable of the loop and the call itself refer to it.
    more = [tensor for tensor in held if sys.getrefcount(tensor) > 2 * times[id(tensor)] + 2]
    if not 0 < len(more) <= _FEW:
        return bool(more)
    own = {id(registry) for module in model.modules() for registry in (module._parameters, module._buffers)}
    # A module holds it in a dict as a value, an optimizer in a list and as a key.
    dicts = (each for each in gc.get_referrers(*more) if isinstance(each, dict) and id(each) not in own)
    return any(id(value) in names for each in dicts for value in tuple(each.values()))


def _elsewhere(model: nn.Module, names: Mapping[int, str]) -> tuple[str, str] | None:
    """A tensor that a module outside of the model holds, and the kind of that module."""
    own = set(map(id, model.modules()))
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module) and id(module) not in own:
            for registry in ("_parameters", "_buffers"):
                for tensor in tuple((module.__dict__.get(registry) or {}).values()):
                    if id(tensor) in names:
                        return names[id(tensor)], type(module).__name__
    return None


def tell_holders(model: nn.Module, plan: Plan) -> None:
    """After a cut: whoever remembers tensors as they were says so when asked to go on, instead of computing wrongly.

    Graphs recorded before cannot be run backward any more. An optimizer that was not passed refuses a step as long as
    its state has the old shapes.
    """
    for name, tensor in named_tensors(model):
        if name in plan.kept:
            _SHAPES.setdefault(tensor, set()).add(tuple(plan.shapes[name]))
            with suppress(RuntimeError):  # one made for inference, which no graph keeps
                torch.autograd.graph.increment_version(tensor)
    _watch_steps()


@contextmanager
def wrappers_follow(model: nn.Module, *, everywhere: bool | None = None) -> Iterator[None]:
    """Parameters get other contents inside, and maybe their old ones back: a `DistributedDataParallel` around them has
    lost hold of their gradients. Before it trains again it lays out its buckets anew, or refuses if this was not done
    `everywhere`, on all ranks."""
    try:
        yield
    finally:
        for wrapper in wrappers(model):
            _Relaid(wrapper, on_every_rank() if everywhere is None else everywhere)


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Each `DistributedDataParallel` that trains parameters of a model."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    own = set(map(id, model.parameters()))
    return [one for one in _living(DistributedDataParallel) if not own.isdisjoint(map(id, one.parameters()))]


def check_wrappers(model: nn.Module) -> None:
    """Refuse to cut a model in training whose `DistributedDataParallel` cannot go on with it."""
    for wrapper in wrappers(model):
        _check_can_follow(wrapper)


def _check_can_follow(wrapper: DistributedDataParallel) -> None:
    if (what := bound_to_shapes(wrapper)) is not None:
        raise ApplyError(f"DistributedDataParallel cannot go on with a model that is cut, since it has {what}; {_ANEW}")


class _Relaid:
    """Sees to the buckets of a wrapper before it trains again. A copy of the wrapper has made its own."""

    def __init__(self, wrapper: nn.Module | None = None, everywhere: bool = True) -> None:
        self._everywhere = everywhere
        self._end = None if wrapper is None else wrapper.register_forward_pre_hook(self)

    def __call__(self, wrapper: nn.Module, _: Any) -> None:
        if self._end is None or not torch.is_grad_enabled():
            return
        assert isinstance(wrapper, DistributedDataParallel)
        _check_can_follow(wrapper)
        if not self._everywhere:
            raise ApplyError(
                "the model was cut, not by all ranks together, after DistributedDataParallel had laid out its "
                f"gradients, which it would no longer synchronise; {_ANEW}"
            )
        self._end.remove()
        lay_out_anew(wrapper)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Relaid, ()


def averages(model: nn.Module, but: Sequence[nn.Module] = ()) -> list[str]:
    """The kinds of averages of the weights of a model like this one: torch's `AveragedModel`, timm's `ModelEmaV3`."""
    timm = sys.modules.get("timm.utils.model_ema")
    kinds = {AveragedModel, *(getattr(timm, name, AveragedModel) for name in ("ModelEmaV2", "ModelEmaV3"))}
    like, known = _outline(model), {id(unit) for one in but for unit in one.modules()}

    def found() -> list[str]:
        living = (one for one in _living(*kinds) if id(one) not in known)
        return [type(one).__name__ for one in living if _outline(getattr(one, "module", None)) == like]

    if not found():
        return []
    gc.collect()  # it may be gone already, but for a cycle
    return found()


def _outline(model: nn.Module | None) -> tuple[Any, ...]:
    return type(model), None if model is None else {name: p.shape for name, p in model.named_parameters()}


def tell_of_new(old: Mapping[str, Tensor]) -> None:
    """After a cut that had to make new parameters: an optimizer that still has the old ones refuses a step."""
    for name, tensor in old.items():
        _GONE[tensor] = name
    _watch_steps()


def _living(*kinds: type[T]) -> list[T]:
    """All there are of some kinds, which have few subclasses: each object refers to its type."""
    classes = list(kinds)
    for kind in classes:  # which grow
        classes += (one for one in kind.__subclasses__() if one not in classes)
    return [each for each in gc.get_referrers(*classes) if issubclass(type(each), tuple(classes))]


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


__all__ = ["averages", "check_alone", "check_wrappers", "tell_holders", "tell_of_new", "wrappers_follow"]
