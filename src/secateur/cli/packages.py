"""Code from outside: packages that only some models need, and `path/to/file.py:name` of users' own files."""

import contextlib
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from secateur.cli.exits import InputError, UsageError, causes
from secateur.errors import MissingPackageError, SecateurError

Result = TypeVar("Result")
_INSTALLED_AS = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "cv2": "opencv-python",
    "yaml": "pyyaml",
    "bs4": "beautifulsoup4",
}
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def optional(package: str, why: str) -> ModuleType:
    """An optional package; where it is missing, an error with the line that installs it.

    >>> optional("no_such_package", "this example")
    Traceback (most recent call last):
    ...
    secateur.errors.MissingPackageError: this example needs no_such_package, which is not installed: pip install ...
    """
    with contextlib.suppress(ModuleNotFoundError):  # Transformers imports it late, where it would fail unseen
        with_torchvision(lambda: importlib.import_module("torchvision"))
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise missing(error, why) from error


def missing(error: ModuleNotFoundError, why: str) -> MissingPackageError:
    """An import that failed, as an error with the line that installs the package.

    >>> print(missing(ModuleNotFoundError(name="cv2.gapi"), "net.py:build"))
    net.py:build needs cv2, which is not installed: pip install opencv-python
    """
    package = (error.name or "?").partition(".")[0]
    install = _INSTALLED_AS.get(package, package)
    return MissingPackageError(f"{why} needs {package}, which is not installed: pip install {install}")


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


def named(spec: str) -> Any:
    """What `path/to/file.py:name` names."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        raise UsageError(f"{spec}: give a Python file and a name in it, as in net.py:build")
    module = _run(Path(path))
    names = [key for key in vars(module) if not key.startswith("_")]
    if not hasattr(module, name):
        raise UsageError(f"{path} defines no {name!r}{did_you_mean(name, names)}")
    return getattr(module, name)


def function(spec: str, what: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:name` names; its errors say where they come from."""
    found = named(spec)
    if not callable(found):
        raise UsageError(f"{what}: {spec} is a {type(found).__name__}, not a function")

    def guarded(*args: Any) -> Any:
        return called(lambda: found(*args), spec)

    return guarded


def called(run: Callable[[], Any], spec: str) -> Any:
    """Run the user's code; what it raises is told in one line, with the place."""
    try:
        return with_torchvision(run)
    except SecateurError:
        raise
    except ModuleNotFoundError as error:
        raise missing(error, spec) from error
    except SyntaxError as error:
        raise InputError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        raise InputError(f"{spec} raised {type(error).__name__}{_where(error, spec)}: {error}") from error


def _where(error: Exception, spec: str) -> str:
    """The last line of the user's own file that led to an error."""
    name = Path(spec.rpartition(":")[0] or spec).name
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == name]
    return f" at {name}:{lines[-1]}" if lines else ""


def _run(path: Path) -> ModuleType:
    """Run a file as a module; files beside it can be imported by it, as when Python runs it."""
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    name = f"_secateur_script_{path.stem}"
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look for the module of a class
        spec.loader.exec_module(module)
        return module

    found = called(load, str(path))
    assert isinstance(found, ModuleType)
    return found
