"""Counts of axes that the model's code ties to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from oracle import Net
from zoo.architectures import build


def by_division() -> Net:
    """The head's width is what the width of the model leaves: heads × head_dim = width."""

    def run(n: Net, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = n.qkv(n.first(x)).reshape(b, t, 3, n.heads, c * n.scale // n.heads).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        return n.proj(out.transpose(1, 2).reshape(b, t, -1))

    return Net(run, first=nn.Linear(8, 8), qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8), heads=4, scale=1)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.75, 0.9])
def test_every_size_comes_out_right_after_a_cut(ratio: float) -> None:
    net = by_division()
    x = torch.randn(2, 5, 8)
    plan = sec.plan(sec.trace(net, x), sec.Ratio(ratio))
    sec.apply(net, plan)
    assert net(x).shape == (2, 5, 8)


@pytest.mark.parametrize(
    "name", [pytest.param("timm cait_xxs24_224", marks=pytest.mark.slow), "torchvision swin_t", "transformers bart"]
)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(sec.Ratio(0.5), marks=pytest.mark.slow),
        sec.Ratio(0.3),
        pytest.param(sec.Params(0.6), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_real_models_whose_code_divides_widths(name: str, target: Any) -> None:
    model, example = build(name)
    graph = sec.trace(model, example)
    plan = sec.plan(graph, target)
    assert plan.axes
    counts = {axis.atom: axis.size for axis in graph.axes}
    kept = {axis.name: len(axis.keep) for axis in plan.axes}
    counts.update({axis.atom: kept[axis.name] for axis in graph.axes if axis.name in kept})
    assert all(graph.equations.holds(constraint, counts) for constraint in graph.constraints)
    assert plan.params.after < plan.params.before
    if isinstance(target, sec.Params):
        assert 0.59 <= plan.params.after / plan.params.before <= 0.6
