"""The zero oracle: a cut model must compute what the big one does with every removed slice set to zero.

Nothing here trusts the tracer. From `{tensor: {dim: kept indices}}` alone, one copy of the model gets smaller
tensors, another gets zeros in their place; both run in float64 and must agree to 1e-9 of the scale.
"""

from __future__ import annotations

import copy
import dataclasses
import glob
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import secateur as sec
from secateur.axes import free_atoms
from secateur.planning.plans import Plan, plan
from secateur.planning.targets import Ratio
from secateur.state.held import Walk
from secateur.surgery import carry_out
from secateur.tracing.graph import Axis, Graph

Kept = Mapping[str, Mapping[int, tuple[int, ...]]]


class Net(nn.Module):
    """A module made of parts and a function: `Net(lambda net, x: net.b(net.a(x)), a=…, b=…)`.

    Modules, parameters and ints are set as attributes, as a constructor would; plain tensors in `buffers` are
    registered.
    """

    def __init__(self, run: Callable[..., Any], buffers: Mapping[str, Tensor] | None = None, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def weight(*shape: int) -> nn.Parameter:
    """A parameter; `proved` fills it."""
    return nn.Parameter(torch.zeros(shape))


def each_axis(graph: Graph, ratio: float) -> Ratio:
    """Cut every axis by a ratio, by its name: also those that a plain ratio leaves alone."""
    return Ratio({glob.escape(axis.name): ratio for axis in graph.axes} or ratio)


# models and their tensors ---------------------------------------------------------------------------------------


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode and float64, with no tensor at a value that could hide an error."""
    generator = torch.Generator().manual_seed(seed)
    model = model.eval().double()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not tensor.is_meta:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.6
            tensor.data.copy_(noise.abs() + 0.3 if name.endswith("var") else noise)
    return model


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under every name that it has, and every tensor held by a plain attribute."""
    for name, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{name}.{key}".lstrip("."), tensor
    found: list[tuple[str, Tensor]] = []
    Walk(model).replace(lambda value, place: _collect(found, str(place), value))
    yield from found


def _collect(found: list[tuple[str, Tensor]], name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        found.append((name, value))
    return value


# the two copies -------------------------------------------------------------------------------------------------


def cut(model: nn.Module, chosen: Plan) -> nn.Module:
    """A smaller copy. The one place to change when another function does the surgery."""
    small = copy.deepcopy(model)
    carry_out(small, chosen)
    return small


def zeroed(model: nn.Module, kept: Kept, fill: Callable[[str, int], float] = lambda name, dim: 0.0) -> nn.Module:
    """A copy of full size, with zeros (or what `fill` says) wherever `kept` keeps nothing."""
    big = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in named_tensors(big):
            for dim, indices in kept.get(name, {}).items():
                gone = sorted(set(range(tensor.shape[dim])) - set(indices))
                tensor.index_fill_(dim, torch.tensor(gone, dtype=torch.int64), fill(name, dim))
    return big


# running --------------------------------------------------------------------------------------------------------


def to_double(item: Any) -> Any:
    """The same example with every float in float64."""
    if isinstance(item, Tensor):
        return item.double() if item.is_floating_point() else item
    if isinstance(item, tuple | list):
        parts = [to_double(part) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if isinstance(item, Mapping):
        return {key: to_double(value) for key, value in item.items()}
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return dataclasses.replace(item, **{f.name: to_double(getattr(item, f.name)) for f in dataclasses.fields(item)})
    return item


def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """Every tensor that the model puts out for the example."""
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
    args = args if type(args) in (tuple, list) else (args,)
    torch.manual_seed(0)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            return list(_leaves(model(*args, **kwargs)))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _leaves(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _leaves(value)
    elif isinstance(item, tuple | list):
        for value in item:
            yield from _leaves(value)
    elif hasattr(item, "__dict__"):
        yield from (value for value in vars(item).values() if isinstance(value, Tensor))


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference of two lists of outputs, as a part of the scale."""
    assert [tuple(t.shape) for t in got] == [tuple(t.shape) for t in want]
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if not a.is_floating_point():
            assert torch.equal(a, b)
            continue
        assert torch.isfinite(b).all(), "the oracle itself must be finite"
        worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item() if a.numel() else 0.0)
    return worst


# the check ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Uneven(Ratio):
    """Each axis at a ratio of its own around `ratio`, so that counts that must agree are not equal by accident."""

    def removed(self, name: str, size: int) -> int:
        wanted = self.ratio * (0.4 + 1.2 * (zlib.crc32(name.encode()) % 97) / 97)
        return min(round(size * wanted), size - 1)


def at_random(seed: int) -> Callable[[Any], Tensor]:
    """An importance that does not keep the first positions, nor the same of two axes."""
    generator = torch.Generator().manual_seed(seed)
    return lambda context: torch.rand(context.axis.size, generator=generator)


def _plan(*args: Any, **keywords: Any) -> Plan:
    """A plan, which may be empty: much of what is tried here is blocked on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the plan cuts nothing", sec.SecateurWarning)
        return plan(*args, **keywords)


def proved(
    model: nn.Module,
    example: Any,
    *,
    ratios: tuple[float, ...] = (0.5, 0.25),
    fill: Callable[[str, int], float] = lambda name, dim: 0.0,
    run_inexact: bool = True,
) -> Graph:
    """Trace a model, cut its exact axes in several ways and prove each cut; cut all axes and run it. The graph.

    Fails when no ratio cuts anything although there are exact axes.
    """
    model, example = randomised(model), to_double(example)
    graph = sec.trace(model, example)
    shapes = [t.shape for t in outputs(model, example)]
    done = 0
    targets = [each_axis(graph, 0.5), *(Uneven(ratio) for ratio in ratios)]
    for seed, target in enumerate(targets):
        chosen = _plan(graph, target, importance=at_random(seed), exact=True)
        done += len(chosen.axes)
        want = outputs(zeroed(model, chosen.kept_everywhere(), fill), example)
        error = difference(outputs(cut(model, chosen), example), want)
        assert error < 1e-9, f"{target}: off by {error:.2e}\n{graph}"
        if run_inexact:
            everything = _plan(graph, target, importance=at_random(seed))
            assert [t.shape for t in outputs(cut(model, everything), example)] == shapes
    assert done or not any(axis.exact for axis in graph.axes), f"nothing was cut\n{graph}"
    return graph


# asking a graph -------------------------------------------------------------------------------------------------


def axes_at(graph: Graph, tensor: str, dim: int = 0) -> list[Axis]:
    """The axes that a dimension of a tensor is made of, in order; each is found among its sites too."""
    by_atom = {axis.atom: axis for axis in graph.axes}
    found = [by_atom[atom] for atom in free_atoms(graph.layouts[tensor][dim])]
    assert all((tensor, dim) in {(site.tensor, site.dim) for site in axis.sites} for axis in found)
    return found


def axis_at(graph: Graph, tensor: str, dim: int = 0) -> Axis:
    """The only axis that a dimension of a tensor is made of."""
    (axis,) = axes_at(graph, tensor, dim)
    return axis


def sizes_at(graph: Graph, tensor: str, dim: int = 0) -> list[int]:
    """The sizes of the axes that a dimension is made of."""
    return [axis.size for axis in axes_at(graph, tensor, dim)]


def sites(axis: Axis) -> set[str]:
    """The sites of an axis, as text."""
    return {str(site) for site in axis.sites}


def tied(graph: Graph, *places: tuple[str, int]) -> bool:
    """Whether dimensions are made of one and the same single axis."""
    found = [axes_at(graph, tensor, dim) for tensor, dim in places]
    return all(len(axes) == 1 and axes[0] is found[0][0] for axes in found)


def reason(graph: Graph, tensor: str, dim: int = 0) -> str:
    """Why a dimension cannot be cut at all."""
    (blocked,) = [b for b in graph.blocked if (b.tensor, b.dim) == (tensor, dim)]
    return blocked.reason
