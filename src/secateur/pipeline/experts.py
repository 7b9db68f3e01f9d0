"""Fewer experts in a mixture: rows of the router and the experts' weights go together, the number per token stays.

Which experts are there and which weight scores them, a run on the example shows (`verify.experts`). Which go is decided
by data: those that the fewest tokens go to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.arguments import FLAG, an_int, check, shown
from secateur.calibrate import call
from secateur.calibrate.blame import blamed_on_batch, studied
from secateur.calibrate.data import taken
from secateur.distributed import bare, together
from secateur.errors import PlanError
from secateur.pipeline.depth import with_its_fields
from secateur.planning import AxisPlan, Plan
from secateur.planning.depth import changed_numbers
from secateur.planning.plans import Change
from secateur.planning.removal import BlockRemoval
from secateur.state.held import Place, is_number, named_tensors
from secateur.state.twin import copied
from secateur.surgery import carry_out
from secateur.tracing import macs as count_macs
from secateur.tracing.constructor import Maker
from secateur.tracing.graph import GRAPH, Graph
from secateur.tracing.makers import maker_of, with_fields
from secateur.tracing.origins import Origin
from secateur.verify.experts import ParameterStorages, Routed, Router
from secateur.verify.run import outputs

_COUNT = re.compile(r"(num|n)_?((local|routed|total)_)?experts")


@dataclass(frozen=True)
class _Mixture:
    """The experts of one layer: who scores them, and the tensors with an entry for each."""

    home: str
    router: Router
    tensors: tuple[str, ...]


def plan_experts(graph: Graph, keep: int, batches: Any, *, loadable: bool = False) -> Plan:
    """Decide which experts stay: of each mixture, the `keep` that most tokens of the batches go to.

    >>> import secateur as sec
    >>> class Mixture(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gate, self.up = nn.Linear(4, 6, bias=False), nn.Parameter(torch.randn(6, 4, 4))
    ...     def forward(self, x):
    ...         scores, which = self.gate(x).softmax(-1).topk(2)
    ...         return x + torch.einsum("tk,tkoi,ti->to", scores, self.up[which], x)
    >>> net, x = Mixture(), torch.randn(16, 4)
    >>> plan = sec.plan_experts(sec.trace(net, x), 3, [x])
    >>> sec.apply(net, plan).up.shape
    torch.Size([3, 4, 4])

    Each token goes to as many experts as before. Those that are gone are never chosen: the result must put out what the
    uncut model does when their scores are minus infinity. `plan.loadable` says whether the model's constructor builds
    what is left, with `plan.fields`; `loadable=True` refuses anything else.
    """
    check("plan_experts", PlanError, locals(), graph=GRAPH, loadable=FLAG)
    with together("plan_experts"), bare(graph.model, values=True):
        return _planned(graph, keep, batches, loadable)


def _planned(graph: Graph, keep: int, batches: Any, loadable: bool) -> Plan:
    mixtures = _mixtures(graph)
    for mixture in mixtures:
        router = mixture.router
        if not an_int(router.chosen, router.experts).holds(keep):
            raise PlanError(
                f"of the {router.experts} experts of {mixture.home}, of which each token goes to {router.chosen}, "
                f"that many at least can be kept, not keep={shown(keep)}"
            )
    used = _used(graph, mixtures, batches)
    kept: dict[str, dict[int, tuple[int, ...]]] = {}
    for mixture in mixtures:
        most = used[mixture.router.weight].argsort(descending=True, stable=True)[:keep]
        stay = tuple(most.sort().values.tolist())
        kept |= {name: {0: stay} for name in mixture.tensors}
    return _plan(graph, mixtures, keep, kept, loadable)


def _mixtures(graph: Graph) -> list[_Mixture]:
    """The mixtures of a model, in the order of a run on the example."""
    model, stored, found = graph.model, ParameterStorages(), dict[str, Router]()
    try:
        outputs(
            model,
            graph.example,
            torch.float32,
            stored.note,
            lambda _: Routed(stored, lambda router, _: found.setdefault(router.weight, router)),
        )
    except Exception as error:  # any code of the user's may run here
        raise PlanError(f"{graph.source.name} could not be run to find its experts: {error}") from error
    made = [_mixture(model, router) for router in found.values()]
    mixtures = [mixture for mixture in made if mixture is not None]
    if not mixtures:
        raise PlanError(
            f"no experts were found in {graph.source.name}: a weight with a row for each, of which topk takes some, "
            "and beside it parameters that hold the weights of all"
        )
    return mixtures


def _mixture(model: nn.Module, router: Router) -> _Mixture | None:
    """The tensors that have an entry for each expert, in the smallest module that has some beside the router."""
    shapes = {name: tensor.shape for name, tensor in named_tensors(model)}
    home = own = router.weight.rpartition(".")[0]
    while True:
        inside = [name for name, shape in shapes.items() if f"{name}.".startswith(f"{home}." if home else "")]
        each = [name for name in inside if len(shapes[name]) and shapes[name][0] == router.experts]
        stacked = {name.rpartition(".")[0] for name in each if len(shapes[name]) > 2}
        if stacked:
            near = {home, own, *stacked}
            tensors = [name for name in each if len(shapes[name]) > 2 or name.rpartition(".")[0] in near]
            return _Mixture(home, router, tuple(tensors))
        if not home:
            return None
        home = home.rpartition(".")[0]


def _used(graph: Graph, mixtures: Sequence[_Mixture], batches: Any) -> Mapping[str, Tensor]:
    """How many tokens go to each expert."""
    stored = ParameterStorages()
    for name, tensor in named_tensors(graph.model):
        stored.note(name, tensor)
    used = {m.router.weight: torch.zeros(m.router.experts, dtype=torch.long) for m in mixtures}

    def count(router: Router, which: Tensor) -> None:
        if router.weight in used:
            used[router.weight] += which.flatten().cpu().bincount(minlength=router.experts)

    with taken(batches, "plan_experts", graph.example) as data, studied(graph.model, "plan_experts"):
        for number, batch in enumerate(data):
            with blamed_on_batch(number, "plan_experts"), Routed(stored, count):
                call(graph.model, batch)
    return used


def _plan(graph: Graph, mixtures: Sequence[_Mixture], keep: int, kept: Any, loadable: bool) -> Plan:
    model = graph.model
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
    left = {name: (keep, *shape[1:]) if name in kept else shape for name, shape in shapes.items()}
    known = maker_of(model, graph.make)
    maker = None if known is None else with_fields(known, model)
    experts = {mixture.router.experts for mixture in mixtures}
    fewer, built = (None, None) if maker is None else next(_built(maker, experts, keep, left), (None, None))
    if maker is None or fewer is None or built is None:
        told = list(_told(model, mixtures, keep))
    else:
        told = list(changed_numbers(model, maker.build({}), built, BlockRemoval()))
    gone = {id(p): p for name, p in model.named_parameters() if name in kept}.values()
    less = [(p.numel() // p.shape[0] * (p.shape[0] - keep), p.element_size()) for p in gone]
    whole = [(p.numel(), p.element_size()) for p in model.parameters()]
    params, size = sum(n for n, _ in whole), sum(n * each for n, each in whole)
    macs = graph.macs()
    plan = Plan(
        axes=tuple(
            AxisPlan(f"{m.home} experts", m.router.experts, kept[m.router.weight][0], exact=True) for m in mixtures
        ),
        kept=kept,
        shapes={name: shapes[name] for name in kept},
        attributes=tuple(told),
        macs=Change(macs, macs),
        params=Change(params, params - sum(n for n, _ in less)),
        bytes=Change(size, size - sum(n * each for n, each in less)),
        example=graph.example,
        others=graph.others,
        origin=None if known is None else Origin.of(known),
        routers=tuple(mixture.router.weight for mixture in mixtures),
    )
    small = copied(model, lambda _: True)
    carry_out(small, plan)
    plan = replace(plan, macs=Change(macs, count_macs(small, graph.example)))
    return with_its_fields(graph, plan, maker, fewer, loadable)


def _built(
    maker: Maker, experts: set[int], keep: int, left: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Maker, nn.Module]]:
    """The call with another number of experts that makes what is left."""
    for place, value in maker.fields().items():
        if is_number(value) and {value} == experts:
            fewer = Maker(maker.function, maker.changed(partial(_replaced, {place: keep})))
            try:
                built = fewer.build({})
            except Exception:  # any code of the user's may run here
                continue
            if {name: tuple(tensor.shape) for name, tensor in named_tensors(built)} == left:
                yield fewer, built


def _replaced(new: Mapping[Place, int], place: Place, value: float) -> float:
    return new.get(place, value)


def _told(model: nn.Module, mixtures: Sequence[_Mixture], keep: int) -> Iterator[tuple[Place, int, int]]:
    """Numbers by which the modules of mixtures say how many experts there are."""
    for mixture in mixtures:
        inner = model.get_submodule(mixture.home)
        for name, module in inner.named_modules():
            owner = f"{mixture.home}.{name}".strip(".")
            for key, value in module.__dict__.items():
                if is_number(value) and value == mixture.router.experts and _COUNT.fullmatch(key.strip("_").lower()):
                    yield Place(owner, (key,)), value, keep


__all__ = ["plan_experts"]
