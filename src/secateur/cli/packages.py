"""Packages that only some models need."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TypeVar

import torch

from secateur.cli.exits import MissingPackageError, causes

Result = TypeVar("Result")
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def optional(package: str, why: str) -> ModuleType:
    """An optional package; where it is missing, an error with the line that installs it.

    >>> optional("no_such_package", "this example")
    Traceback (most recent call last):
    ...
    secateur.cli.exits.MissingPackageError: this example needs no_such_package, which is not installed: pip install ...
    """
    with contextlib.suppress(ModuleNotFoundError):  # Transformers imports it late, where it would fail unseen
        with_torchvision(lambda: importlib.import_module("torchvision"))
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingPackageError((error.name or package).partition(".")[0], why) from error


def with_torchvision(run: Callable[[], Result]) -> Result:
    """Run something that may import torchvision.

    Torchvision's wheel is linked to CUDA. Beside a CPU build of torch its C++ operators do not load, and its import
    fails on two that it looks up at once. Nothing but its detection models uses them, so where this happens they are
    declared, without a body, and the import is tried again. timm and Transformers import torchvision too.
    """
    try:
        return run()
    except Exception as error:
        if not any("torchvision::nms does not exist" in str(cause) for cause in causes(error)):
            raise
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _BOXES)
    return run()


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that says that a name is unknown.

    >>> did_you_mean("resnet5", ["resnet50", "vgg16"])
    '; did you mean resnet50?'
    """
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""
