"""Carry out a plan: other contents for the same tensors, attributes that say so. All or nothing."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from secateur.compat import is_lazy
from secateur.errors import ApplyError, PlanError
from secateur.nn.attention import MultiheadAttention
from secateur.planning.plans import Plan
from secateur.state.contents import put_contents
from secateur.state.held import named_tensors, read, write
from secateur.state.own import own_what_is_written
from secateur.surgery.blocks import check_removal, shortened
from secateur.surgery.optimizer import following
from secateur.surgery.places import check_numbers, reached
from secateur.surgery.refresh import refresh

Shrunk = tuple[Tensor, Tensor, Tensor | None]  # a tensor that is cut, what is left of it, what is left of its gradient
_CHUNK = 2**16  # elements that are held at a time beside what is made of them
_DEVICE_CHUNK = 2**24  # on a device, where each piece is a kernel to be launched


def carry_out(model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Cut a model in place. Nothing changes before all that stays exists and fits; a transaction undoes the rest.

    Parameters and buffers stay the objects that they are, so all who hold them (an optimizer, a variable of the
    user's) hold what is left of them.
    """
    plan = shortened(model, plan, optimizer)
    check_fit(model, plan)
    have = dict(named_tensors(model))
    left = new_contents(have, plan.kept)
    kept = {id(have[name]): dims for name, dims in plan.kept.items()}
    follow = None if optimizer is None else following(optimizer, kept)
    _swap(model, plan, left)
    if follow is not None:
        follow()


def _swap(model: nn.Module, plan: Plan, left: Iterable[Shrunk]) -> None:
    attentions = {m: 1 / math.sqrt(m.head_dim) for m in model.modules() if type(m) is nn.MultiheadAttention}
    for tensor, data, grad in left:
        put_contents(tensor, data, grad)
    own_what_is_written(
        model, [*(place for place, _ in plan.kept_in_attributes), *(at for at, _, _ in plan.attributes)]
    )
    for place, index in plan.kept_in_attributes:
        write(model, place, select(read(model, place), index))
    for place, _, value in plan.attributes:
        write(model, place, value)
    for module, scale in attentions.items():
        _loosen(module, scale)
    for encoder in (m for m in model.modules() if isinstance(m, nn.TransformerEncoder)):
        if any(isinstance(m, MultiheadAttention) for m in encoder.modules()):
            encoder.__dict__["use_nested_tensor"] = False  # only torch's fused kernels can read these
    refresh(model)


