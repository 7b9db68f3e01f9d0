"""`--example`: an example input of a model, described by dtype and shape."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.cli.exits import UsageError
from secateur.cli.packages import did_you_mean

HELP = (
    "the shape of the model's input, as in 1x3x224x224; for other inputs [NAME=]SHAPE[:DTYPE[:BELOW]], as in "
    "input_ids=1x16:int64:1000; once for each input"
)
_PATTERN = re.compile(r"(?:(?P<name>\w+)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+)(?::(?P<below>\d+))?)?")
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


def parse(texts: Sequence[str], dtype: torch.dtype = torch.float32) -> Any:
    """The example that one or several `--example` describe.

    >>> parse(["1x3x8x8"]).shape
    torch.Size([1, 3, 8, 8])
    >>> {name: (tensor.dtype, int(tensor.max()) < 50) for name, tensor in parse(["ids=1x16:int64:50"]).items()}
    {'ids': (torch.int64, True)}

    Floating-point inputs are drawn from a normal distribution, whole numbers from 0 up to `BELOW` (2 if not given),
    with a fixed seed; `dtype` is that of inputs whose own is not said. Inputs with names are passed by name, several
    without as arguments in order.
    """
    generator = torch.Generator().manual_seed(0)
    parts = [_part(text, generator, dtype) for text in texts]
    names = [name for name, _ in parts if name]
    if not names:
        return parts[0][1] if len(parts) == 1 else tuple(tensor for _, tensor in parts)
    if len(set(names)) < len(parts):
        raise UsageError("--example: name every input, each once, or none")
    return {name: tensor for name, tensor in parts if name}


def _part(text: str, generator: torch.Generator, default: torch.dtype) -> tuple[str | None, Tensor]:
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise UsageError(f"--example {text}: give a shape such as 1x3x224x224, or NAME=1x16:int64:1000")
    shape = [int(n) for n in found["shape"].split("x")]
    name = found["dtype"] or str(default).removeprefix("torch.")
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise UsageError(f"--example {text}: there is no dtype {name}{did_you_mean(name, _DTYPES)}")
    below = int(found["below"] or 2)
    if 0 in shape or below == 0:
        raise UsageError(f"--example {text}: sizes and BELOW start at 1")
    if below > _most(dtype) + 1:
        raise UsageError(f"--example {text}: {name} counts to {_most(dtype)}")
    try:
        draw = torch.randn if dtype.is_floating_point else functools.partial(torch.randint, below)
        return found["name"], draw(shape, generator=generator).to(dtype)
    except (RuntimeError, ValueError) as error:  # more than there is memory for
        raise UsageError(f"--example {text}: {str(error).splitlines()[0]}") from error


def _most(dtype: torch.dtype) -> int:
    """The largest whole number that a dtype is drawn from."""
    if dtype == torch.bool:
        return 1
    return torch.iinfo(torch.int64 if dtype.is_floating_point else dtype).max - (dtype == torch.int64)
