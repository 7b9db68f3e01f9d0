"""Pruning while somebody else's loop trains: what is done as a value, when it is done by the optimizer's steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from secateur.arguments import NAMES, a_function, a_number, an_instance, an_int, check_fields, optional
from secateur.distributed import meet
from secateur.errors import TrainingError
from secateur.importance import Importance
from secateur.pipeline.apply import apply
from secateur.planning import Plan, Zeros, plan
from secateur.planning.targets import Target
from secateur.schedule.schedules import Course, Schedule, course, cubic, levels
from secateur.state.transaction import transaction
from secateur.surgery.holders import averages
from secateur.tracing import trace, unwrap
from secateur.tracing.graph import Graph
from secateur.training.dynamic import SparseMethod
from secateur.training.penalties import PenaltyMethod
from secateur.training.penalty import Penalty
from secateur.training.sparse_training import SparseTraining

Optimizer = torch.optim.Optimizer


@dataclass(eq=False)
class TrainingRun:
    """A model in training, and all that has to follow when it is cut."""

    model: nn.Module
    optimizer: Optimizer | None = None
    copies: Sequence[nn.Module] = ()  # averages of its weights
    plan: Plan | None = None  # all cuts so far as one

    def cut(self, made: Plan) -> None:
        """Cut the model, the optimizer's state and the copies: all or none."""
        made = _of_first_rank(made)
        if not made.axes:
            return
        if self.optimizer is not None:
            check_averages(self.model, self.copies)
        copies = [_averaged(copy) for copy in self.copies]
        with transaction(self.model, self.optimizer, *copies):
            apply(self.model, made, optimizer=self.optimizer)
            for copy in copies:
                apply(copy, made)
        self.plan = made if self.plan is None else self.plan.then(made)


def check_averages(model: nn.Module, copies: Sequence[nn.Module]) -> None:
    """Refuse an average of the weights of a model that nobody told of: it would be left behind by a cut."""
    if left := averages(model, but=copies):
        raise TrainingError(
            f"{left[0]} of {type(model).__name__} would be left behind when the model is cut; let it be cut along: "
            "begin(model, optimizer, copies=[…]). If it is that of another model, let go of it meanwhile"
        )


def _of_first_rank(made: Plan) -> Plan:
    """One plan for all processes that train a model: statistics of batch norms, which it may be made from, differ."""
    said = meet("Pruning: the plan", made.to_json())
    return made if len(set(said)) == 1 else replace(Plan.from_json(said[0]), example=made.example, others=made.others)


def _averaged(copy: nn.Module) -> nn.Module:
    """The model inside of timm's ModelEmaV3 and torch's AveragedModel, which hold it as `module`."""
    inside = getattr(copy, "module", None)
    return unwrap(inside if isinstance(inside, nn.Module) else copy)


class What(ABC):
    """Something that is done to a model while it is trained. `work` makes what does it, for one run."""

    cuts = True

    @abstractmethod
    def work(self, run: TrainingRun) -> Work:
        """Begin with an uncut model; the optimizer comes later."""


