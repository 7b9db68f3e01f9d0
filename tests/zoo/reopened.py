"""Run as a program: opens folders with the model's own library, as one who has never heard of Secateur does.

Each line of the input is a library, a class (or timm's name of a model) and a folder with `example.pt` and `output.pt`,
and for timm `fields.pt`, the arguments, and `weights.pt`. Each line that is put out is the folder and whether
the model puts out the same, bit for bit: "same"; "aligned", if only after its weights are at addresses such as torch's
own allocations have (in a file they lie anywhere, and products of matrices may be rounded by that); or what is wrong.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    parts = output.values() if hasattr(output, "values") else output
    return [tensor for part in parts for tensor in tensors(part)] if isinstance(output, dict | tuple | list) else []


def opened(library: str, name: str, folder: Path) -> str:
    """What becomes of a folder."""
    model = _timm(name, folder) if library == "timm" else _pretrained(library, name, folder)
    example, wanted = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("example", "output"))
    for word in ("same", "aligned"):
        with torch.no_grad():
            got = tensors(model.eval()(**example) if isinstance(example, dict) else model.eval()(example))
        if len(got) == len(wanted) and all(map(torch.equal, got, wanted)):
            return word
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return "it puts out something else"


def _pretrained(library: str, name: str, folder: Path) -> torch.nn.Module:
    home = importlib.import_module(library)
    home.utils.logging.set_verbosity_error()
    model, said = getattr(home, name).from_pretrained(folder, output_loading_info=True)
    if any(said.values()):
        raise ValueError(f"loading says {said}")
    return model


def _timm(name: str, folder: Path) -> torch.nn.Module:
    import timm

    fields = torch.load(folder / "fields.pt", weights_only=True)
    try:
        model = timm.create_model(name, **fields) if all(map(str.isidentifier, fields)) else _of_class(name, fields)
    except TypeError:  # timm's function does not take what it passes to the class
        model = _of_class(name, fields)
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    return model


def _of_class(name: str, fields: dict[str, Any]) -> torch.nn.Module:
    """What the class makes that timm's function of a name calls, with other arguments."""
    import timm

    kind = type(timm.create_model(name))
    initialise = kind.__init__

    def with_fields(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(initialise).bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {key: copy.deepcopy(value) for key, value in list(bound.arguments.items())[1:]}
        for path, value in fields.items():
            *way, last = [int(step) if step.isdigit() else step for step in re.findall(r"\w+", path)]
            holder: Any = given if way or last in given else given["kwargs"]
            for step in way:
                holder = getattr(holder, step) if hasattr(holder, "__dict__") else holder[step]
            if hasattr(holder, "__dict__"):
                object.__setattr__(holder, last, value)
            else:
                holder[last] = value
        bound.arguments.update(given)
        initialise(*bound.args, **bound.kwargs)

    with mock.patch.object(kind, "__init__", with_fields):
        return timm.create_model(name)


def main() -> None:
    """Answer line by line."""
    for line in sys.stdin:
        library, name, folder = line.split()
        try:
            answer = opened(library, name, Path(folder))
        except Exception as error:  # which is the answer
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        assert "secateur" not in sys.modules
        print(folder, answer, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # its own operators are linked to another torch
        sys.modules.pop("torchvision", None)
        for op in ("nms", "qnms"):
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    main()
