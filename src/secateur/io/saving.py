"""Save a model, cut or not."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from secateur.apply import plan_of
from secateur.errors import FileError
from secateur.io.atomic import replacing
from secateur.io.file import Header, about, class_name, storable, write
from secateur.io.state import State
from secateur.surgery.bias import added_biases, with_added
from secateur.trace import unwrap


def save(model: nn.Module, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
    """Save a model: its weights, and the plan that made it what it is.

    >>> import secateur as sec, tempfile
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = sec.apply(net, sec.plan(sec.trace(net, torch.zeros(1, 4)), sec.Ratio(0.5)))
    >>> path = f"{tempfile.mkdtemp()}/small.safetensors"
    >>> save(net, path)
    >>> fresh = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> from secateur.io import load
    >>> bool((load(path, fresh)(torch.ones(1, 4)) == net(torch.ones(1, 4))).all())
    True

    One safetensors file, which any tool for that format can open: parameters and persistent buffers, tied
    ones once. Nothing in it is code. What was at `path` is there until the new file is complete and on disk,
    and stays if anything goes wrong; `overwrite=False` refuses to replace it.
    """
    with about(path) as target:
        inner = unwrap(model)
        state = State.of(inner)
        groups = state.groups()
        stored = {group[0]: state.tensors[group[0]] for group in groups} | dict(state.extra)
        plan = plan_of(inner)
        if plan is not None:
            plan = dataclasses.replace(with_added(plan, inner), example=None)  # loading runs nothing
        header = Header(class_name(inner), plan, {g[0]: g[1:] for g in groups if len(g) > 1}, added_biases(inner))
        with replacing(target, overwrite=overwrite) as new:
            write(new, _separate(stored), header)


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Plain, dense tensors with a memory of their own, as the format has them."""
    made: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        _check(name, tensor)
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.untyped_storage().data_ptr() in memories:
            plain = plain.clone()
        memories.add(plain.untyped_storage().data_ptr())
        made[name] = plain
    return made


def _check(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise FileError(f"{name} has no shape yet; run the model once before saving it")
    if tensor.is_meta:
        raise FileError(f"{name} is on the meta device and has no values; load or initialise the model first")
    if tensor.layout != torch.strided or tensor.is_quantized or not storable(tensor.dtype):
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise FileError(f"{name} is {kind}, which safetensors does not have; convert it before saving")
