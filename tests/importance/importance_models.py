"""Small networks, and the plain way to say what goes with a position."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import secateur as sec
from oracle import Net
from secateur.axes import keep_mask
from secateur.planning.problem import PruningProblem


def residual() -> tuple[nn.Module, Tensor]:
    parts = {"a": nn.Conv2d(3, 6, 1), "b": nn.Conv2d(6, 6, 3, padding=1)}
    parts |= {"n": nn.BatchNorm2d(6), "c": nn.Conv2d(6, 2, 1)}
    return Net(lambda n, x: n.c(n.a(x) + n.n(n.b(n.a(x)))), **parts), torch.randn(1, 3, 4, 4)


def concat() -> tuple[nn.Module, Tensor]:
    parts = {"a": nn.Conv2d(3, 4, 1), "b": nn.Conv2d(3, 6, 1), "c": nn.Conv2d(10, 2, 1)}
    return Net(lambda n, x: n.c(torch.cat([n.a(x), n.b(x)], 1)), **parts), torch.randn(1, 3, 4, 4)


def grouped() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 1, groups=4), nn.Conv2d(12, 2, 1))
    return net, torch.randn(1, 3, 4, 4)


def attention() -> tuple[nn.Module, Tensor]:
    def run(n: Net, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = n.qkv(x).view(b, t, 3, n.heads, n.dims).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        return n.proj(out.transpose(1, 2).reshape(b, t, -1))

    return Net(run, qkv=nn.Linear(8, 24), proj=nn.Linear(8, 3), heads=4, dims=2), torch.randn(2, 5, 8)


def recurrent() -> tuple[nn.Module, Tensor]:
    parts = {"rnn": nn.LSTM(3, 4, num_layers=2, batch_first=True), "head": nn.Linear(4, 2)}
    return Net(lambda n, x: n.head(n.rnn(x)[0][:, -1]), **parts), torch.randn(2, 5, 3)


def flattened() -> tuple[nn.Module, Tensor]:
    parts = {"conv": nn.Conv2d(2, 4, 3), "norm": nn.BatchNorm2d(4), "head": nn.Linear(16, 2)}
    return Net(lambda n, x: n.head(n.norm(n.conv(x)).relu().flatten(1)), **parts), torch.randn(2, 2, 4, 4)


def tied() -> tuple[nn.Module, Tensor]:
    shared = nn.Linear(6, 6)
    parts = {"first": nn.Linear(3, 6), "a": shared, "b": shared, "last": nn.Linear(6, 2)}
    return Net(lambda n, x: n.last(n.b(n.a(n.first(x)).relu())), **parts), torch.randn(2, 3)


MODELS = {f.__name__: f for f in (residual, concat, grouped, attention, recurrent, flattened, tied)}


def traced(name: str) -> sec.Graph:
    torch.manual_seed(0)
    model, example = MODELS[name]()
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in tensor_name or tensor_name.startswith("n."):  # a fresh norm is the identity and would hide faults
            tensor.data = torch.rand(tensor.shape) + 0.5 if tensor.is_floating_point() else tensor.data
    return sec.trace(model.eval(), example)


def scores(graph: sec.Graph, criterion: Any) -> dict[str, Tensor]:
    problem = PruningProblem(graph, criterion, exact=False, protect=(), round_to=1)
    return {axis.name: problem.scores(axis) for axis in graph.axes}


def gone_with(graph: sec.Graph, axis: sec.Axis, position: int) -> dict[str, list[tuple[int, list[int]]]]:
    """By taking just this position away: which slices of which parameters go."""
    mask = np.ones(axis.size, bool)
    mask[position] = False
    found: dict[str, list[tuple[int, list[int]]]] = {}
    parameters = dict(graph.model.named_parameters())
    for site in axis.sites:
        if site.tensor in parameters:
            gone = np.flatnonzero(~keep_mask(graph.layouts[site.tensor][site.dim], {axis.atom: mask}))
            found.setdefault(site.tensor, []).append((site.dim, gone.tolist()))
    return found
