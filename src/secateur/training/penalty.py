"""Learn what to cut: a penalty that makes whole positions of axes zero, in any training loop."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.arguments import Rule, a_number, an_instance, an_int, check, optional
from secateur.errors import TrainingError
from secateur.importance import Context
from secateur.planning import plan
from secateur.planning.names import Named, parts_of, runs_through
from secateur.planning.targets import Target
from secateur.planning.zeros import can_die
from secateur.schedule.schedules import course, cubic
from secateur.tracing import unwrap
from secateur.tracing.graph import GRAPH, Axis, Graph
from secateur.tracing.roles import roles
from secateur.training.groups import Groups
from secateur.training.optimizers import check_gradients, check_knows, hooked, inner
from secateur.training.penalties import GroupLasso, PenaltyMethod, View

_SETTLED = 0.3  # the part of the steps before anything is made zero
_DONE = 0.8  # the part of the steps after which nothing more is
_STAGES = 20  # in between
_AHEAD, _BEHIND = 1 / 1.3, 1.3  # what the strength is multiplied with
_REST = 1e-3  # of what the doomed positions had of all weights, squared, that should be left when they are done
_STEPS = Rule(an_int(_STAGES).says, an_int(_STAGES, 2**53).holds)
_RANGE = 1e4  # the strength stays within this factor of what was asked for


class Penalty:
    """A term of the loss under which positions of axes become zero, to be cut by `Zeros` without any change.

    >>> import secateur as sec
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> penalty = sec.Penalty(sec.trace(net, torch.zeros(1, 4)), target=sec.Macs(0.5), steps=100)
    >>> optimizer, x = torch.optim.SGD(net.parameters(), 0.1), torch.randn(64, 4)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     (nn.functional.mse_loss(net(x), x[:, :2]) + penalty(net)).backward()
    ...     optimizer.step()
    ...     penalty.step(net)
    >>> _ = sec.apply(net, sec.plan(sec.trace(net, x), sec.Zeros()))
    >>> net[0].out_features
    8

    All weights that go with a position are one group, wherever they are; `method` says what is done to groups:
    `training.GroupLasso()`, `GReg()`, `HalfSpace()` or `Polarization()`. With a `target`, such as `Macs(0.5)`, and the
    number of `steps` until it is to be met, the weakest positions that have to go are set to zero, a few at a time,
    and stay so; meanwhile the strength is raised as long as they are not small enough and lowered when they are. Only
    positions that can go without a change are taken: of exact axes, or of those of them that `only` names.

    `attach(model, optimizer)` does both calls at each step of the optimizer, in loops that are not yours.
    """

    def __init__(
        self,
        graph: Graph,
        method: PenaltyMethod | None = None,
        *,
        strength: float = 1e-4,
        target: Target | None = None,
        steps: int | None = None,
        only: Named | Sequence[Named] = (),
        protect: Named | Sequence[Named] = (),
    ) -> None:
        self.method = GroupLasso() if method is None else method
        _check(graph, self.method, strength, target, steps)
        self._graph, self._target, self._steps = graph, target, steps
        self._groups = Groups(graph, _axes(graph, self.method, only, protect))
        self._shapes = self._groups.shapes
        self._way = None if target is None else course(target, graph, [cubic(_STAGES)(k + 1) for k in range(_STAGES)])
        self.strength = self._asked = strength
        self._step = 0
        self._dead = {axis: torch.zeros(axis.size, dtype=torch.bool) for axis in self._groups.axes}
        self._doomed = {axis: torch.zeros(axis.size, dtype=torch.bool) for axis in self._groups.axes}
        self._had = math.nan  # the doomed positions' part of all weights, squared, when they were named
        self._before: dict[str, Tensor] = {}
        if target is not None:
            self._name_doomed(self._parameters(graph.model))

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty of a model, to be added to its loss."""
        parameters = self._parameters(model)
        if self.method.half_space is not None:
            self._before = {name: p.detach().clone() for name, p in parameters.items()}
        squares, scales = self._groups.squares(parameters), self._groups.scales(parameters)
        total = next(iter(squares.values())).new_zeros(())
        for axis in self._groups.axes:
            one, sizes = squares[axis], self._groups.sizes[axis].to(total)
            view = View(one, sizes, scales.get(axis), self._doomed[axis].to(one.device), self._step)
            total = total + self.method(view).to(total)
        if self._step == 0 and not bool(total.isfinite()):
            raise TrainingError(f"the penalty of {type(unwrap(model)).__name__} is {total.item()}: its weights are")
        return self.strength * total

    def step(self, model: nn.Module) -> None:
        """After a step of the optimizer: what has to be zero is set to zero, the strength follows."""
        parameters = self._parameters(model)
        self._step += 1
        if self.method.half_space is not None and self._before:
            self._project(parameters, self.method.half_space)
        stage = self._stage()
        if stage is not None:
            self._reach(parameters, stage)
        self._groups.zero(parameters, self._dead)

    def attach(self, model: nn.Module, optimizer: Any) -> Callable[[], None]:
        """Do both at each step of the optimizer: the gradient of the penalty is added before, `step` comes after.

        The function that is returned ends that.
        """
        found = inner(optimizer)
        check_knows(found, self._parameters(model))

        def add() -> None:
            if not self._step:
                check_gradients(found)
            with torch.enable_grad():
                self(model).backward()

        return hooked(found, add, lambda: self.step(model))

    @property
    def zeros(self) -> dict[str, int]:
        """How many positions of each axis are zero for good."""
        return {axis.name: int(dead.sum()) for axis, dead in self._dead.items()}

    def macs(self) -> int:
        """What is left to compute on the example once the positions that are zero are cut."""
        return self._graph.macs({axis.atom: axis.size - int(dead.sum()) for axis, dead in self._dead.items()})

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, to go on from."""
        masks = {axis.name: (self._dead[axis].clone(), self._doomed[axis].clone()) for axis in self._groups.axes}
        return {"step": self._step, "strength": self.strength, "had": self._had, "positions": masks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, of a penalty on the same axes."""
        found = state.get("positions", {})
        sizes = {axis.name: axis.size for axis in self._groups.axes}
        if {name: len(dead) for name, (dead, _) in found.items()} != sizes:
            raise TrainingError("this is no state of a penalty on these axes; make it with the same graph and keywords")
        self._step, self.strength, self._had = int(state["step"]), float(state["strength"]), float(state["had"])
        for axis in self._groups.axes:
            self._dead[axis], self._doomed[axis] = (mask.clone() for mask in found[axis.name])

    def _parameters(self, model: nn.Module) -> dict[str, Tensor]:
        found = dict(unwrap(model).named_parameters(remove_duplicate=False))
        for name, shape in self._shapes.items():
            if name not in found or tuple(found[name].shape) != shape:
                now = tuple(found[name].shape) if name in found else "not there"
                raise TrainingError(f"{name} was {shape} when the graph was traced, is {now}; trace it anew")
        return {name: found[name] for name in self._shapes}

    # a target --------------------------------------------------------------------------------------------------

    def _stage(self) -> int | None:
        """Which part of the way, from 1, is to be done after this step; None at steps when nothing is."""
        if self._steps is None:
            return None
        first, last = _SETTLED * self._steps, _DONE * self._steps
        due = [k for k in range(1, _STAGES + 1) if round(first + (last - first) * k / _STAGES) == self._step]
        return due[-1] if due else None

    def _reach(self, parameters: Mapping[str, Tensor], stage: int) -> None:
        """Set the weakest positions to zero, as many as the way to the target asks for by now."""
        assert self._way is not None
        part = cubic(_STAGES)(stage)
        for axis, gone in self._weakest(parameters, self._way(part, self._graph)).items():
            self._dead[axis] |= gone
        self._control(parameters, stage)
        self._name_doomed(parameters)

    def _control(self, parameters: Mapping[str, Tensor], stage: int) -> None:
        """Raise the strength if the positions that have to go are not getting small fast enough; else lower it."""
        aim = self._had * _REST ** (stage / _STAGES)
        change = _BEHIND if self._share(parameters) > aim else _AHEAD
        self.strength = min(max(self.strength * change, self._asked / _RANGE), self._asked * _RANGE)
        if stage == _STAGES:
            self.strength = 0.0

    def _name_doomed(self, parameters: Mapping[str, Tensor]) -> None:
        """Which positions would go now if the whole target were to be met."""
        assert self._target is not None
        for axis, gone in self._weakest(parameters, self._target).items():
            self._doomed[axis] = gone | self._dead[axis]
        if math.isnan(self._had):
            self._had = self._share(parameters)

    @torch.no_grad()
    def _share(self, parameters: Mapping[str, Tensor]) -> float:
        squares = self._groups.squares(parameters)
        parts = [float(squares[axis][self._doomed[axis].to(squares[axis].device)].sum()) for axis in squares]
        return sum(parts) / max(sum(float(one.sum()) for one in squares.values()), 1e-30)

    @torch.no_grad()
    def _weakest(self, parameters: Mapping[str, Tensor], target: Target) -> dict[Axis, Tensor]:
        """The positions that a plan for a target would take by the size of their weights."""
        squares = self._groups.squares(parameters)

        def importance(context: Context) -> Tensor:
            return squares[context.axis] / self._groups.sizes[context.axis].to(squares[context.axis])

        others = [glob.escape(axis.name) for axis in self._graph.axes if axis not in self._dead]
        found = plan(self._graph, target, importance=importance, exact=True, protect=others)
        kept = {axis.name: axis.keep for axis in found.axes}
        gone = {}
        for axis in self._groups.axes:
            gone[axis] = torch.zeros(axis.size, dtype=torch.bool)
            if axis.name in kept:
                gone[axis][:] = True
                gone[axis][list(kept[axis.name])] = False
        return gone

    # the half-space --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _project(self, parameters: Mapping[str, Tensor], epsilon: float) -> None:
        """Groups that a step turned out of the half-space they were in; as many as the target asks for, if any."""
        along = self._groups.products(parameters, self._before)
        length = self._groups.squares(self._before)
        for axis in self._groups.axes:
            left = ((along[axis] < epsilon * length[axis]) | (length[axis] == 0)).cpu()
            if self._target is not None:
                left &= self._doomed[axis]
            if not bool((left | self._dead[axis]).all()):  # one position has to stay
                self._dead[axis] |= left
        self._before = {}


