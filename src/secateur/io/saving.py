"""Save a model, cut or not."""

import dataclasses
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.arguments import FLAG, PATH, check
from secateur.compat import is_lazy
from secateur.distributed import bare, is_sharded, meet, reshard, together, whole
from secateur.errors import FileError
from secateur.io.atomic import replacing
from secateur.io.file import Header, about, check_order, class_name, storable, write
from secateur.io.packed import packed
from secateur.io.parts import write_parts
from secateur.io.settings import Settings
from secateur.io.tensors import State
from secateur.pipeline.apply import plan_of
from secateur.pipeline.rebuild import origin_in
from secateur.surgery.bias import added_biases, with_added
from secateur.tracing import unwrap
from secateur.tracing.shell import buffers


def save(model: nn.Module, path: str | os.PathLike[str], *, overwrite: bool = True, sharded: bool = False) -> None:
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

    One safetensors file, which any tool for that format can open: parameters and persistent buffers, tied ones once;
    one that is mostly zeros as a bit mask and its other values. Nothing in it is code. What was at `path` is there
    until the new file is complete and on disk, and stays if anything goes wrong; `overwrite=False` refuses to replace
    it. Of a model that is spread over ranks, which all call this, rank 0 writes the whole, so that it can be loaded on
    any number of processes.

    `sharded=True` makes a new folder instead, into which every rank writes what it has (`torch.distributed.checkpoint`,
    in safetensors); that can be loaded on any number of processes, too.
    """
    check_order(path, model, "save(model, path)")
    check("save", FileError, locals(), path=PATH, overwrite=FLAG, sharded=FLAG)
    with about(path) as target:
        inner = unwrap(model, sharded=True)
        spread = is_sharded(inner)
        reshard(inner)
        with together("save", all_come=spread or sharded):
            if sharded:
                write_parts(target, *_contents(inner, every_buffer=True))
                return
            tensors, header = _contents(inner)
            writes = not spread or dist.get_rank() == 0
            tensors = _separate(tensors, keep=writes)
            if writes:
                with replacing(target, overwrite=overwrite) as new:
                    write(new, packed(tensors), header)
            if spread:
                meet("save: done")


def _contents(model: nn.Module, *, every_buffer: bool = False) -> tuple[dict[str, Tensor], Header]:
    """The tensors of a model that go into a file, and what is said of them.

    Of tensors that no state dict has, those that building the model would make otherwise, or every buffer.
    """
    state = State.of(model)
    groups = state.groups()
    stored = {group[0]: state.tensors[group[0]] for group in groups} | dict(state.extra)
    plan = plan_of(model)
    if plan is not None:
        plan = dataclasses.replace(with_added(plan, model), example=None)  # loading runs nothing
    with bare(model):
        found = origin_in(model, plan)
    tied = {group[0]: group[1:] for group in groups if len(group) > 1}
    biases = added_biases(model)
    more = {**found.tables, **(dict(buffers(model)) if every_buffer else {})}
    about_it = (tuple(more), model.training, Settings.of(model))
    header = Header(class_name(model), plan, tied, biases, found.origin, found.why, *about_it)
    made = {**stored, **more}
    for name, tensor in made.items():
        _check(name, tensor)
    return made, header


def _separate(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Plain, dense tensors with a memory of their own, as the format has them; gathered only, where not to keep."""
    made: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        plain = whole(tensor).detach()
        if not keep:
            continue
        plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
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
