"""A file that `prune` wrote: a plan as JSON, or a model with its plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from secateur.cli.exits import InputError, UsageError
from secateur.cli.screen import count, size, table
from secateur.errors import FileError, PlanError
from secateur.io.file import Header, about, opened
from secateur.plan import Plan


@dataclass(frozen=True)
class Saved:
    """What a file holds."""

    path: Path
    plan: Plan | None
    class_name: str | None = None
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tensors: dict[str, tuple[str, tuple[int, ...]]] | None = None  # dtype and shape; None: the file is a plan

    def tensor(self, name: str) -> Tensor:
        """One of its tensors."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(name)


def read(path: Path) -> Saved:
    """Read a file that Secateur wrote, or any other safetensors file."""
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    with about(path), path.open("rb") as file:
        beginning = file.read(9)
    if beginning.lstrip()[:1] in (b"{", b"[") and int.from_bytes(beginning[:8], "little") > path.stat().st_size:
        return _plan(path)  # as safetensors, which begin with the length of their header, it would be longer than it is
    with about(path) as source, opened(source) as held:
        slices = {name: held.get_slice(name) for name in sorted(held.keys())}
        tensors = {name: (str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()}
        metadata = held.metadata()
        if "secateur" not in (metadata or {}):
            return Saved(path, None, tensors=tensors)
        header = Header.read(metadata)
    return Saved(path, header.plan, header.class_name, dict(header.tied), tensors)


def _plan(path: Path) -> Saved:
    try:
        return Saved(path, Plan.from_json(path.read_bytes().decode("utf-8")))
    except (PlanError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from error
    except OSError as error:
        raise FileError(f"{path}: {error}") from error


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan in figures."""
    return {
        **{
            name: {"before": getattr(plan, name).before, "after": getattr(plan, name).after}
            for name in ("macs", "params", "bytes")
        },
        "axes": [
            {"name": axis.name, "size": axis.size, "kept": len(axis.keep), "exact": axis.exact} for axis in plan.axes
        ],
        "attributes": [{"place": str(place), "was": was, "value": value} for place, was, value in plan.attributes],
    }


def costs_table(plan: Plan, name: str = "") -> Any:
    """MACs, parameters and bytes before and after."""
    costs = (("MACs", count, plan.macs), ("parameters", count, plan.params), ("weights", size, plan.bytes))
    rows = [
        (what, say(change.before), say(change.after), f"{change.after / max(change.before, 1):.1%}")
        for what, say, change in costs
    ]
    columns = (name, "before", "after", "left")
    return table(columns, rows, numbers=columns[1:])