def _loosen(attention: nn.MultiheadAttention, scale: float) -> None:
    """Where torch's attention can no longer express the widths, ours takes its place."""
    width, inner = attention.out_proj.weight.shape
    packed = attention.in_proj_weight
    rows, taken = attention.q_proj_weight.shape if packed is None else (packed.shape[0] // 3, packed.shape[1])
    expressible = width == inner == rows == taken and width % attention.num_heads == 0
    if expressible and math.isclose(scale, 1 / math.sqrt(width // attention.num_heads)):
        return
    attention.__class__ = MultiheadAttention
    attention.__dict__["scale"] = scale
    attention.__dict__["_qkv_same_embed_dim"] = False  # keeps torch's fused kernels away


def check_fit(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan that was made for another model."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ApplyError(f"{type(model).__name__} is TorchScript, which cannot be cut; cut the original")
    if plan.removed:  # what else is cut has other names now
        check_removal(model, plan.removed)
        return
    have = dict(named_tensors(model))
    for name, shape in plan.shapes.items():
        if name not in have:
            raise PlanError(
                f"the plan cuts {name}, which {type(model).__name__} does not have; is it for another model?"
            )
        if is_lazy(have[name]):
            raise PlanError(f"the plan cuts {name}, which has no shape yet; run the model once, then trace and plan it")
        if tuple(have[name].shape) != tuple(shape):
            raise PlanError(
                f"the plan cuts {name} of shape {tuple(shape)}, here it is {tuple(have[name].shape)}; "
                "trace and plan this model anew"
            )
        for dim, index in plan.kept[name].items():
            _check_index(name, dim, index, shape)
    modules = dict(model.named_modules())
    check_numbers(modules, plan.attributes)
    for place, dims in plan.kept_in_attributes:
        now = reached(modules, place)
        if not isinstance(now, Tensor):
            raise PlanError(f"the plan cuts {place}, which is a {type(now).__name__} here, not a tensor")
        for dim, index in dims.items():
            _check_index(str(place), dim, index, now.shape)


def _check_index(name: str, dim: int, index: Sequence[int], shape: Sequence[int]) -> None:
    if not 0 <= dim < len(shape):
        raise PlanError(f"the plan cuts dimension {dim} of {name}, which has {len(shape)}")
    if not index or any(map(operator.ge, index, islice(index, 1, None))):
        raise PlanError(f"the plan's positions for {name} dim {dim} are not a rising, non-empty list")
    if index[0] < 0 or index[-1] >= shape[dim]:
        raise PlanError(f"the plan keeps position {index[-1]} of {name} dim {dim}, which has {shape[dim]}")


def select(tensor: Tensor, kept: Mapping[int, Sequence[int]]) -> Tensor:
    """The kept slices of a tensor, in its memory format."""
    return fill(room(tensor, kept), tensor, kept)


def room(tensor: Tensor, kept: Mapping[int, Sequence[int]]) -> Tensor:
    """Memory for the kept slices of a tensor, in its memory format."""
    shape = [len(kept[dim]) if dim in kept else size for dim, size in enumerate(tensor.shape)]
    layouts = (torch.channels_last, torch.channels_last_3d)
    layout = next((f for f in layouts if _only(tensor, f)), torch.contiguous_format)
    with torch.inference_mode(tensor.is_inference()):
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)


def fill(new: Tensor, tensor: Tensor, kept: Mapping[int, Sequence[int]]) -> Tensor:
    """Put the kept slices of a tensor into the room made for them, a few at a time."""
    with torch.no_grad(), torch.inference_mode(new.is_inference()):
        return new if new.is_meta else _fill(new, tensor.detach(), kept)


def _fill(new: Tensor, old: Tensor, kept: Mapping[int, Sequence[int]]) -> Tensor:
    index = {dim: torch.from_numpy(np.array(i, np.int64)).to(old.device) for dim, i in kept.items()}
    if not index:
        return new.copy_(old)
    (along, rows), *others = sorted(index.items())
    if not others:
        return torch.index_select(old, along, rows, out=new)
    *middle, (last, columns) = others
    chunk = _CHUNK if old.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk * old.shape[along] // max(old.numel(), 1))
    for start in range(0, len(rows), step):
        part = old.index_select(along, rows[start : start + step])
        for dim, positions in middle:
            part = part.index_select(dim, positions)
        torch.index_select(part, last, columns, out=new.narrow(along, start, part.shape[along]))
    return new


def _only(tensor: Tensor, layout: torch.memory_format) -> bool:
    dims = 4 if layout is torch.channels_last else 5
    return tensor.dim() == dims and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def new_contents(have: Mapping[str, Tensor], kept: Mapping[str, Mapping[int, Sequence[int]]]) -> list[Shrunk]:
    """What is left of each tensor that is cut, and of its gradient; tied names must agree."""
    firsts: dict[int, str] = {}
    for name, dims in kept.items():
        first = firsts.setdefault(id(have[name]), name)
        if dict(kept[first]) != dict(dims):
            raise ApplyError(f"{name} and {first} are one tensor, but the plan cuts them differently")
    # All that stays is allocated first: memory that is only passed through would leave holes in between.
    made = {name: room(have[name], kept[name]) for name in firsts.values()}
    for name, data in made.items():
        fill(data, have[name], kept[name])
    return [(have[name], data, _left_of_gradient(have[name], kept[name])) for name, data in made.items()]


def _left_of_gradient(tensor: Tensor, kept: Mapping[int, Sequence[int]]) -> Tensor | None:
    return select(tensor.grad, kept) if tensor.is_leaf and tensor.grad is not None else None


__all__ = ["carry_out", "check_fit", "new_contents", "select"]
