"""Every public name with an ordinary call of it, and values that nobody should pass."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import secateur as sec
from secateur import schedule, training


def net() -> nn.Sequential:
    """A model with a batch norm and a residual block."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 6, bias=False), nn.Parameter(torch.randn(6, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores, which = self.gate(x).softmax(-1).topk(2)
        return x + torch.einsum("tk,tkoi,ti->to", scores, self.up[which], x)


def data(count: int = 4) -> list[Tensor]:
    """Batches."""
    return [torch.randn(16, 4, generator=torch.Generator().manual_seed(n)) for n in range(count)]


def labelled() -> list[tuple[Tensor, Tensor]]:
    """Batches with labels."""
    return [(batch, torch.zeros(16, dtype=torch.long)) for batch in data()]


def graph(model: nn.Module | None = None) -> sec.Graph:
    """That of a model."""
    return sec.trace(net() if model is None else model, data()[0])


@cache
def _graph() -> tuple[nn.Module, sec.Graph]:
    model = net()
    return model, graph(model)


def _planned(importance: Any) -> Any:
    return sec.plan(_graph()[1], sec.Ratio(0.5), importance=importance)


def _targeted(target: Any) -> Any:
    return sec.plan(_graph()[1], target)


def _scoped(scope: Any) -> Any:
    return sec.plan(_graph()[1], sec.Macs(0.5), scope=scope)


def _compensated(recipe: Any) -> Any:
    return sec.apply(net(), _targeted(sec.Ratio(0.5)), verify=False, compensate=recipe)


def _masked(pattern: Any) -> Any:
    return pattern.mask(torch.rand(8, 8))


def _sparsified(**how: Any) -> Any:
    return sec.sparsify(net(), data(), **{"pattern": sec.Unstructured(0.5), **how})


def _trained(method: Any) -> Any:
    model = net()
    return training.SparseTraining(model, torch.optim.SGD(model.parameters(), 0.1), method)


