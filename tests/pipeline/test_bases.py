"""Axes that only linear maps touch are rotated before a cut: what matters is then in fewer of their positions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import secateur as sec
from secateur.importance.weights import Weights
from secateur.pipeline.bases import Bases, _basis
from secateur.pipeline.rotations import rotate_all


class Heads(nn.Module):
    """Values that each head mixes over the tokens in its own way; each head needs other halves of its dims."""

    def __init__(self, heads: int = 2, dim: int = 8) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.value, self.out = nn.Linear(12, heads * dim, bias=False), nn.Linear(heads * dim, 10, bias=False)
        self.mix = nn.Parameter(torch.randn(heads, 6, 6))
        rows = self.value.weight.data.view(heads, dim, 12)
        for head in range(heads):
            rows[head, (dim // 2) * (head % 2) : (dim // 2) * (head % 2 + 1)] = 0

    def forward(self, x):
        values = self.value(x).view(*x.shape[:2], self.heads, self.dim).transpose(1, 2)
        return self.out((self.mix.softmax(-1) @ values).transpose(1, 2).reshape(*x.shape[:2], -1))


def off(model, whole, x) -> float:
    with torch.no_grad():
        return float((model(x) - whole(x)).square().mean() / whole(x).square().mean())


@pytest.fixture
def heads():
    torch.manual_seed(0)
    return Heads(), [torch.randn(32, 6, 12) for _ in range(4)]


def test_each_head_has_a_basis_of_its_own(heads) -> None:
    net, batches = heads
    graph = sec.trace(net, batches[0])
    (free,) = [found for found in sec.rotations(graph) if found.free]
    assert (free.axis.size, free.parts) == (8, 2)
    before, matrix = net(batches[0]), torch.linalg.qr(torch.randn(2, 8, 8))[0]
    rows = net.value.weight.detach().clone()
    sec.rotate(net, graph, free.axis, matrix)
    torch.testing.assert_close(net(batches[0]), before, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(net.value.weight, (matrix @ rows.view(2, 8, 12)).flatten(0, 1))
    with pytest.raises(sec.ApplyError, match="or by 2 of these"):
        sec.rotate(net, graph, free.axis, torch.eye(8).expand(3, 8, 8))


def test_what_a_rotation_makes_lossless_is_lossless(heads, tmp_path) -> None:
    net, batches = heads
    turned, plain = copy.deepcopy(net), copy.deepcopy(net)
    report = sec.compress(turned, batches[0], sec.Params(0.62), batches, timed=False)
    sec.compress(plain, batches[0], sec.Params(0.62), batches, timed=False, importance=sec.Reconstruction(batches))
    assert turned.dim == plain.dim == 4
    assert turned.heads == 2
    assert off(turned, net, batches[0]) < 1e-9
    assert off(plain, net, batches[0]) > 1e-2
    assert "rotated first" in str(report)
    sec.save(turned, tmp_path / "turned.safetensors")
    again = sec.load(tmp_path / "turned.safetensors", Heads())
    assert torch.equal(again(batches[0]), turned(batches[0]))


@pytest.mark.parametrize("taps", [1, 3])
def test_directions_keep_more_than_channels(taps: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(12, 12, 1, bias=False), nn.Conv2d(12, 16, taps, padding=taps // 2))
    mixed = torch.linalg.qr(torch.randn(12, 12))[0] * 2.0 ** -torch.arange(12) @ torch.linalg.qr(torch.randn(12, 12))[0]
    net[0].weight.data = mixed.view(12, 12, 1, 1)
    batches = [torch.randn(8, 12, 7, 7) for _ in range(4)]
    turned, plain = copy.deepcopy(net), copy.deepcopy(net)
    sec.compress(turned, batches[0], sec.Params(0.5), batches, timed=False)
    sec.compress(plain, batches[0], sec.Params(0.5), batches, timed=False, importance=sec.Reconstruction(batches))
    assert turned[0].out_channels == plain[0].out_channels < 7
    assert off(turned, net, batches[0]) < 0.7 * off(plain, net, batches[0])


def test_what_is_not_cut_is_not_rotated(heads) -> None:
    net, batches = heads
    before = copy.deepcopy(net.state_dict())
    sec.compress(net, batches[0], sec.Params(1.0), batches, timed=False)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_after_a_failure_nothing_is_rotated(heads, monkeypatch) -> None:
    net, batches = heads
    before = copy.deepcopy(net.state_dict())

    def fail(model, *_, **__):
        assert not torch.equal(model.value.weight, before["value.weight"])  # it is rotated by now
        raise MemoryError

    monkeypatch.setattr("secateur.pipeline.compress.apply", fail)
    with pytest.raises(MemoryError):
        sec.compress(net, batches[0], sec.Params(0.62), batches, timed=False)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_half_precision_is_not_rotated(heads) -> None:
    net, batches = heads
    net, batches = net.bfloat16(), [batch.bfloat16() for batch in batches]
    assert not Bases.of(sec.trace(net, batches[0]), batches).matrices


def test_a_zero_example_does_not_make_an_axis_free() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Softshrink(0.5), nn.Linear(8, 4, bias=False))
    assert not Bases.of(sec.trace(net, torch.zeros(1, 6)), [torch.randn(64, 6)]).matrices


def test_the_first_directions_lose_least() -> None:
    """Against the loss of a least-squares fit from each number of directions, for many other bases."""
    torch.manual_seed(0)
    root, weight = torch.randn(2, 6, 6).double()
    spread, matters = root @ root.T, weight.T @ weight

    def loss(rows):
        kept = spread - spread @ rows.T @ torch.linalg.inv(rows @ spread @ rows.T) @ rows @ spread
        return float((matters @ kept).trace())

    basis = _basis(spread, matters)
    torch.testing.assert_close(basis @ basis.T, torch.eye(6).double())
    for k in (1, 3, 5):
        assert all(loss(basis[:k]) <= loss(torch.randn(k, 6).double()) + 1e-9 for _ in range(50))


def test_a_basis_is_put_in_verified(heads) -> None:
    net, batches = heads
    bases = Bases.of(sec.trace(net, batches[0]), batches)
    before = copy.deepcopy(net.state_dict())
    bent = {own: matrix + 0.1 for own, matrix in bases.matrices.items()}
    with pytest.raises(sec.VerifyError, match="as it was"):
        rotate_all(Weights(bases.weights.graph, ()), bent, batches[0])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