class Work(ABC):
    """What is under way in one run."""

    @abstractmethod
    def attach(self, run: TrainingRun) -> None:
        """The optimizer is there."""

    @abstractmethod
    def after(self, run: TrainingRun, steps: int) -> None:
        """So many steps have been taken; now the model may be cut."""

    @abstractmethod
    def log(self) -> dict[str, float]:
        """How far it got."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What changes."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """What `state` gave."""

    @abstractmethod
    def finish(self) -> None:
        """Nothing more happens."""


@dataclass(frozen=True, eq=False)
class Cuts(What):
    """Real cuts during training: every `every` steps a part of the way to the target, as the schedule says.

    >>> import secateur as sec
    >>> from secateur.schedule import linear
    >>> Cuts(torch.zeros(1, 4), sec.Macs(0.5), every=100, schedule=linear(3)).parts
    (0.3333333333333333, 0.6666666666666666, 1.0)
    """

    example: Any
    target: Target
    every: int
    schedule: Schedule | None = None
    importance: Importance | None = None
    protect: Sequence[str] = ()
    parts: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, every=an_int(1), schedule=optional(a_function("a function of a step")))
        object.__setattr__(self, "parts", levels(cubic(5) if self.schedule is None else self.schedule))

    def work(self, run: TrainingRun) -> Work:
        graph = trace(run.model, self.example)
        way = course(self.target, graph, self.parts)
        plan(graph, self.target, protect=self.protect)  # what cannot be reached is better known now
        return _Cutting(self, way, graph.macs(), graph.macs())


@dataclass(eq=False)
class _Cutting(Work):
    what: Cuts
    way: Course
    whole: int
    now: int
    done: int = 0

    def attach(self, run: TrainingRun) -> None:
        pass

    def finish(self) -> None:
        pass

    def after(self, run: TrainingRun, steps: int) -> None:
        while self.done < len(self.what.parts) and steps >= self.what.every * (self.done + 1):
            graph = trace(run.model, self.what.example)
            aim = self.way(self.what.parts[self.done], graph)
            run.cut(plan(graph, aim, importance=self.what.importance, protect=self.what.protect))
            self.now = trace(run.model, self.what.example, variants=False).macs()
            self.done += 1

    def log(self) -> dict[str, float]:
        return {"macs": float(self.now), "macs_part": self.now / self.whole, "cuts": float(self.done)}

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "now": self.now}

    def load(self, state: Mapping[str, Any]) -> None:
        self.done, self.now = int(state["done"]), int(state["now"])


@dataclass(frozen=True, eq=False)
class Learned(What):
    """A `Penalty` until the target is met after `steps` steps; then what is zero is cut.

    >>> import secateur as sec
    >>> Learned(torch.zeros(1, 4), sec.Macs(0.5), steps=1000).strength
    0.0001
    """

    example: Any
    target: Target
    steps: int
    method: PenaltyMethod | None = None
    strength: float = 1e-4
    only: Sequence[str] = ()
    protect: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, steps=an_int(1, 2**53), strength=a_number(above=0))

    def work(self, run: TrainingRun) -> Work:
        graph = trace(run.model, self.example)
        chosen = {"only": self.only, "protect": self.protect}
        penalty = Penalty(graph, self.method, strength=self.strength, target=self.target, steps=self.steps, **chosen)
        return _Learning(self, graph, penalty)


@dataclass(eq=False)
class _Learning(Work):
    what: Learned
    graph: Graph
    penalty: Penalty
    over: bool = False
    end: Any = None

    def attach(self, run: TrainingRun) -> None:
        self.finish()
        if not self.over:
            self.end = self.penalty.attach(run.model, run.optimizer)

    def after(self, run: TrainingRun, steps: int) -> None:
        if not self.over and steps >= self.what.steps:
            self.finish()
            run.cut(plan(trace(run.model, self.what.example), Zeros()))
            self.over = True

    def log(self) -> dict[str, float]:
        now, whole = self.penalty.macs(), self.graph.macs()
        return {"macs": float(now), "macs_part": now / whole, "strength": self.penalty.strength}

    def state(self) -> dict[str, Any]:
        return {"over": self.over, "penalty": self.penalty.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.over = bool(state["over"])
        self.penalty.load_state_dict(state["penalty"])

    def finish(self) -> None:
        if self.end is not None:
            self.end()
            self.end = None


@dataclass(frozen=True)
class Masks(What):
    """Zeros that move as a method says: `SparseTraining` in a loop that is not yours.

    >>> from secateur import training
    >>> Masks(training.RigL(0.9)).method.sparsity
    0.9
    """

    method: SparseMethod
    only: Sequence[str] = ()
    protect: Sequence[str] = ()
    cuts = False

    def __post_init__(self) -> None:
        known = an_instance(SparseMethod, "RigL(0.9), GMP(0.9) or the like")
        check_fields(self, TrainingError, method=known, only=NAMES, protect=NAMES)

    def work(self, run: TrainingRun) -> Work:
        return _Masking(SparseTraining(run.model, None, self.method, only=self.only, protect=self.protect))


@dataclass(eq=False)
class _Masking(Work):
    sparse: SparseTraining

    def attach(self, run: TrainingRun) -> None:
        self.sparse.attach(run.optimizer)

    def after(self, run: TrainingRun, steps: int) -> None:
        pass  # the optimizer's steps drive it

    def log(self) -> dict[str, float]:
        return {"sparsity": self.sparse.sparsity}

    def state(self) -> dict[str, Any]:
        return self.sparse.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        self.sparse.load_state_dict(state)

    def finish(self) -> None:
        self.sparse.finish()


@dataclass(frozen=True)
class Floor:
    """Training stops when a metric falls below a value.

    >>> Floor("eval_accuracy", 0.9).missed({"eval_accuracy": 0.8}), Floor("eval_accuracy", 0.9).missed({})
    (True, False)
    """

    metric: str
    value: float

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, metric=an_instance(str, "the name of a metric"), value=a_number())

    def missed(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the metric is there and too low, or no number."""
        return self.metric in metrics and not float(metrics[self.metric]) >= self.value