def _pruned(what: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruning = training.Pruning(what)
    pruning.begin(model, optimizer)
    for batch in data(2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        pruning.step()
    pruning.finish()


def _penalised(method: Any) -> Tensor:
    model = net()
    return sec.Penalty(graph(model), method, target=sec.Macs(0.5), steps=40)(model)


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    save_file(net().state_dict(), folder / "model.safetensors")
    return folder


def _file() -> str:
    path = str(Path(tempfile.mkdtemp(dir=FOLDER)) / "net.safetensors")
    sec.save(net(), path)
    return path


FOLDER: str | None = None  # where files go


@dataclass(frozen=True)
class Call:
    """A public name, arguments with which it works, and what is then done with what it gives."""

    function: Callable[..., Any]
    make: Callable[[], dict[str, Any]] = dict
    use: Callable[[Any], Any] = lambda made: made

    def names(self) -> list[str]:
        """The parameters."""
        return list(self.make())


def _model_and(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": net(), **copy.deepcopy(more)}


def _plan_arguments() -> dict[str, Any]:
    return {
        "graph": graph(),
        "target": sec.Ratio(0.5),
        "importance": None,
        "exact": False,
        "protect": (),
        "round_to": 1,
        "scope": None,
        "loadable": False,
    }


def _compress_arguments() -> dict[str, Any]:
    more = {"importance": None, "exact": False, "protect": (), "round_to": 1, "ridge": 1e-3, "bias": False}
    more |= {"loadable": False, "verify": True, "timed": False, "blocks": 0, "rank": (), "joint": 0, "shard": None}
    return {"model": net(), "example": data()[0], "target": sec.Macs(0.5), "batches": data(), **more}


def _recover_arguments() -> dict[str, Any]:
    model = net()
    teacher = copy.deepcopy(model)
    sec.apply(model, sec.plan(graph(model), sec.Ratio(0.5)))
    more = {"minutes": 0.02, "steps": 2, "task": None, "example": None, "checkpoint": None, "dtype": None, "seed": 0}
    return {"model": model, "teacher": teacher, "batches": data(), **more}


def _iterate_arguments() -> dict[str, Any]:
    more = {"schedule": schedule.linear(1), "floor": None, "checkpoint": None, "cut": schedule.cut, "importance": None}
    functions = {"fit": lambda model: None, "evaluate": lambda model: 0.5}
    return {"model": net(), "example": data()[0], "target": sec.Ratio(0.5), **functions, **more}


def _sparsify_arguments() -> dict[str, Any]:
    more = {"method": None, "protect": (), "include": (), "spread": None, "held_back": None, "streams": False}
    more |= {"statistics": True, "masks": False, "shard": None}
    return {"model": net(), "batches": data(), "pattern": sec.NM(2, 4), **more}


def _sparsify_checkpoint_arguments() -> dict[str, Any]:
    folder = _folder()
    more = {"method": None, "protect": (), "include": (), "spread": None, "held_back": None}
    given = {"folder": folder, "pattern": sec.NM(2, 4), "batches": data(), "out": folder / "sparse"}
    return {**given, "model": net(), **more}


def _sweep_arguments() -> dict[str, Any]:
    more = {"targets": None, "batches": None, "ratios": (0.5,), "axis_ratio": None, "importance": None}
    return {"model": net(), "example": data()[0], "metric": None, **more, "exact": False, "protect": (), "round_to": 1}


def _linear_graph() -> tuple[nn.Module, sec.Graph]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return model, graph(model)


def _rotate_arguments() -> dict[str, Any]:
    model, found = _linear_graph()
    return {"model": model, "graph": found, "axis": found.axes[0], "matrix": torch.eye(3).flip(0)}


def _apply_arguments() -> dict[str, Any]:
    model = net()
    made = sec.plan(graph(model), sec.Ratio(0.5))
    return {"model": model, "plan": made, "optimizer": None, "verify": True, "compensate": None, "shard": None}


def _sparse_training_arguments() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    more = {"only": (), "protect": (), "seed": 0}
    return {"model": model, "optimizer": optimizer, "method": training.Static(0.5), **more}


def _penalty_arguments() -> dict[str, Any]:
    more = {"strength": 1e-4, "target": sec.Macs(0.5), "steps": 40, "only": (), "protect": ()}
    return {"graph": graph(), "method": None, **more}


def _checkpoint_arguments() -> dict[str, Any]:
    folder = _folder()
    return {"folder": folder, "plan": sec.plan(graph(), sec.Ratio(0.5)), "out": folder / "small", "model": None}


def _compress_checkpoint_arguments() -> dict[str, Any]:
    folder = _folder()
    more = {"importance": None, "exact": False, "protect": (), "round_to": 1, "ridge": 1e-3}
    given = {"folder": folder, "target": sec.Macs(0.5), "batches": data(), "out": folder / "small"}
    return {**given, "example": None, "model": net(), **more, "loadable": False, "verify": True}


def _kept(**values: Any) -> Callable[[], dict[str, Any]]:
    return lambda: dict(values)


_EXAMPLE = torch.zeros(1, 4)
_PATTERN = {"pattern": 0.5, "begin": 0, "end": 10, "every": 2}
_GROWN = {"sparsity": 0.5, "distribution": training.ERK(), "every": 5, "end": 10, "drop": 0.3}

CALLS: dict[str, Call] = {
    "trace": Call(sec.trace, _model_and(example=_EXAMPLE, variants=False, make=None)),
    "macs": Call(sec.macs, _model_and(example=_EXAMPLE)),
    "latency": Call(sec.latency, _model_and(example=_EXAMPLE, seconds=0.001)),
    "compare": Call(sec.compare, lambda: {"before": net(), "after": net(), "example": _EXAMPLE, "seconds": 0.001}),
    "plan": Call(sec.plan, _plan_arguments),
    "apply": Call(sec.apply, _apply_arguments),
    "compress": Call(sec.compress, _compress_arguments),
    "iterate": Call(sec.iterate, _iterate_arguments),
    "sparsify": Call(sec.sparsify, _sparsify_arguments),
    "sweep": Call(sec.sweep, _sweep_arguments),
    "outcome": Call(sec.outcome, _model_and()),
    "recover": Call(sec.recover, _recover_arguments),
    "rotations": Call(sec.rotations, lambda: {"graph": _linear_graph()[1]}),
    "rotate": Call(sec.rotate, _rotate_arguments),
    "factor": Call(sec.factor, _model_and(names="3", batches=data(), optimizer=None)),
    "blocks": Call(sec.blocks, lambda: {"graph": graph()}),
    "plan_depth": Call(
        sec.plan_depth,
        lambda: {
            "graph": graph(nn.Sequential(_Residual(), _Residual(), nn.Linear(4, 2))),
            "remove": 1,
            "batches": data(),
            "protect": (),
            "loadable": False,
        },
    ),
    "plan_experts": Call(
        sec.plan_experts, lambda: {"graph": graph(_Mixture()), "keep": 3, "batches": data(), "loadable": False}
    ),
    "save": Call(sec.save, lambda: {"model": net(), "path": _file(), "overwrite": True, "sharded": False}),
    "load": Call(sec.load, lambda: {"path": _file(), "model": net(), "make": None, "shard": None}),
    "cut_checkpoint": Call(sec.cut_checkpoint, _checkpoint_arguments),
    "compress_checkpoint": Call(sec.compress_checkpoint, _compress_checkpoint_arguments),
    "sparsify_checkpoint": Call(sec.sparsify_checkpoint, _sparsify_checkpoint_arguments),
    "Data": Call(sec.Data, lambda: {"batches": data(), "samples": 16, "tokens": 64, "minutes": 1.0}, list),
    "Penalty": Call(sec.Penalty, _penalty_arguments),
    "Distill": Call(
        sec.Distill,
        lambda: {"teacher": net(), "temperature": 2.0, "alpha": 0.5, "dim": -1, "task": None},
    ),
    "Macs": Call(sec.Macs, _kept(amount=0.5), _targeted),
    "Params": Call(sec.Params, _kept(amount=0.5), _targeted),
    "Bytes": Call(sec.Bytes, _kept(amount=0.5), _targeted),
    "Latency": Call(sec.Latency, _kept(amount=1.0), _targeted),
    "Ratio": Call(sec.Ratio, _kept(ratio=0.5), _targeted),
    "Global": Call(sec.Global, _kept(normalise="mean"), _scoped),
    "Isomorphic": Call(sec.Isomorphic, _kept(normalise="mean"), _scoped),
    "LeastSquares": Call(
        sec.LeastSquares,
        lambda: {"batches": data(), "ridge": 1e-3, "bias": False, "statistics": True, "joint": 0},
        _compensated,
    ),
    "Constants": Call(sec.Constants, lambda: {"batches": data(), "bias": False, "statistics": True}, _compensated),
    "Statistics": Call(sec.Statistics, lambda: {"batches": data()}, _compensated),
    "Activation": Call(sec.Activation, lambda: {"batches": data()}, _planned),
    "Wanda": Call(sec.Wanda, lambda: {"batches": data()}, _planned),
    "Reconstruction": Call(sec.Reconstruction, lambda: {"batches": data(), "ridge": 1e-3}, _planned),
    "Taylor": Call(sec.Taylor, lambda: {"batches": labelled(), "loss": F.cross_entropy}, _planned),
    "Hessian": Call(sec.Hessian, lambda: {"batches": labelled(), "loss": F.cross_entropy}, _planned),
    "Magnitude": Call(sec.Magnitude, _kept(p=2.0), _planned),
    "LAMP": Call(sec.LAMP, _kept(p=2.0), _planned),
    "FPGM": Call(sec.FPGM, _kept(p=2.0), _planned),
    "Random": Call(sec.Random, _kept(seed=0), _planned),
    "Sum": Call(
        lambda term, normalise: sec.Sum(term, normalise=normalise),
        _kept(term=(sec.Magnitude(), 0.5), normalise="mean"),
        _planned,
    ),
    "ADMM": Call(
        sec.ADMM,
        _kept(ridge=None, start=0.03, growth=1.8, rounds=2, steps=1, refits=2, dense=True),
        lambda method: _sparsified(method=method),
    ),
    "SparseGPT": Call(sec.SparseGPT, _kept(ridge=0.01, columns=4), lambda method: _sparsified(method=method)),
    "RIA": Call(sec.RIA, _kept(power=0.5), lambda method: _sparsified(method=method)),
    "Unstructured": Call(sec.Unstructured, _kept(sparsity=0.5), _masked),
    "NM": Call(sec.NM, _kept(n=2, m=4), _masked),
    "Block": Call(sec.Block, _kept(height=2, width=1, sparsity=0.5), _masked),
    "training.GReg": Call(training.GReg, _kept(grow=0.1), _penalised),
    "training.HalfSpace": Call(training.HalfSpace, _kept(epsilon=0.0), _penalised),
    "training.Polarization": Call(training.Polarization, _kept(t=1.2), _penalised),
    "training.SparseTraining": Call(training.SparseTraining, _sparse_training_arguments),
    "training.GMP": Call(training.GMP, _kept(**_PATTERN), _trained),
    "training.Movement": Call(training.Movement, _kept(**_PATTERN), _trained),
    "training.Rewinding": Call(training.Rewinding, _kept(pattern=0.5, rounds=2, every=5, to=0), _trained),
    "training.SRSTE": Call(training.SRSTE, _kept(pattern=sec.NM(2, 4), decay=2e-4), _trained),
    "training.Static": Call(training.Static, _kept(sparsity=0.5, distribution=training.ERK()), _trained),
    "training.SET": Call(training.SET, _kept(**_GROWN), _trained),
    "training.RigL": Call(training.RigL, _kept(**_GROWN), _trained),
    "training.Pruning": Call(training.Pruning, lambda: {"what": training.Masks(training.Static(0.5)), "floor": None}),
    "training.Cuts": Call(
        training.Cuts,
        lambda: {
            "example": _EXAMPLE,
            "target": sec.Ratio(0.5),
            "every": 1,
            "schedule": schedule.linear(1),
            "importance": None,
            "protect": (),
        },
        _pruned,
    ),
    "training.Learned": Call(
        training.Learned,
        lambda: {
            "example": _EXAMPLE,
            "target": sec.Macs(0.5),
            "steps": 40,
            "method": None,
            "strength": 1e-4,
            "only": (),
            "protect": (),
        },
        _pruned,
    ),
    "training.Masks": Call(
        training.Masks, lambda: {"method": training.Static(0.5), "only": (), "protect": ()}, _pruned
    ),
    "training.Floor": Call(
        training.Floor, _kept(metric="accuracy", value=0.5), lambda floor: floor.missed({"accuracy": 0.4})
    ),
    "schedule.linear": Call(schedule.linear, _kept(steps=2), lambda made: made(1)),
    "schedule.cubic": Call(schedule.cubic, _kept(steps=2), lambda made: made(1)),
    "schedule.levels": Call(schedule.levels, lambda: {"schedule": schedule.linear(2)}),
    "schedule.cut": Call(
        schedule.cut,
        lambda: {
            "model": net(),
            "example": _EXAMPLE,
            "target": sec.Ratio(0.5),
            "importance": None,
            "exact": False,
            "protect": (),
            "round_to": 1,
            "loadable": False,
        },
    ),
}


def _used_up() -> Iterator[Tensor]:
    made = iter(data(1))
    next(made)
    return made


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "object": object,
    "class": lambda: dict,
    "-1": lambda: -1,
    "0": lambda: 0,
    "True": lambda: True,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "huge": lambda: 10**400,
    "huge float": lambda: 1e300,
    "empty text": lambda: "",
    "text": lambda: "a",
    "bytes": lambda: b"a",
    "empty list": list,
    "empty tuple": tuple,
    "empty dict": dict,
    "list of None": lambda: [None],
    "used up": _used_up,
    "module": lambda: nn.Linear(3, 3),
    "modules": lambda: [nn.Linear(3, 3)],
    "tensor": lambda: torch.zeros(3),
    "empty tensor": lambda: torch.zeros(0, 4),
    "function": lambda: lambda a: a,
    "function of none": lambda: lambda: 3,
}

# functions of the user's, which get the model and may raise what they like
OWN_ERRORS = {"fit", "evaluate", "cut", "metric"}

# what others make, and users read
RESULTS = {"Graph", "Axis", "Blocked", "Site", "Unseen", "Plan", "AxisPlan", "Compressed", "Outcome", "Recovered"}
RESULTS |= {"ResidualBlock", "Rotation", "Sparsified", "Context", "Criterion", "Examples"}
RESULTS |= {"training.Recovered", "training.Trained", "training.SparseMethod"}
RESULTS |= {"schedule.Iteration", "schedule.Round", "schedule.Schedule"}

# what is refused, or done, at once
QUICK = {"Data", "Distill", "NM", "Unstructured", "Block", "outcome", "Magnitude", "LAMP", "FPGM", "Random", "Macs"}
QUICK |= {"Params", "Bytes", "Ratio", "Global", "Isomorphic", "schedule.levels", "schedule.linear", "schedule.cubic"}
QUICK |= {f"training.{name}" for name in ("Floor", "Pruning", "Static", "GMP", "Movement", "Rewinding", "SRSTE")}
QUICK |= {f"training.{name}" for name in ("SET", "RigL", "SparseTraining")}

# what takes seconds, and has others that stand for it
LONG = {"compare", "Latency", "plan_depth", "plan_experts", "cut_checkpoint", "compress_checkpoint", "schedule.cut"}
LONG |= {"training.Cuts", "training.Learned", "Hessian", "Constants", "iterate"}
