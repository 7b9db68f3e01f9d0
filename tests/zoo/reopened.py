"""Run as a program: opens folders with `from_pretrained`, as one who has never heard of Secateur does.

Each line of the input is a class and a folder with `example.pt` and `output.pt`; each line that is put out says whether
the model puts out the same, bit for bit: "same"; "aligned", if only after its weights are at addresses such as torch's
own allocations have (in a file they lie anywhere, and products of matrices may be rounded by that); or what is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch


def tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    parts = output.values() if hasattr(output, "values") else output
    return [tensor for part in parts for tensor in tensors(part)] if isinstance(output, dict | tuple | list) else []


def opened(kind: str, folder: Path) -> str:
    """What becomes of a folder."""
    import transformers

    transformers.logging.set_verbosity_error()
    model, said = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    if any(said.values()):
        return f"loading says {said}"
    example, wanted = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("example", "output"))
    for word in ("same", "aligned"):
        with torch.no_grad():
            got = tensors(model.eval()(**example))
        if len(got) == len(wanted) and all(map(torch.equal, got, wanted)):
            return word
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return "it puts out something else"


def main() -> None:
    """Answer line by line."""
    for line in sys.stdin:
        kind, folder = line.split()
        try:
            answer = opened(kind, Path(folder))
        except Exception as error:  # which is the answer
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        assert "secateur" not in sys.modules
        print(answer, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # its own operators are linked to another torch
        sys.modules.pop("torchvision", None)
        for op in ("nms", "qnms"):
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    main()