def _check(graph: Any, method: Any, strength: Any, target: Any, steps: Any) -> None:
    known = an_instance(PenaltyMethod, "GroupLasso(), GReg(), HalfSpace() or Polarization()")
    rules = {"graph": GRAPH, "method": known, "strength": a_number(above=0), "steps": optional(_STEPS)}
    check("Penalty", TrainingError, locals(), **rules)
    if (target is None) != (steps is None):
        raise TrainingError("a target takes the number of steps until it is met, and steps a target: give both")
    if method.needs_target and target is None:
        raise TrainingError(f"{type(method).__name__} acts on what a target would take: give target= and steps=")


def _axes(graph: Graph, method: PenaltyMethod, only: Any, protect: Any) -> list[Axis]:
    """The axes that can be learnt to be zero; those that are named have to."""
    able = set(can_die(graph))
    names, spared = parts_of(only, graph, "only"), parts_of(protect, graph, "protect")
    for name in names:
        meant = [axis for axis in graph.axes if runs_through(name, axis)]
        if not meant:
            raise TrainingError(f"only: no axis goes by {name!r}; the axes are {', '.join(a.name for a in graph.axes)}")
        if not able & set(meant):
            raise TrainingError(f"{meant[0].name} cannot be learnt to be zero: {_why(graph, meant[0])}")
    if method.needs_scales:
        able &= Groups(graph, graph.axes).scales(dict(graph.model.named_parameters())).keys()
    chosen = [axis for axis in graph.axes if axis in able]
    chosen = [axis for axis in chosen if not names or any(runs_through(name, axis) for name in names)]
    chosen = [axis for axis in chosen if not any(runs_through(name, axis) for name in spared)]
    if not chosen:
        what = "with a batch norm " if method.needs_scales else ""
        raise TrainingError(f"no axis {what}is left that could be learnt to be zero; `print(graph)` says why")
    return chosen


def _why(graph: Graph, axis: Axis) -> str:
    if not axis.exact:
        return f"it is not exact ({axis.why})"
    known = roles(graph)
    if not any(site in known.reads for site in axis.sites):
        return "no weight reads it"
    return "a zero is not left as it is on the way to what reads it"
