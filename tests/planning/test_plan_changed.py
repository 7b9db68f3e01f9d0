"""A model that is no longer what was traced, or has no values: said in words, whatever is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import secateur as sec

X = torch.randn(3, 4)


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def put(i: int, layer: nn.Module) -> Callable[[nn.Sequential], None]:
    return lambda net: net.__setitem__(i, layer)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "another width": put(0, nn.Linear(4, 6)),
    "another layer": put(3, nn.Bilinear(8, 8, 2)),
    "no layer": lambda net: net.__delitem__(1),
    "no bias": lambda net: setattr(net[0], "bias", None),
    "a layer without a shape": put(0, nn.LazyLinear(8)),
    "a parametrization": lambda net: nn.utils.parametrizations.weight_norm(net[0]),
    "a mask": lambda net: nn.utils.prune.identity(net[0], "weight"),
    "a cut": lambda net: sec.apply(net, sec.plan(sec.trace(net, X), sec.Ratio(0.5))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed(change: str) -> None:
    net = made()
    graph = sec.trace(net, X)
    plan = sec.plan(graph, sec.Ratio(0.5))
    CHANGES[change](net)
    with pytest.raises(sec.PlanError, match="the plan cuts"):
        sec.apply(net, plan)
    with pytest.raises(sec.PlanError, match="has changed since it was traced"):
        sec.plan(graph, sec.Ratio(0.5))


def test_a_scripted_model() -> None:
    net = made()
    plan = sec.plan(sec.trace(net, X), sec.Ratio(0.5))
    with pytest.raises(sec.ApplyError, match="is TorchScript, which cannot be cut"):
        sec.apply(torch.jit.script(net), plan)


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        net = made()
    graph = sec.trace(net, X)
    for importance in (None, sec.LAMP(), sec.FPGM(), sec.BNScale()):
        with pytest.raises(
            sec.PlanError, match=r"reads weights, and the model is on the meta.*importance=Random\(seed\)"
        ):
            sec.plan(graph, sec.Ratio(0.5), importance=importance)
    with pytest.raises(sec.PlanError, match=r"Zeros\(\) reads weights"):
        sec.plan(graph, sec.Zeros())
    plan = sec.plan(graph, sec.Macs(0.5), importance=sec.Random(0))
    weight = net[0].weight
    with pytest.raises(
        sec.VerifyError, match=r"on the meta device and has no values to prove the cut with.*verify=False"
    ):
        sec.apply(net, plan)
    assert weight.shape == (8, 4)
    sec.apply(net, plan, verify=False)
    assert net[0].weight is weight
    assert weight.is_meta
    assert weight.shape == (len(plan.axes[0].keep), 4)
    assert net[1].num_features == net[3].in_features == len(plan.axes[0].keep)
    net.to_empty(device="cpu")
    assert net(X).shape == (3, 2)
