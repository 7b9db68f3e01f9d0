"""The file: safetensors, whose metadata has one entry, `secateur`, with JSON that says how to rebuild the model.

    version  of this layout
    library  that wrote it, its version
    class    of the model, its name
    plan     that leads here from the full size, or null
    tied     {stored name: [its other names]}
    biases   [names of layers that were given a bias which the class does not give them]; may be absent
    origin   how the full-size model is built, or null; may be absent
    unbuilt  why that is not said; may be absent
    tables   [names of tensors that no state dict has, where building would make others]; may be absent
    training whether it was in training mode; may be absent
    frozen   [names of parameters that require no gradient]; may be absent
    generation  how it generates by default, as Transformers writes it, or null; may be absent

One entry only, because the format does not fix the order of several: the same model makes the same bytes. Tensors that
are mostly zeros are packed (`packed`).
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from secateur.arguments import shown
from secateur.distributed import plain_kind
from secateur.errors import FileError, SecateurError
from secateur.io.packed import Unpacking
from secateur.io.settings import Settings
from secateur.planning.json import from_data, origin_data, origin_from, parse, to_data
from secateur.planning.plans import Plan
from secateur.tracing.origins import Origin

VERSION = 1
ENTRY = "secateur"
_REMEDY = "it is damaged or was not written by secateur.save"


@dataclass(frozen=True)
class Header:
    """What a file says about its tensors."""

    class_name: str
    plan: Plan | None
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    origin: Origin | None = None
    unbuilt: str = ""
    tables: tuple[str, ...] = ()
    training: bool = False
    settings: Settings = field(default_factory=Settings)

    def metadata(self) -> dict[str, str]:
        data = {
            "version": VERSION,
            "library": library_version(),
            "class": self.class_name,
            "plan": None if self.plan is None else to_data(replace(self.plan, origin=None)),
            "tied": {name: list(others) for name, others in self.tied.items()},
            "biases": list(self.biases),
            "origin": None if self.origin is None else origin_data(self.origin),
            "unbuilt": self.unbuilt,
            "tables": list(self.tables),
            "training": self.training,
            "frozen": None if self.settings.frozen is None else list(self.settings.frozen),
            "generation": self.settings.generation,
        }
        return {ENTRY: json.dumps(data, separators=(",", ":"), sort_keys=True)}

    @staticmethod
    def read(metadata: Mapping[str, str] | None) -> Header:
        """The header in a file's metadata; refused where it is not what `metadata` makes."""
        if not metadata or ENTRY not in metadata:
            raise FileError(f"it holds tensors but no plan; {_REMEDY}")
        try:
            data = parse(metadata[ENTRY])
        except ValueError as error:
            raise FileError(f"its metadata cannot be read: {error}; {_REMEDY}") from None
        fields = {"version", "library", "class", "plan", "tied"}
        if not isinstance(data, dict) or not fields <= set(data) or not isinstance(data["class"], str):
            raise FileError(f"its metadata is not that of a model; {_REMEDY}")
        if type(data["version"]) is not int or data["version"] != VERSION:
            versions = f"it has layout {shown(data['version'])}, this library reads {VERSION}"
            raise FileError(f"{versions}; load it with what wrote it, version {shown(data['library'])}")
        plan = None if data["plan"] is None else from_data(data["plan"])
        ties = data["tied"].items() if isinstance(data["tied"], dict) else [("", None)]
        tied = {name: _names(others, "tied tensors") for name, others in ties}
        origin = None if data.get("origin") is None else origin_from(data["origin"])
        why, training = data.get("unbuilt", ""), data.get("training", False)
        if type(why) is not str or type(training) is not bool:
            raise FileError(f"its metadata is not that of a model; {_REMEDY}")
        plan = None if plan is None else replace(plan, origin=origin)
        biases = _names(data.get("biases", []), "added biases")
        tables = _names(data.get("tables", []), "tables")
        settings = Settings.read(data.get("frozen"), data.get("generation"))
        return Header(data["class"], plan, tied, biases, origin, why[:500], tables, training, settings)

    def source(self, stored: set[str]) -> dict[str, str]:
        """{each name, tied ones too: the stored name that holds its tensor}."""
        names = {name: name for name in stored}
        for name, others in self.tied.items():
            if name not in stored:
                raise FileError(f"it ties {shown(name)}, which it does not hold; {_REMEDY}")
            for other in others:
                if other in names:
                    raise FileError(f"it holds {shown(other)} twice; {_REMEDY}")
                names[other] = name
        return names


def _names(data: Any, what: str) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(name, str) for name in data):
        raise FileError(f"its list of {what} is none; {_REMEDY}")
    return tuple(data)


def class_name(model: nn.Module) -> str:
    """The name of a model's class, without its module, which depends on how a script is run."""
    return plain_kind(type(model)).__name__


def library_version() -> str:
    """The version of this library."""
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
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:  # what the system says is within
        raise FileError(f"it could not be written: {error}; is the disk full?") from error
    with safe_open(path, framework="pt") as file:
        if file.metadata() != metadata or set(file.keys()) != set(tensors):
            raise FileError("it did not come back as it was written; try again")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Unpacking]:
    """A safetensors file, open for reading."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FileError("this is a folder or a device, not a file")
    with safe_open(path, framework="pt") as file:
        yield Unpacking(file)


def check_order(path: object, model: object, call: str) -> None:
    """Refuse a model where the path goes, as when the two are swapped."""
    if isinstance(path, nn.Module):
        raise FileError(
            f"it is {call}: got a {type(model).__name__} as the model and a {type(path).__name__} as the path"
        )


@contextlib.contextmanager
def about(path: Any) -> Iterator[Path]:
    """Errors within say which file they are about, and are FileErrors, whatever they were."""
    try:
        str(path).encode()  # safetensors opens no other paths
        yield Path(path)
    except SecateurError as error:
        told = str(error).startswith(f"{path}: ")
        raise FileError(f"{error}" if told else f"{path}: {error}") from error
    except SafetensorError as error:
        raise FileError(f"{path}: {error}; {_REMEDY}") from error
    except UnicodeEncodeError as error:
        raise FileError(f"{path!r}: its name is not UTF-8; give it another") from error
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"{path!r}: {error}") from error
