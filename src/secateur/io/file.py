"""The file: safetensors, with what it takes to rebuild the model in the metadata.

The metadata of a safetensors file is text by text. Ours:

    secateur_file     version of this layout
    secateur_version  version of the library that wrote it
    class             name of the model's class
    plan              JSON of the plan that leads here from the full size, or null
    tied              JSON of {stored name: [its other names]}
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from secateur.errors import FileError, SecateurError
from secateur.plan.json import parse
from secateur.plan.plan import Plan

VERSION = "1"
_REMEDY = "it is damaged or was not written by secateur.save"


@dataclass(frozen=True)
class Header:
    """What a file says about its tensors."""

    class_name: str
    plan: Plan | None
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def metadata(self) -> dict[str, str]:
        return {
            "format": "pt",
            "secateur_file": VERSION,
            "secateur_version": _library_version(),
            "class": self.class_name,
            "plan": "null" if self.plan is None else self.plan.to_json(),
            "tied": json.dumps({name: list(others) for name, others in self.tied.items()}),
        }

    @staticmethod
    def read(metadata: Mapping[str, str] | None) -> Header:
        """The header in a file's metadata; refused where it is not what `metadata` makes."""
        data = metadata or {}
        if "secateur_file" not in data:
            raise FileError(f"it holds tensors but no plan; {_REMEDY}")
        if data["secateur_file"] != VERSION:
            raise FileError(
                f"it has layout {data['secateur_file'][:20]!r}, this library reads {VERSION!r}; "
                f"load it with the version that wrote it ({data.get('secateur_version', 'unknown')[:20]!r})"
            )
        missing = {"class", "plan", "tied"} - set(data)
        if missing:
            raise FileError(f"its metadata lacks {', '.join(sorted(missing))}; {_REMEDY}")
        plan = None if data["plan"] == "null" else Plan.from_json(data["plan"])
        return Header(data["class"], plan, _tied(data["tied"]))

    def source(self, stored: set[str]) -> dict[str, str]:
        """{each name, tied ones too: the stored name that holds its tensor}."""
        names = {name: name for name in stored}
        for name, others in self.tied.items():
            if name not in stored:
                raise FileError(f"it ties {name[:80]!r}, which it does not hold; {_REMEDY}")
            for other in others:
                if other in names:
                    raise FileError(f"it holds {other[:80]!r} twice; {_REMEDY}")
                names[other] = name
        return names


def _tied(text: str) -> dict[str, tuple[str, ...]]:
    try:
        data = parse(text)
    except ValueError as error:
        raise FileError(f"its list of tied tensors cannot be read ({error}); {_REMEDY}") from None
    lists = data.values() if isinstance(data, dict) else [None]
    if not all(isinstance(others, list) and all(isinstance(o, str) for o in others) for others in lists):
        raise FileError(f"its list of tied tensors is none; {_REMEDY}")
    return {name: tuple(others) for name, others in data.items()}


def class_name(model: nn.Module) -> str:
    """The name of a model's class, without its module, which depends on how a script is run."""
    return type(model).__name__


def _library_version() -> str:
    try:
        return version("secateur")
    except PackageNotFoundError:  # run from a folder, not installed
        return "unknown"


@cache
def storable(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype comes back from a file as it was."""
    try:
        back = safetensors.torch.load(safetensors.torch.save({"x": torch.empty(0, dtype=dtype)}))
    except (KeyError, ValueError, RuntimeError, SafetensorError):
        return False
    return back["x"].dtype == dtype


def write(path: Path, tensors: Mapping[str, Tensor], header: Header) -> None:
    """Write a file, and see that it can be opened: the format has limits that writing does not check."""
    metadata = header.metadata()
    safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
    with safe_open(path, framework="pt") as file:
        if file.metadata() != metadata or set(file.keys()) != set(tensors):
            raise FileError("it did not come back as it was written; try again")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open for reading."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FileError("this is a folder or a device, not a file")
    with safe_open(path, framework="pt") as file:
        yield file


@contextlib.contextmanager
def about(path: Any) -> Iterator[Path]:
    """Errors within say which file they are about, and are FileErrors, whatever they were."""
    try:
        yield Path(path)
    except SecateurError as error:
        raise FileError(f"{os.fspath(path)}: {error}") from error
    except SafetensorError as error:
        raise FileError(f"{os.fspath(path)}: {error}; {_REMEDY}") from error
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"{path!r}: {error}") from error
