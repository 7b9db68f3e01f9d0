"""`--device` and `--dtype`: where a model runs, and in which precision."""

import argparse
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from secateur.cli.exits import InputError, UsageError
from secateur.cli.packages import did_you_mean
from secateur.compat import tree_map

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16")}


def wanted(args: argparse.Namespace) -> tuple[torch.device | None, torch.dtype | None]:
    """What the options say; None for what they leave as it is."""
    name = args.dtype
    if name is not None and name not in _DTYPES:
        raise UsageError(f"--dtype {name}: it is one of {', '.join(_DTYPES)}{did_you_mean(name, _DTYPES)}")
    return None if args.device is None else _device(args.device), None if name is None else _DTYPES[name]


def _device(name: str) -> torch.device:
    """A device that is there."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        raise UsageError(f"--device {name} cannot be used here: {said}") from error
    return device


def put(args: argparse.Namespace, model: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
    """Move a model to where the options say; the device and the type of its weights are then what its inputs need."""
    device, dtype = wanted(args)
    tensors = [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point()]
    if tensors and not any(tensor.is_meta for tensor in tensors):
        try:
            model.to(device=device, dtype=dtype)
        except RuntimeError as error:  # such as too little memory there
            raise InputError(f"{args.model} cannot be moved: {str(error).splitlines()[0]}") from error
    elif dtype is not None:
        model.to(dtype=dtype)
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    return (None, None) if first is None or first.is_meta else (first.device, first.dtype)


def placed(inputs: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Inputs on a device, those in floating point of a type.

    >>> placed({"x": torch.zeros(1), "n": torch.tensor([3])}, None, torch.bfloat16)["x"].dtype
    torch.bfloat16
    """

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

    return tree_map(move, inputs)
