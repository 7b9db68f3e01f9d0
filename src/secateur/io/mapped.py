"""A model whose weights are where its files are: the system brings in what is read, and lets go of it again.

Memory that is mapped from a file costs nothing that could run out: what was only read is dropped when memory is scarce,
what was written goes to the file first. So a model may be larger than memory, and nobody who works with it has to know.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from secateur.arguments import shown
from secateur.errors import FileError
from secateur.io.pieces import piece
from secateur.io.shards import Shards, read_json, starts
from secateur.io.tensors import State
from secateur.state.chances import same_chances
from secateur.state.twin import remade
from secateur.tracing.constructor import without_weights

CONFIG = "config.json"


def outline_of(folder: Path, dtype: torch.dtype | None = None) -> nn.Module | None:
    """The model that config.json tells of, if Transformers has its class: parameters on the meta device, buffers not.

    `dtype` is what its buffers have that are made without saying which.
    """
    if not (folder / CONFIG).is_file():
        return None
    names = read_json(folder / CONFIG).get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return None
    try:
        import transformers
    except ImportError:
        return None
    kind = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with same_chances(), without_weights(), _usually(dtype):
            return kind(config)
    except Exception as error:  # the class's own code, with numbers from a file
        raise FileError(f"{names[0]} could not be built from {CONFIG}: {error}"[:500]) from error


@contextmanager
def _usually(dtype: torch.dtype | None) -> Iterator[None]:
    """The dtype of what is made without saying which."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def usual_dtype(shards: Shards) -> torch.dtype | None:
    """The floating dtype that most of a checkpoint is in."""
    known = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    counts = Counter(form.dtype for forms in shards.forms.values() for form in forms.values() if form.dtype in known)
    return known[counts.most_common(1)[0][0]] if counts else None


def with_weights(model: nn.Module, shards: Shards, *, writable: bool = False) -> tuple[nn.Module, Joined]:
    """A copy of a model with weights that are mapped from files, which writing changes only if they are `writable`.

    Experts that files hold one by one, and the model as one tensor, are copied into a file of their own.
    """
    state = State.of(model)
    if state.extra:
        raise FileError(f"{shown(min(state.extra))} is extra state, which is not mapped from files; load the model")
    kind = type(model).__name__
    found, joined = _with_joined(dict(_mapped(shards, writable)), state.names())
    new: dict[int, Tensor] = {}
    for names in state.groups():
        old = state.tensors[names[0]]
        name = next((name for name in names if name in found), None)
        if name is None:
            raise FileError(f"no file holds {shown(names[0])}, which {kind} has; is it for another model?")
        if found[name].shape != old.shape:
            shapes = f"{tuple(found[name].shape)}, not {tuple(old.shape)}"
            raise FileError(f"{shown(name)} is {shapes} as in {kind}; is it for another model?")
        new[id(old)] = _like(old, found[name])
    without = [name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in new]
    if without:
        raise FileError(f"{shown(min(without))} is on the meta device and in no file; make buffers on the CPU")
    return remade(model, lambda old: new[id(old)] if id(old) in new else old.detach().clone()), joined


@dataclass(frozen=True)
class Joined:
    """Parts of files that are joined to one tensor in a model: each part, and where in that tensor it is."""

    parts: tuple[tuple[Tensor, Tensor], ...] = ()

    @torch.no_grad()
    def load(self) -> None:
        """Copy what the files hold to the model."""
        for file, model in self.parts:
            model.copy_(file)

    @torch.no_grad()
    def store(self) -> None:
        """Copy what the model has to the files."""
        for file, model in self.parts:
            file.copy_(model)


def _with_joined(files: dict[str, Tensor], known: Collection[str]) -> tuple[dict[str, Tensor], Joined]:
    """The tensors of files by the names that a model has for them, parts of one joined."""
    pieces = {name: piece(name, known) for name in files}
    found = {pieces[name].whole: tensor for name, tensor in files.items() if pieces[name].expert is None}
    groups: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, of in pieces.items():
        if of.expert is not None:
            groups.setdefault(of.whole, {})[of.expert, of.part] = files[name]
    parts: list[tuple[Tensor, Tensor]] = []
    for whole, group in groups.items():
        rows = {part: len(group[0, part]) for part in range(len(group)) if (0, part) in group}
        count = 1 + max(expert for expert, _ in group)
        if len(group) != count * len(rows) or any(len(held) != rows.get(part) for (_, part), held in group.items()):
            raise FileError(
                f"the files hold {len(group)} parts of {shown(whole)}, which do not make up one; get it anew"
            )
        first = group[0, 0]
        found[whole] = joined = _on_disk((count, sum(rows.values()), *first.shape[1:]), first.dtype)
        for (expert, part), held in sorted(group.items()):
            parts.append((held, joined[expert].narrow(0, sum(rows[p] for p in range(part)), len(held))))
    made = Joined(tuple(parts))
    made.load()
    return found, made


def _on_disk(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in a temporary file, which is gone with it."""
    size = torch.Size(shape).numel() * dtype.itemsize
    with tempfile.TemporaryFile(prefix="secateur-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and nothing later
        except OSError as error:
            raise FileError(
                f"{size / 1e9:.2f} GB could not be written to {tempfile.gettempdir()} ({error}); set TMPDIR to a "
                "folder with more space"
            ) from error
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype).view(shape)


def without_values(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are on the meta device; buffers are copied."""

    def empty(old: Tensor) -> Tensor:
        return _like(old, old.detach().to("meta")) if isinstance(old, nn.Parameter) else old.detach().clone()

    return remade(model, empty)


def _like(old: Any, data: Tensor) -> Any:
    """Other data as a parameter, if the old tensor is one."""
    if not isinstance(old, nn.Parameter):
        return data
    made = nn.Parameter(data, old.requires_grad and data.is_floating_point())
    made.__dict__.update(old.__dict__)
    return made


def _mapped(shards: Shards, writable: bool) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a checkpoint, with a storage of its own."""
    for file in shards.forms:
        path = shards.folder / file
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in shards.forms[file]}
        if writable:
            with path.open("r+b") as both_ways:
                memory = mmap.mmap(both_ways.fileno(), 0)
            tensors = {name: _at(memory, start, tensors[name]) for name, start in starts(path).items()}
        yield from tensors.items()


def _at(memory: Any, start: int, like: Tensor) -> Tensor:
    """A tensor in the memory of a file."""
    if not like.numel():
        return like
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)


__all__ = ["CONFIG", "Joined", "outline_of", "usual_dtype", "with_weights", "without_values"]
