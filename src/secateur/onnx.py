"""A model as ONNX, checked in onnxruntime against torch."""

import contextlib
import inspect
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.compat import tree_leaves
from secateur.errors import SecateurError
from secateur.tracing.examples import Inputs, arguments, handed_out, tensors_in

_TOLERANCE = 1e-3  # of the largest output: the two run their products in another order
_MOST = 2**31 - 2**20  # bytes of weights that fit into the file itself


class OnnxError(SecateurError, RuntimeError):
    """A model cannot be exported, or computes something else in onnxruntime."""


def export(model: nn.Module, example: Any, path: str | os.PathLike[str], *, others: Sequence[Any] = ()) -> float:
    """Write a model as ONNX and check it in onnxruntime; returns the largest difference, relative to the outputs.

    >>> import tempfile
    >>> difference = export(nn.Linear(4, 2).eval(), torch.ones(1, 4), tempfile.mkdtemp() + "/net.onnx")
    >>> difference < 1e-5
    True

    `example` is a tensor, a tuple of arguments or a dict of keyword arguments. `others` are examples of other sizes: in
    whatever they differ, the exported model takes any size, and it is checked on each of them. Needs the packages onnx,
    onnxscript and onnxruntime. Weights of more than 2 GB go into a second file beside the first, as the format demands.
    """
    calls = [arguments(one) for one in (example, *others)]
    with torch.no_grad(), _quiet():
        wanted = [_outputs(model, call) for call in calls]
        whole = model if all(plain for _, plain in wanted) else _OnlyTensors(model)
        args, kwargs = first = _first(calls)
        rest = [call for call in calls if call is not first]
        try:
            captured = _captured(whole, first, rest)
            program = torch.onnx.export(captured, args, kwargs=kwargs, dynamo=True, verbose=False)
        except Exception as error:  # the exporter's own, of many kinds
            raise OnnxError(f"torch.onnx cannot export {type(model).__name__}: {_last_line(error)}") from error
    assert program is not None
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    program.save(path, external_data=weights > _MOST)
    return max(_checked(Path(path), call, want) for call, (want, _) in zip(calls, wanted, strict=True))


def _outputs(model: nn.Module, call: Inputs) -> tuple[list[Tensor], bool]:
    """The tensors that a model puts out, and whether there is nothing else."""
    output = model(*call[0], **call[1])
    plain = all(leaf is None or isinstance(leaf, Tensor | int | float | str) for leaf in tree_leaves(output))
    leaves = tree_leaves(output) if plain else tensors_in(handed_out(model, output))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], plain


def _first(calls: Sequence[Inputs]) -> Inputs:
    """The call to capture the model with: torch.export fixes sizes of one, so one that has none where others differ."""
    shapes = [[tuple(tensor.shape) for tensor in _tensors(call)] for call in calls]
    for call, own in zip(calls, shapes, strict=True):
        beside = [both for other in shapes for both in zip(own, other, strict=False)]
        if not any(mine == 1 != theirs for both in beside for mine, theirs in zip(*both, strict=False)):
            return call
    raise OnnxError(
        "torch.export fixes sizes of 1, and each example has one where another has more. Give one example that has at "
        "least 2 wherever sizes may vary"
    )


def _tensors(call: Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]


def _captured(model: nn.Module, call: Inputs, others: Sequence[Inputs]) -> torch.export.ExportedProgram:
    """The model as a program. Left to itself, torch.onnx of some versions takes the one path that the example takes."""
    sizes: Any = torch.export.AdditionalInputs() if others else None
    for args, kwargs in others:
        sizes.add(args, kwargs)
    try:
        return torch.export.export(model, *call, dynamic_shapes=sizes, strict=False)
    except Exception as error:
        try:
            return torch.export.export(model, *call, dynamic_shapes=sizes, strict=True)
        except Exception:
            raise error from None


class _OnlyTensors(nn.Module):
    """A model without the state that it returns beside its outputs, such as the cache of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

        def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            return tuple(tensors_in(handed_out(self.model, self.model(*args, **kwargs))))

        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
        self.forward = forward  # of the model's own arguments, whose names the exported model has


def _checked(path: Path, call: Inputs, want: list[Tensor]) -> float:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = _tensors(call)
    names = [item.name for item in session.get_inputs()]
    if len(names) != len(given):
        raise OnnxError(f"the exported model takes {len(names)} inputs, the example has {len(given)}")
    try:
        got = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)})
    except Exception as error:  # of onnxruntime's own kinds
        sizes = ", ".join("×".join(map(str, tensor.shape)) for tensor in given)
        raise OnnxError(f"the exported model does not run on {sizes} in onnxruntime: {_last_line(error)}") from error
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
