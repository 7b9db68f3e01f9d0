"""Files: plans as JSON, models with their plan, and `--weights`, which may be any safetensors."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur.cli.exits import InputError, UsageError
from secateur.cli.screen import count, size, table
from secateur.errors import FileError, PlanError
from secateur.io import load
from secateur.io.file import Header, about, opened
from secateur.io.tensors import State
from secateur.io.tensors import fill as put
from secateur.planning import Plan

COSTS = (("macs", "MACs", count), ("params", "parameters", count), ("bytes", "weights", size))  # of a plan
_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".th", ".tar"}


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
        with about(self.path) as source, opened(source) as file:
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
        tensors = {name: (held.dtype(name), held.shape(name)) for name in held.keys()}  # noqa: SIM118
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
        **{key: asdict(getattr(plan, key)) for key, _, _ in COSTS},
        "axes": [
            {"name": axis.name, "size": axis.size, "kept": len(axis.keep), "exact": axis.exact} for axis in plan.axes
        ],
        "attributes": [{"place": str(place), "was": was, "value": value} for place, was, value in plan.attributes],
    }


def costs_table(plan: Plan, name: str = "") -> Any:
    """MACs, parameters and bytes before and after."""
    rows = []
    for key, what, say in COSTS:
        before, after = getattr(plan, key).before, getattr(plan, key).after
        rows.append((what, say(before), say(after), f"{after / max(before, 1):.1%}"))
    columns = (name, "before", "after", "left")
    return table(columns, rows, numbers=columns[1:])


def check_name(path: Path) -> None:
    """Refuse, before anything is built, a file that is not there or not of the format."""
    if path.suffix.lower() in _PICKLES:
        line = (
            "import torch, safetensors.torch as st; "
            f"st.save_file(torch.load({path.name!r}, weights_only=True), {path.with_suffix('.safetensors').name!r})"
        )
        raise UsageError(f'{path} is a pickle, which can run code when opened; convert it: python -c "{line}"')
    if not path.is_file():
        raise UsageError(f"--weights {path}: there is no such file")


def fill(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into a model; one that Secateur saved is cut as the file says first."""
    check_name(path)
    with about(path) as source, opened(source) as file:
        saved = "secateur" in (file.metadata() or {})
        tensors = {} if saved else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if saved:
        load(path, model)
        return
    state = State.of(model)
    unknown = sorted(set(tensors) - state.names())
    lacking = [group[0] for group in state.groups() if not any(name in tensors for name in group)]
    for names, problem in ((unknown, "the model lacks"), (lacking, "it lacks")):
        if names:
            raise InputError(f"{path}: {problem} {', '.join(names[:3])} ({len(names)} in all); is it of this model?")
    for name, tensor in tensors.items():
        here = state.tensors.get(name)
        if here is not None and here.shape != tensor.shape:
            sizes = f"{list(tensor.shape)} in the file, {list(here.shape)} in the model"
            raise InputError(f"{path}: {name} is {sizes}; build the model as it was trained, in a file.py:callable")
    put(model, tensors)
