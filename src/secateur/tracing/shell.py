"""A model without weights, from its constructor: parameters on the meta device, buffers and other tables real.

What the constructor is called with may come from a file of unknown origin: it gets no memory to waste, no network, and
no files.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.errors import TraceError
from secateur.state.chances import same_chances
from secateur.state.held import Place, Walk
from secateur.state.patches import patched
from secateur.tracing.constructor import Maker, without_weights

_MOST = 2**28  # elements of a table
_MADE = frozenset(
    getattr(torch, name)
    for name in (
        *("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"),
        *("tril_indices", "triu_indices", "zeros"),
    )
)


def shell(maker: Maker, parameters: int, *, closed: bool = True) -> nn.Module:
    """The model that a constructor makes, without its weights; refused where it has far more than so many parameters.

    >>> made = shell(Maker(nn.Linear, {"in_features": 4, "out_features": 10**6}), 2)
    >>> made.weight.device, made.weight.shape
    (device(type='meta'), torch.Size([1000000, 4]))

    `closed`: it gets no files and no network, either.
    """
    build = functools.partial(_made, maker, parameters, _closed if closed else nullcontext)
    try:
        made = build(bare=True)
    except TraceError:
        raise
    except Exception:  # code that reads the weights it has just made
        made = None
    if made is None or any(table.is_meta for _, table in tables(made)):
        made = build(bare=False)
    return made


def _made(maker: Maker, parameters: int, apart: Callable[[], Any], *, bare: bool) -> nn.Module:
    arguments = maker.changed(lambda _place, value: value)
    with same_chances(), torch.no_grad(), apart(), without_weights(4 * parameters + 64), _Frugal(bare):
        built = maker.function(**arguments)
    if not isinstance(built, nn.Module):
        raise TraceError(f"it builds a {type(built).__name__}, not a model")
    return built


class _Frugal(TorchFunctionMode):
    """Memory that is not filled is none (`bare`), and no table is beyond all measure."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        self._bare = bare

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and self._bare and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        elif func in _MADE and "out" not in kwargs:
            like = {name: value for name, value in kwargs.items() if name != "generator"}
            count = func(*args, **{**like, "device": "meta"}).numel()
            if count > _MOST:
                raise TraceError(f"its constructor makes a tensor of {count} elements, more than any table has")
        return func(*args, **kwargs)


@contextmanager
def _closed() -> Iterator[None]:
    """In this thread no connection is made, and no file is opened but those of Python and its packages."""

    def connects(self: Any, *_: Any) -> None:
        raise TraceError("its constructor connects to another machine, or asks for weights that are there")

    def opens(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int):
            raise TraceError("its constructor opens a file")
        if set(mode) & set("wax+") or not _is_pythons(os.fspath(file)):
            raise TraceError(f"its constructor opens {os.fspath(file)!r:.80}")
        return _open(file, mode, *args, **kwargs)

    files = ((builtins, "open", opens), (io, "open", opens))
    with patched(*files, (socket.socket, "connect", connects), (socket.socket, "connect_ex", connects)):
        yield


_open = open


def _is_pythons(path: Any) -> bool:
    homes = (sys.prefix, sys.base_prefix, os.path.dirname(torch.__file__))
    real = os.path.realpath(os.fsdecode(path))
    return any(os.path.commonpath([real, os.path.realpath(home)]) == os.path.realpath(home) for home in homes)


def tables(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a state dict does not have: buffers that are not persistent, and tensors in plain attributes."""
    yield from buffers(model)
    found: list[tuple[str, Tensor]] = []

    def look(value: Any, place: Place) -> Any:
        if isinstance(value, Tensor):
            found.append((str(place), value))
        return value

    Walk(model).replace(look)
    yield from found


def buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are not persistent."""
    for owner, module in model.named_modules():
        for key in sorted(module._non_persistent_buffers_set):
            if (tensor := module._buffers.get(key)) is not None:
                yield f"{owner}.{key}".lstrip("."), tensor


__all__ = ["buffers", "shell", "tables"]
