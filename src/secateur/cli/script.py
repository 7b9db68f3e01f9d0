"""`path/to/file.py:name`: something that a user's own file defines."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from secateur.cli.exits import InputError, MissingPackageError, UsageError
from secateur.cli.packages import did_you_mean, with_torchvision
from secateur.errors import SecateurError


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
        raise MissingPackageError((error.name or "?").partition(".")[0], spec) from error
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
