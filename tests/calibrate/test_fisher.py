"""How much a layer's output matters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import secateur as sec
from secateur.calibrate import fisher_weights
from secateur.errors import CalibrationError, SecateurWarning
from secateur.importance.reconstruction import MomentStore


def test_fisher_weights_are_the_mean_squared_derivative() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    start = nn.Linear(3, 3)
    net = nn.Sequential(start, first, nn.Tanh(), second)
    x = torch.randn(1, 16, 3)  # three dimensions: no logits
    hidden = first(start(x[0]))
    slopes = (1 - hidden.tanh().square()).unsqueeze(1) * second.weight  # rows, outputs of the model, outputs of first
    want = slopes.square().sum(1).mean(0).detach().double()
    got = torch.stack([fisher_weights(net, [x], seed)["1.weight", 0, (1, 3)][0] for seed in range(300)]).mean(0)
    torch.testing.assert_close(got, want, rtol=0.15, atol=0)


def test_fisher_weights_of_a_classifier_are_its_fisher_information() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 4)
    x = torch.randn(64, 3)
    net = nn.Sequential(nn.Linear(3, 3), net)
    chances = net(x).softmax(1).detach().double()
    outer = torch.diag_embed(chances) - chances.unsqueeze(2) * chances.unsqueeze(1)
    want = outer.diagonal(dim1=1, dim2=2).mean(0)
    got = torch.stack([fisher_weights(net, [x], seed)["1.weight", 0, (1, 3)][0] for seed in range(200)]).mean(0)
    torch.testing.assert_close(got, want, rtol=0.1, atol=0)


def test_frozen_parameters_stay_frozen_and_have_no_gradient() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].weight.requires_grad_(False)
    fisher_weights(net, [torch.randn(4, 3)])
    assert not net[0].weight.requires_grad
    assert net[1].weight.requires_grad
    assert all(p.grad is None for p in net.parameters())


def test_a_model_without_a_derivative_is_refused() -> None:
    class Answer(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    with pytest.raises(CalibrationError, match="derivative"):
        fisher_weights(Answer(3, 2), [torch.randn(4, 3)])


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
    assert set(fisher_weights(net, batches)) == {("last.weight", 0, (1, 8))}
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
    store = MomentStore(net, batches)
    with pytest.warns(SecateurWarning, match="cannot be differentiated"):
        found = store.of({"1.weight", "2.weight"})
    outputs = [net[0](batches[0]).relu() @ net[1].weight.T, net[1](net[0](batches[0]).relu()).exp() @ net[2].weight.T]
    for name, out in zip(("1.weight", "2.weight"), outputs, strict=True):
        want = 1 / out.double().var(0, correction=0).sum()
        torch.testing.assert_close(found[name][0].fisher, want.expand(1, out.shape[1]), rtol=1e-4, atol=0)
    before = net(batches[0])
    with pytest.warns(SecateurWarning, match="cannot be differentiated"):
        report = sec.compress(net, batches[0], sec.Macs(0.6), batches, timed=False)
    assert report.compensation.after < report.compensation.before
    assert net(batches[0]).shape == before.shape


class Speaker(nn.Module):
    """Puts out the logits of its next word, as such or under a name."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.named = named
        self.words, self.middle, self.last = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, x):
        logits = self.last(self.middle(self.words(x)).tanh())
        return {"logits": logits} if self.named else logits


def test_plain_logits_of_a_language_model_weigh_as_those_with_a_name() -> None:
    torch.manual_seed(0)
    plain, named = Speaker(False), Speaker(True)
    named.load_state_dict(plain.state_dict())
    batches = [torch.randint(0, 11, (4, 9))]
    got, want = fisher_weights(plain, batches), fisher_weights(named, batches)
    assert got.keys() == want.keys()
    assert len(got) == 2
    for part in got:
        torch.testing.assert_close(got[part], want[part])
