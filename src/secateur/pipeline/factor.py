"""Low rank: a layer as a product of two, in the basis in which a cut of what lies between them loses least.

W = B A: for rows x of inputs with second moments H, and outputs of which a change by e changes the model's by eᵀ F e,
the best B A of rank k has, of F^½ W H^½, the k largest singular values (Eckart and Young, 1936). The rank is an axis of
its own that only linear maps touch, so its basis is free (`rotations`) and `bases` finds just these directions; cutting
it is a cut like any other. For models of language SVD-LLM (Wang et al., 2024) does so with the inputs' moments alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from secateur.arguments import NAMES, check, listed
from secateur.calibrate.blame import blamed_on_batch, check_values
from secateur.calibrate.data import Some, taken
from secateur.distributed import in_step, is_sharded, meet, together
from secateur.errors import ApplyError, CalibrationError, VerifyError
from secateur.pipeline.apply import OPTIMIZER, plan_of, remember
from secateur.pipeline.bases import TURNED, Bases
from secateur.pipeline.rotations import ROUNDED, difference
from secateur.planning.names import named
from secateur.planning.plans import Change, Plan
from secateur.state.transaction import transaction
from secateur.surgery.split import split_layers, together_with, why_whole
from secateur.tracing import trace, unwrap
from secateur.tracing.graph import Axis, Graph
from secateur.tracing.makers import maker_of
from secateur.tracing.origins import Origin
from secateur.verify.run import outputs

Model = TypeVar("Model", bound=nn.Module)


def factor(
    model: Model,
    names: str | Sequence[str],
    batches: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> Model:
    """Make each of some layers a product of two, in place: the model computes what it did, and has a new axis to cut.

    >>> import secateur as sec
    >>> _ = torch.manual_seed(0)
    >>> net, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), torch.randn(64, 8)
    >>> before = net(x)
    >>> sec.factor(net, "0", [x])[0]
    Sequential(
      (0): Linear(in_features=8, out_features=6, bias=False)
      (1): Linear(in_features=6, out_features=6, bias=True)
    )
    >>> bool((net(x) - before).abs().max() < 1e-5), [axis.name for axis in sec.trace(net, x).axes]
    (True, ['0 hidden', '0.1 features'])

    `names` are names of linear layers, convolutions and embeddings, or globs. What shares its weight with one of them
    becomes two as well: of a language model with one table for its input and its output, both get the smaller table.
    The positions of the new axis (the rank) come in the order in which they matter to the model's output on `batches`,
    which are as those of `compress`; plan with `Reconstruction(batches)` and apply with `LeastSquares(batches)`, or let
    `compress(..., rank=names)` do it all. At full rank a product has more weights than one layer: it pays when the rank
    is cut to less than inputs x outputs / (inputs + outputs).

    All or nothing: where the model would put out something else, it is as it was. `save` and `load` know of it; a
    config.json cannot, so it does not go with `loadable`. With `optimizer`, the new parameters join the group of the
    layer's weight, and the optimizer's state of the layer begins anew.
    """
    inner = unwrap(model)
    with together("factor"), taken(batches, "factor") as data:
        check("factor", ApplyError, locals(), names=NAMES, optimizer=OPTIMIZER)
        check_values(inner, inner.parameters(), "factor")
        chosen = layers_named(inner, names)
        with transaction(inner, optimizer) as undo:
            with in_step():
                example, groups = data[0], _weights(inner, chosen)
                with blamed_on_batch(0, "factor"):
                    before = outputs(inner, example, torch.float64)
                if not all(tensor.isfinite().all() for tensor in before if tensor.is_floating_point()):
                    raise CalibrationError("factor: what the model puts out for the first batch is not finite")
                made = split(inner, chosen)
                graph = trace(inner, example)
                axes = rank_axes(graph, chosen)
                turned = Bases.of(graph, Some(data, TURNED), axes).rotate({axis.name for axis in axes}, undo)
                if len(turned) < len(axes):
                    raise ApplyError("factor: more than the two layers has to do with what lies between them")
                off = difference(before, outputs(inner, example, torch.float64))
                if not off < ROUNDED:
                    raise VerifyError(f"as products of two, the model is off by {off:.2g}. The model is as it was.")
                if optimizer is not None:
                    _follow(optimizer, inner, groups)
                remember(inner, made)
            meet("factor: done")  # on every rank, or on none
    return model


def layers_named(model: nn.Module, names: str | Sequence[str]) -> tuple[str, ...]:
    """The layers that names or globs mean and that can be made two, with those that share their weights."""
    modules, found = dict(model.named_modules()), dict[str, None]()
    for glob in listed(names):
        mine = [name for name, module in modules.items() if name and named(name, glob) and not why_whole(module)]
        if not mine:
            why = why_whole(modules[glob]) if glob in modules else "nothing in the model is called so"
            raise ApplyError(f"{glob!r:.80} names no layer that can be made a product of two: {why}")
        found |= dict.fromkeys(mine)
    return together_with(model, tuple(found))


def split(model: nn.Module, names: Sequence[str]) -> Plan:
    """Make two of layers, in any exact way; the plan that says so."""
    cut = plan_of(model)
    for name in names if cut is not None else ():
        if cut is not None and any(tensor.startswith(f"{name}.") for tensor in cut.kept):
            raise ApplyError(f"{name} has been cut already; make it a product of two first, then cut")
    if is_sharded(model):
        raise ApplyError("factor takes a model that is not spread over ranks")
    coarse = next((n for n, p in _weights(model, names).items() if not torch.finfo(p.dtype).eps < 1e-6), None)
    if coarse is not None:
        raise ApplyError(f"{coarse} is in half precision, in which no basis is exact; call model.float() first")
    before, maker = _sizes(model), maker_of(model)
    split_layers(model, names)
    after = _sizes(model)
    return Plan(
        axes=(),
        kept={},
        shapes={},
        attributes=(),
        params=Change(before[0], after[0]),
        bytes=Change(before[1], after[1]),
        origin=None if maker is None else Origin.of(maker),
        factored=tuple(names),
    )


def rank_axes(graph: Graph, names: Sequence[str]) -> tuple[Axis, ...]:
    """The axes between the two layers that each of some layers has become."""
    found = {site: axis for axis in graph.axes for site in axis.sites}
    axes = {}
    for name in names:
        axis = next((axis for site, axis in found.items() if (site.tensor, site.dim) == (f"{name}.1.weight", 1)), None)
        if axis is None:
            whys = (each.reason for each in graph.blocked if each.tensor == f"{name}.1.weight")
            why = next(whys, "no run comes to it")
            raise ApplyError(f"{name} cannot be made a product of two layers: {why}. The model is as it was.")
        axes[axis.name] = axis
    return tuple(axes.values())


def idle(model: nn.Module, names: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """The layers for which, after a plan, two take no fewer weights than one would."""
    two = {name: (model.get_submodule(f"{name}.0"), model.get_submodule(f"{name}.1")) for name in names}
    times = Counter(id(layer.weight) for pair in two.values() for layer in pair)
    whole, held = dict[int, int](), dict[int, dict[int, int]]()  # by the weight that several have, if any do
    table = {name: max((id(layer.weight) for layer in pair), key=lambda key: times[key]) for name, pair in two.items()}
    for name, pair in two.items():
        shapes = [_after(plan, f"{name}.{i}.weight", layer.weight) for i, layer in enumerate(pair)]
        inputs = shapes[0][0] if isinstance(pair[0], nn.Embedding) else math.prod(shapes[0][1:])
        whole[table[name]] = inputs * shapes[1][0]
        sizes = {id(layer.weight): math.prod(shape) for layer, shape in zip(pair, shapes, strict=True)}
        held.setdefault(table[name], {}).update(sizes)
    return tuple(name for name in names if sum(held[table[name]].values()) >= whole[table[name]])


def _after(plan: Plan, name: str, weight: Any) -> list[int]:
    """The shape of a weight after a plan."""
    kept = plan.kept.get(name, {})
    return [len(kept[dim]) if dim in kept else size for dim, size in enumerate(weight.shape)]


def _weights(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    modules = dict(model.named_modules())
    return {name: modules[name].weight for name in names}


def _sizes(model: nn.Module) -> tuple[int, int]:
    found = list(model.parameters())
    return sum(p.numel() for p in found), sum(p.numel() * p.element_size() for p in found)


def _follow(optimizer: torch.optim.Optimizer, model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """New parameters beside the weight that they are of, in the same group; what was known of these is forgotten."""
    modules, known = dict(model.named_modules()), {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, weight in weights.items():
        optimizer.state.pop(weight, None)
        for group in optimizer.param_groups:
            if any(each is weight for each in group["params"]):
                new = [p for p in modules[name].parameters() if id(p) not in known]
                group["params"] += new
                known |= {id(p) for p in new}


__all__ = ["factor", "idle", "layers_named", "rank_axes", "split"]
