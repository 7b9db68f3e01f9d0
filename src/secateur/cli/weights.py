"""`--weights`: a state dict in a safetensors file, or a model that Secateur saved."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from secateur.cli.exits import InputError, UsageError
from secateur.io import load
from secateur.io.file import about, opened
from secateur.io.state import State, set_extra

_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".th", ".tar"}


def check_name(path: Path) -> None:
    """Refuse, before anything is built, a file that is not there or not of the format."""
    if path.suffix.lower() in _PICKLES:
        line = (
            "import torch, safetensors.torch as st; "
            f"st.save_file(torch.load({path.name!r}, weights_only=True), {path.with_suffix('.safetensors').name!r})"
        )
        raise UsageError(f'{path} is a pickle, which can run code when opened; convert it: python -c "{line}"')
    if not path.is_file():
        raise UsageError(f"--weights {path}: there is no such file")


def fill(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into a model; one that Secateur saved is cut as the file says first."""
    check_name(path)
    with about(path) as source, opened(source) as file:
        saved = "secateur" in (file.metadata() or {})
        tensors = {} if saved else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if saved:
        load(path, model)
    else:
        _fill(model, tensors, path)


@torch.no_grad()
def _fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    state = State.of(model)
    unknown = sorted(set(tensors) - state.names())
    lacking = [group[0] for group in state.groups() if not any(name in tensors for name in group)]
    for names, problem in ((unknown, "the model lacks"), (lacking, "it lacks")):
        if names:
            raise InputError(f"{path}: {problem} {', '.join(names[:3])} ({len(names)} in all); is it of this model?")
    for name, tensor in tensors.items():
        here = state.tensors.get(name)
        if here is not None and here.shape != tensor.shape:
            sizes = f"{list(tensor.shape)} in the file, {list(here.shape)} in the model"
            raise InputError(f"{path}: {name} is {sizes}; build the model as it was trained, in a file.py:callable")
    for name, tensor in tensors.items():
        if name in state.tensors:
            state.tensors[name].copy_(tensor)
        else:
            set_extra(model, name, tensor)
