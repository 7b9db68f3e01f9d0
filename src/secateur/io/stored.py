"""What a model is loaded from: a file that `save` wrote, or a folder with a checkpoint and the plan beside it.

Such a folder is written by `save_pretrained` of a cut model and by `cut_checkpoint`. Its config.json keeps
`from_pretrained` away, which would build the model at another size. Or ranks have written it together (`parts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from secateur.arguments import shown
from secateur.errors import FileError
from secateur.io import file as files
from secateur.io.file import Header, class_name
from secateur.io.packed import Unpacking
from secateur.io.parts import HEADER, Parts
from secateur.io.pieces import piece
from secateur.io.settings import GENERATION, Settings
from secateur.io.shards import Shards, read_json
from secateur.io.tensors import State
from secateur.pipeline.save_pretrained import FROZEN, PLAN, is_marked
from secateur.planning.plans import Plan
from secateur.tracing.shell import tables


class Stored(Protocol):
    """Tensors by name, of which none is read before it is asked for."""

    def keys(self) -> Sequence[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def get_tensor(self, name: str) -> Tensor: ...


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Stored]:
    """A file or a folder, open for reading."""
    if path.is_dir():
        yield Parts(path) if (path / HEADER).is_file() else PlannedCheckpoint(path)
    else:
        with files.opened(path) as file:
            yield file


def header_of(stored: Stored, model: nn.Module | None = None) -> Header:
    """What a file or a folder says about its tensors; a folder leaves it to the `model` which of them are tied."""
    if isinstance(stored, Unpacking):
        return Header.read(stored.metadata())
    if isinstance(stored, Parts):
        return stored.header
    assert isinstance(stored, PlannedCheckpoint)
    return stored.header(model)


class PlannedCheckpoint:
    """A checkpoint with a plan beside it. Experts that it holds one by one are one tensor here, as in the model."""

    def __init__(self, path: Path) -> None:
        self._config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        if not (path / PLAN).is_file() or not is_marked(self._config):
            raise FileError(
                f"this folder holds no cut model ({PLAN}, and a config.json that says so); what from_pretrained opens, "
                "open with that"
            )
        generation = read_json(path / GENERATION) if (path / GENERATION).is_file() else None
        self._settings = Settings.read(self._config.get(FROZEN), generation)
        self._plan = Plan.from_json((path / PLAN).read_text("utf-8"))
        self._shards = Shards.of(path)
        self._forms = {name: form for forms in self._shards.forms.values() for name, form in forms.items()}
        self._where = {name: file for file, forms in self._shards.forms.items() for name in forms}
        self._parts = {name: [[name]] for name in self._forms}  # of each tensor: experts, and the parts of each

    def header(self, model: nn.Module | None) -> Header:
        """What the folder says, and what follows from the names of a model's tensors."""
        plan = self._plan
        if model is None:
            return Header("", plan, origin=plan.origin, unbuilt="the model was changed after it was built")
        self._join(State.of(model).names())
        state, keys = State.of(model), set(self._parts)
        modules = dict(model.named_modules())
        more = keys - state.names()
        have = dict(tables(model))
        added = {name.removesuffix("bias").rstrip(".") for name in more if name.rpartition(".")[2] == "bias"}
        biases = tuple(sorted(n for n in added if n in modules and modules[n]._parameters.get("bias", 0) is None))
        tied = {}
        for group in state.groups():
            held = [name for name in group if name in keys]
            if len(held) == 1 < len(group):
                tied[held[0]] = tuple(name for name in group if name != held[0])
        told = self._config.get("architectures") or [self._config.get("_class_name")]
        name = told[0] if isinstance(told, list) and isinstance(told[0], str) else class_name(model)
        extra = tuple(sorted(more & have.keys()))
        return Header(name, plan, tied, biases, plan.origin, "", extra, settings=self._settings)

    def _join(self, known: set[str]) -> None:
        """Find what are parts of one tensor of a model."""
        joined: dict[str, dict[int, dict[int, str]]] = {}
        for name in self._forms:
            of = piece(name, known)
            joined.setdefault(of.whole, {}).setdefault(of.expert or 0, {})[of.part] = name
        self._parts = {
            whole: [[parts[i] for i in sorted(parts)] for _, parts in sorted(experts.items())]
            for whole, experts in joined.items()
        }

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, which is not read."""
        experts = self._parts[name]
        first, *rest = (self._forms[part].shape for part in experts[0])
        if [[name]] == experts or not first:
            return first
        return len(experts), first[0] + sum(shape[0] for shape in rest if shape), *first[1:]

    def get_tensor(self, name: str) -> Tensor:
        """A tensor, experts as one."""
        experts = self._parts[name]
        if len(experts) == 1 == len(experts[0]):
            return self._read(experts[0][0])
        try:
            return torch.stack([torch.cat([self._read(part) for part in parts]) for parts in experts])
        except RuntimeError as error:
            raise FileError(f"the experts of {shown(name)} do not fit together: {error}") from None

    def _read(self, name: str) -> Tensor:
        with safe_open(self._shards.folder / self._where[name], framework="pt") as file:
            found: Tensor = file.get_tensor(name)
            return found


__all__ = ["Stored", "header_of", "opened"]
