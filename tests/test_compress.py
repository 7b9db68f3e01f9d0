"""One call: cut, keep what the model knows, without training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import secateur as sec
from secateur.errors import SecateurError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


@pytest.fixture(scope="module")
def digits():
    """A small residual network, trained on real digits, with data that it was not trained on."""
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    train, test = order[:1300], order[1300:]
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    net = nn.Sequential(stem, Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(net.parameters(), 4e-3)
    for _ in range(8):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    net.eval()

    def accuracy(model) -> float:
        with torch.no_grad():
            return float((model.eval()(x[test]).argmax(1) == y[test]).float().mean())

    assert accuracy(net) > 0.94
    return net, x[train], accuracy


def test_half_of_the_macs_cost_next_to_no_accuracy(digits) -> None:
    net, x, accuracy = digits
    small, plain = copy.deepcopy(net), copy.deepcopy(net)
    report = sec.compress(small, x[:1], sec.Macs(0.5), list(x[:512].split(128)))
    sec.apply(plain, sec.plan(sec.trace(plain, x[:1]), sec.Macs(0.5)))
    assert 0.45 <= report.macs.after / report.macs.before <= 0.5
    assert sec.macs(small, x[:1]) == report.macs.after == report.plan.macs.after
    assert report.params.after == sum(p.numel() for p in small.parameters())
    assert accuracy(small) > accuracy(net) - 0.05
    assert accuracy(small) > accuracy(plain)
    assert report.latency is not None
    for word in ("Reconstruction", "counted", "measured", "output:"):
        assert word in str(report)


def test_it_can_be_saved_loaded_and_compressed_again(digits, tmp_path) -> None:
    net, x, _ = digits
    small = copy.deepcopy(net)
    batches = list(x[:512].split(128))
    sec.compress(small, x[:1], sec.Params(0.7), batches, timed=False)
    sec.compress(small, x[:1], sec.Params(0.7), batches, timed=False)
    sec.save(small, tmp_path / "small.safetensors")
    again = sec.load(tmp_path / "small.safetensors", copy.deepcopy(net))
    with torch.no_grad():
        assert torch.equal(again.eval()(x[:9]), small.eval()(x[:9]))
    assert sum(p.numel() for p in again.parameters()) <= 0.5 * sum(p.numel() for p in net.parameters())


def test_the_same_data_give_the_same_model(digits) -> None:
    net, x, _ = digits
    batches = list(x[:256].split(128))
    one, two = copy.deepcopy(net), copy.deepcopy(net)
    for model in (one, two):
        sec.compress(model, x[:1], sec.Macs(0.6), batches, timed=False)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_whatever_goes_wrong_the_model_is_as_it_was(digits) -> None:
    net, x, _ = digits
    model = copy.deepcopy(net)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attempts = [
        (sec.Macs(0.0001), [x[:64]]),
        (sec.Macs(0.5), []),
        (sec.Macs(0.5), [x[:64, :, :0]]),
        (sec.Macs(0.5), [torch.zeros(2, 3, 8, 8)]),
        ("half", [x[:64]]),
    ]
    for target, batches in attempts:
        with pytest.raises(SecateurError):
            sec.compress(model, x[:1], target, batches)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
