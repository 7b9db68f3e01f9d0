"""A model as ONNX, checked in onnxruntime against torch."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from secateur.errors import SecateurError
from secateur.trace.capture import arguments, tensors_in

_TOLERANCE = 1e-3  # of the largest output: the two run their products in another order
_MOST = 2**31 - 2**20  # bytes of weights that fit into the file itself


class OnnxError(SecateurError, RuntimeError):
    """A model cannot be exported, or computes something else in onnxruntime."""


def export(model: nn.Module, example: Any, path: str | os.PathLike[str]) -> float:
    """Write a model as ONNX and check it in onnxruntime; returns the largest difference, relative to the outputs.

    >>> import tempfile
    >>> difference = export(nn.Linear(4, 2).eval(), torch.ones(1, 4), tempfile.mkdtemp() + "/net.onnx")
    >>> difference < 1e-5
    True

    `example` is a tensor, a tuple of arguments or a dict of keyword arguments. Needs the packages onnx, onnxscript and
    onnxruntime. Weights of more than 2 GB go into a second file beside the first, as the format demands.
    """
    args, kwargs = arguments(example)
    with torch.no_grad(), _quiet():
        output = model(*args, **kwargs)
        plain = all(leaf is None or isinstance(leaf, Tensor | int | float | str) for leaf in tree_leaves(output))
        want = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)] if plain else [*tensors_in(output)]
        whole = model if plain else _OnlyTensors(model)
        try:
            program = torch.onnx.export(whole, args, kwargs=kwargs, dynamo=True, verbose=False)
        except Exception as error:  # the exporter's own, of many kinds
            raise OnnxError(f"torch.onnx cannot export {type(model).__name__}: {_last_line(error)}") from error
    assert program is not None
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    program.save(path, external_data=weights > _MOST)
    return _checked(Path(path), (args, kwargs), want)


class _OnlyTensors(nn.Module):
    """A model without the state that it returns beside its outputs, such as the cache of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self.model(*args, **kwargs)))


def _checked(path: Path, inputs: Any, want: list[Tensor]) -> float:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    names = [item.name for item in session.get_inputs()]
    if len(names) != len(given):
        raise OnnxError(f"the exported model takes {len(names)} inputs, the example has {len(given)}")
    got = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)})
    if len(got) != len(want):
        raise OnnxError(f"the exported model has {len(got)} outputs, the model {len(want)}")
    worst = 0.0
    for i, (theirs, ours) in enumerate(zip(got, want, strict=True)):
        difference = _difference(torch.as_tensor(theirs), ours)
        if not difference <= _TOLERANCE:
            raise OnnxError(f"output {i} of the exported model is off by {difference:.1e} in onnxruntime")
        worst = max(worst, difference)
    return worst


def _difference(theirs: Tensor, ours: Tensor) -> float:
    if theirs.shape != ours.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    a, b = theirs.double(), ours.double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(torch.float32).tiny))


def _last_line(error: Exception) -> str:
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs advice to programmers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
