"""Runs side by side, and how much a layer's output matters."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import secateur as sec
from secateur.calibrate import lanes, stakes
from secateur.errors import CalibrationError, SecateurWarning
from secateur.importance.readers import Readers


def test_an_error_in_a_lane_reaches_whoever_advances_it() -> None:
    def run(lane):
        lane.pause(1)
        raise KeyError("inside")

    with lanes([run]) as (lane,):
        assert lane.advance() == 1
        with pytest.raises(KeyError, match="inside"):
            lane.advance()


def test_lanes_that_are_left_behind_end() -> None:
    cleaned = []

    def run(lane):
        try:
            lane.pause(1)
        finally:
            cleaned.append(True)

    before = threading.active_count()
    with lanes([run, run, run]) as made:
        made[0].advance()
        made[1].advance()
    assert cleaned == [True, True]
    assert threading.active_count() == before


def test_stakes_are_the_mean_squared_derivative() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    start = nn.Linear(3, 3)
    net = nn.Sequential(start, first, nn.Tanh(), second)
    x = torch.randn(1, 16, 3)  # three dimensions: no logits
    hidden = first(start(x[0]))
    slopes = (1 - hidden.tanh().square()).unsqueeze(1) * second.weight  # rows, outputs of the model, outputs of first
    want = slopes.square().sum(1).mean(0).detach().double()
    got = torch.stack([stakes(net, [x], seed)["1.weight", 0][0] for seed in range(300)]).mean(0)
    torch.testing.assert_close(got, want, rtol=0.15, atol=0)


def test_stakes_of_a_classifier_are_its_fisher_information() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 4)
    x = torch.randn(64, 3)
    net = nn.Sequential(nn.Linear(3, 3), net)
    chances = net(x).softmax(1).detach().double()
    outer = torch.diag_embed(chances) - chances.unsqueeze(2) * chances.unsqueeze(1)
    want = outer.diagonal(dim1=1, dim2=2).mean(0)
    got = torch.stack([stakes(net, [x], seed)["1.weight", 0][0] for seed in range(200)]).mean(0)
    torch.testing.assert_close(got, want, rtol=0.1, atol=0)


def test_frozen_parameters_stay_frozen_and_have_no_gradient() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].weight.requires_grad_(False)
    stakes(net, [torch.randn(4, 3)])
    assert not net[0].weight.requires_grad
    assert net[1].weight.requires_grad
    assert all(p.grad is None for p in net.parameters())


def test_a_model_without_a_derivative_is_refused() -> None:
    class Answer(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    with pytest.raises(CalibrationError, match="derivative"):
        stakes(Answer(3, 2), [torch.randn(4, 3)])


class Caching(nn.Module):
    """Keeps what it made of a parameter, and with it a part of the graph, for its next run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.kept = nn.Linear(3, 8), nn.Parameter(torch.randn(8)), None
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        if self.kept is None:
            self.kept = self.table.square()
        return self.last(self.first(x).relu() * self.kept)


def test_a_model_may_keep_a_part_of_its_graph() -> None:
    batches = [torch.randn(4, 3), torch.randn(4, 3)]
    net = Caching()
    assert set(stakes(net, batches)) == {("last.weight", 0)}
    assert net.kept is None
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    for criterion in (sec.Taylor(batches, loss), sec.Hessian(batches, loss)):
        sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5), importance=criterion)


def test_where_there_is_no_derivative_each_layer_counts_the_same() -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()

    class Net(nn.Sequential):
        def forward(self, x):
            return self[2](Exp.apply(self[1](self[0](x).relu())))

    torch.manual_seed(0)
    net, batches = Net(nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 2)), [torch.randn(64, 3)]
    readers = Readers(net, batches)
    with pytest.warns(SecateurWarning, match="cannot be differentiated"):
        found = readers.of({"1.weight", "2.weight"})
    outputs = [net[0](batches[0]).relu() @ net[1].weight.T, net[1](net[0](batches[0]).relu()).exp() @ net[2].weight.T]
    for name, out in zip(("1.weight", "2.weight"), outputs, strict=True):
        want = 1 / out.double().var(0, correction=0).sum()
        torch.testing.assert_close(found[name][0].stakes, want.expand(1, out.shape[1]), rtol=1e-4, atol=0)
    before = net(batches[0])
    with pytest.warns(SecateurWarning, match="cannot be differentiated"):
        report = sec.compress(net, batches[0], sec.Macs(0.6), batches, timed=False)
    assert report.compensation.after < report.compensation.before
    assert net(batches[0]).shape == before.shape
