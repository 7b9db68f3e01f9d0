"""Whole blocks: which can go, which should, and the plan that removes them.

A block puts out its input plus something (`verify.blocks`). Which to remove is decided as SLEB does (Song et al., 2024,
arxiv.org/abs/2402.09025): one after the other, each time the one without which the outputs on some data change least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.arguments import FLAG, an_int, check, shown
from secateur.axes import Polynomial
from secateur.calibrate import call
from secateur.calibrate.blame import blamed_on_batch, studied
from secateur.calibrate.data import taken
from secateur.calibrate.fisher import answers
from secateur.distributed import bare, is_sharded, together
from secateur.errors import PlanError
from secateur.pipeline.rebuild import own_tables, unlike
from secateur.planning import Plan
from secateur.planning.depth import changed_fields, followed
from secateur.planning.names import Named, named, parts_of
from secateur.planning.plans import Change
from secateur.progress import progress
from secateur.state.twin import copied
from secateur.surgery import carry_out
from secateur.surgery.blocks import LISTS
from secateur.tracing.constructor import Maker
from secateur.tracing.graph import GRAPH, Graph
from secateur.tracing.makers import maker_of, with_fields
from secateur.tracing.origins import Origin
from secateur.verify.blocks import Passing, handing_on, passing


@dataclass(frozen=True)
class ResidualBlock:
    """An entry of a list of modules, whether it can be removed and, if it cannot, why; what it costs.

    >>> import secateur as sec
    >>> block = sec.blocks(sec.trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)))[0]
    >>> block.free, block.params
    (False, 20)
    """

    name: str
    free: bool
    why: str
    params: int  # that nothing else has
    macs: int

    def __str__(self) -> str:
        return f"{self.name}: {'free' if self.free else self.why} ({self.params:,} parameters, {self.macs:,} MACs)"


def blocks(graph: Graph) -> tuple[ResidualBlock, ...]:
    """The entries of a model's lists (`nn.ModuleList`, `nn.Sequential`): which can be removed, and why not the others.

    >>> import secateur as sec
    >>> class Residual(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner = nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return x + self.inner(x).relu()
    >>> net = nn.Sequential(nn.Linear(8, 4), Residual(), Residual(), nn.Linear(4, 2))
    >>> for block in sec.blocks(sec.trace(net, torch.ones(1, 8))):
    ...     print(block)
    0: it takes 1x8 and puts out 1x4 (36 parameters, 32 MACs)
    1: free (20 parameters, 16 MACs)
    2: free (20 parameters, 16 MACs)
    3: it takes 1x4 and puts out 1x2 (10 parameters, 8 MACs)

    One can be removed if it is one of several of its kind, and a run on the example shows that it puts out its input
    plus something: x + f(x).
    """
    check("blocks", PlanError, locals(), graph=GRAPH)
    with bare(graph.model, values=True):
        return tuple(block for block, _ in _found(graph))


def _found(graph: Graph) -> Iterator[tuple[ResidualBlock, Passing]]:
    model = graph.model
    names = [
        f"{home}.{key}".lstrip(".")
        for home, entries in model.named_modules()
        if isinstance(entries, LISTS) and len(entries._modules) > 1
        for key, module in entries._modules.items()
        if module is not None and any(True for _ in module.parameters())
    ]
    try:
        seen = passing(model, graph.example, names, torch.float32)
    except Exception as error:  # any code of the user's may run here
        raise PlanError(f"{graph.source.name} could not be run to find its blocks: {error}") from error
    own, alone = _parameters(model, names), _alone(model, names)
    free = {name for name in names if seen[name].instead is not None and name not in alone}
    for name in names:
        how = seen[name]
        if how.instead is not None and name in alone:
            how = Passing(None, "no other entry of its list is of its kind")
        elif any(other.startswith(f"{name}.") for other in free):
            how = Passing(None, "it is made of blocks itself")
        macs = Polynomial([(1, cost.layouts) for cost in graph.costs if f"{cost.module}.".startswith(f"{name}.")])({})
        yield ResidualBlock(name, how.instead is not None, how.why, own[name], macs), how


def _alone(model: nn.Module, names: Sequence[str]) -> set[str]:
    """The entries of lists that are the only ones of their kind there: parts of something, not one of several."""
    kinds = {name: (name.rpartition(".")[0], type(model.get_submodule(name))) for name in names}
    times = Counter(kinds.values())
    return {name for name, kind in kinds.items() if times[kind] == 1}


def _parameters(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """How many parameters are in each of some modules and nowhere else."""
    homes: dict[int, list[str]] = {}
    sizes: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes.setdefault(id(parameter), []).append(name)
        sizes[id(parameter)] = parameter.numel()
    return {
        name: sum(sizes[key] for key, under in homes.items() if all(each.startswith(f"{name}.") for each in under))
        for name in names
    }


def plan_depth(
    graph: Graph,
    remove: int | Sequence[str],
    batches: Any = None,
    *,
    protect: Named | Sequence[Named] = (),
    loadable: bool = False,
) -> Plan:
    """Decide which blocks go: some by name, or so many of them, those that the outputs on `batches` need least.

    >>> import secateur as sec
    >>> class Residual(nn.Module):
    ...     def __init__(self, scale):
    ...         super().__init__()
    ...         self.inner, self.scale = nn.Linear(4, 4), scale
    ...     def forward(self, x):
    ...         return x + self.scale * self.inner(x)
    >>> net = nn.Sequential(Residual(1.0), Residual(0.01), Residual(1.0), nn.Linear(4, 2))
    >>> graph = sec.trace(net, torch.ones(1, 4))
    >>> print(sec.plan_depth(graph, 1, [torch.randn(16, 4)]))
    without 1
    MACs    56 → 40 (71.4%)
    params  70 → 50 (71.4%)
    >>> len(sec.apply(net, sec.plan_depth(graph, ["1"])))
    3

    `apply` takes them out of their lists, in place: what follows moves up, and so do numbers that count blocks
    (`config.num_hidden_layers`, the `layer_idx` of each). The result must put out what the uncut model does when these
    blocks hand on their input. Blocks with anything in them that `protect` names stay. `plan.loadable` says whether the
    model's constructor builds what is left, with `plan.fields`; `loadable=True` refuses anything else. In a process
    group every rank is sent the batches of all; a model that is spread over ranks is put together on each.
    """
    check("plan_depth", PlanError, locals(), graph=GRAPH, loadable=FLAG)
    spared = parts_of(protect, graph, "protect")
    all_come = batches is not None or is_sharded(graph.model)
    with together("plan_depth", all_come=all_come), bare(graph.model, values=True):
        found = {block.name: (_protected(graph, block, spared), how) for block, how in _found(graph)}
        if isinstance(remove, int):
            free = {name: how for name, (block, how) in found.items() if block.free}
            names = tuple(_least(graph, free, remove, batches))
        else:
            names = _named(found, remove)
        return _plan(graph, [found[name][0] for name in names], loadable)


def _protected(graph: Graph, block: ResidualBlock, whole: Sequence[str]) -> ResidualBlock:
    """A block, not free if anything in it has to stay."""
    inside = [block.name, *(name for name in graph.source.tensors if name.startswith(f"{block.name}."))]
    held = next((glob for glob in whole if any(named(name, glob) for name in inside)), None)
    return block if held is None else replace(block, free=False, why=f"{held} is protected")


def _named(found: Mapping[str, tuple[ResidualBlock, Passing]], remove: Sequence[str]) -> tuple[str, ...]:
    if isinstance(remove, str) or not isinstance(remove, Sequence) or not all(isinstance(n, str) for n in remove):
        raise PlanError(f"plan_depth removes a number of blocks, or a list of names of blocks, not {shown(remove)}")
    for name in remove:
        if name not in found:
            raise PlanError(f"{name!r:.80} is no block; secateur.blocks(graph) lists them")
        if not found[name][0].free:
            raise PlanError(f"{name} cannot be removed: {found[name][0].why}")
    return tuple(dict.fromkeys(remove))


# which blocks go ----------------------------------------------------------------------------------------------------


def _least(graph: Graph, free: Mapping[str, Passing], number: int, batches: Any) -> list[str]:
    """The blocks that matter least, one after the other; one of each list stays."""
    lists = dict(graph.model.named_modules())
    gone: list[str] = []

    def left() -> list[str]:
        homes = [name.rpartition(".")[0] for name in gone]
        return [
            name
            for name in free
            if name not in gone and homes.count(home := name.rpartition(".")[0]) < len(lists[home]._modules) - 1
        ]

    if not an_int(0).holds(number):
        raise PlanError(f"plan_depth: remove is a number of blocks from 0 on, not {shown(number)}")
    if number and batches is None:
        raise PlanError("to choose blocks, plan_depth needs batches: plan_depth(graph, 2, batches)")
    if not number:
        return gone
    with taken(batches, "plan_depth", graph.example) as data, studied(graph.model, "plan_depth"):
        for _ in progress(range(number), "blocks"):
            if not left():
                raise PlanError(f"{number} blocks cannot go: of {len(free)} that are free, {len(gone)} can")
            lost = _lost(graph.model, data, free, gone, left())
            gone.append(min(lost, key=lambda name: lost[name]))
    return gone


def _lost(
    model: nn.Module, data: Sequence[Any], how: Mapping[str, Passing], gone: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """How much the outputs change without each of some blocks, beside those that are gone already."""
    lost = dict.fromkeys(names, 0.0)
    for number, batch in enumerate(data):
        with blamed_on_batch(number, "plan_depth"):
            want = _answer(model, batch)
            for name in names:
                with handing_on(model, {each: how[each] for each in (*gone, name)}):
                    lost[name] += _apart(want, _answer(model, batch))
    if not all(map(math.isfinite, lost.values())):
        raise PlanError("the outputs on the batches are not finite without some blocks, so these cannot be compared")
    return lost


Answer = tuple[list[Tensor], bool]  # what a model puts out, and whether these are logits


def _answer(model: nn.Module, batch: Any) -> Answer:
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return answers(call(model, batch), vocabularies)


def outputs_of(model: nn.Module, batches: Sequence[Any]) -> list[Answer]:
    """What a model puts out, to be compared with later."""
    with studied(model, "compress"):
        return [_answer(model, batch) for batch in batches]


def further_off(model: nn.Module, batches: Sequence[Any], want: Sequence[Answer]) -> float:
    """How far a model's outputs are from others on the same batches, on average."""
    now = outputs_of(model, batches)
    return sum(_apart(one, other) for one, other in zip(want, now, strict=True)) / len(now)


def _apart(one: Answer, other: Answer) -> float:
    """How far two outputs are apart, for each sample: in what they believe of classes, or in squares.

    >>> _apart(([torch.zeros(4, 2)], True), ([torch.zeros(4, 2)], True))
    0.0
    """
    off = 0.0
    for want, got in zip(one[0], other[0], strict=True):
        a, b = want.float(), got.float()
        if one[1]:
            a, b = a.log_softmax(-1), b.log_softmax(-1)
            off += float((a.exp() * (a - b)).sum(-1).mean())
        else:
            off += float((a - b).square().sum() / a.square().sum().clamp_min(1e-30))
    return off


# the plan -----------------------------------------------------------------------------------------------------------


def _plan(graph: Graph, gone: Sequence[ResidualBlock], loadable: bool) -> Plan:
    model = graph.model
    known = maker_of(model, graph.make)
    maker = None if known is None else with_fields(known, model)
    removed, fewer = followed(model, tuple(block.name for block in gone), maker)
    weights = {name: tensor for name, tensor in model.named_parameters() if removed.after(name) is None}
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    macs = graph.macs()
    plan = Plan(
        axes=(),
        kept={},
        shapes={},
        attributes=(),
        macs=Change(macs, macs - sum(block.macs for block in gone)),
        params=Change(whole, whole - sum(block.params for block in gone)),
        bytes=Change(size, size - sum(tensor.numel() * tensor.element_size() for tensor in weights.values())),
        example=graph.example,
        others=graph.others,
        origin=None if known is None else Origin.of(known),
        removed=removed,
    )
    return with_its_fields(graph, plan, maker, fewer, loadable) if gone else plan


def with_its_fields(graph: Graph, plan: Plan, maker: Maker | None, fewer: Maker | None, loadable: bool) -> Plan:
    """A plan with the constructor's new values, if the call that should build what is left does; or why it does not."""
    why = "how it is built is not known" if maker is None else "no number among its arguments says how many there are"
    why = why if fewer is None else _unbuilt(graph.model, plan, fewer)
    if why and loadable:
        raise PlanError(f"loadable=True: the constructor of {graph.source.name} does not build what is left: {why}")
    if why or maker is None or fewer is None:
        return plan
    return replace(plan, fields=changed_fields(maker.arguments, fewer.arguments))


def _unbuilt(model: nn.Module, plan: Plan, maker: Maker) -> str:
    """What a model has after a plan that its constructor does not make; nothing if there is nothing."""
    left = copied(model, lambda _: True)
    carry_out(left, plan)
    made = maker.build({})
    why = unlike(left, made)
    tables = own_tables(left, made)
    return why or (f"{next(iter(tables))}, which is not in files, would be another" if tables else "")


__all__ = ["ResidualBlock", "blocks", "further_off", "outputs_of", "plan_depth", "with_its_fields"]
