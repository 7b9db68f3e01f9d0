"""One call: cut, keep what the model knows, without training."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import secateur as sec
from secateur.calibrate.data import like
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
    optimizer = torch.optim.Adam(net.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8 * 21)  # ends at zero: no luck in it
    for _ in range(8):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
            rate.step()
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


def test_labels_are_left_out(digits) -> None:
    net, x, _ = digits
    plain, labelled = copy.deepcopy(net), copy.deepcopy(net)
    sec.compress(plain, x[:1], sec.Macs(0.6), list(x[:128].split(64)), timed=False)
    loader = DataLoader(TensorDataset(x[:128], torch.zeros(128)), batch_size=64)
    sec.compress(labelled, x[:1], sec.Macs(0.6), loader, timed=False)
    for a, b in zip(plain.state_dict().values(), labelled.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_where_nothing_tells_what_the_inputs_are_the_error_does(digits) -> None:
    net, x, _ = digits
    pairs = [(x[:64], torch.zeros(64))]
    plan = sec.plan(sec.trace(net, x[:1]), sec.Macs(0.6))
    with pytest.raises(SecateurError, match="inputs for inputs, _ in loader"):
        sec.apply(copy.deepcopy(net), plan, compensate=sec.LeastSquares(pairs))
    with pytest.raises(SecateurError, match="inputs for inputs, _ in loader"):
        sec.plan(sec.trace(net, x[:1]), sec.Macs(0.6), importance=sec.Reconstruction(pairs))


@pytest.mark.parametrize(
    ("example", "batch", "want"),
    [
        (torch.zeros(1), torch.ones(2), torch.ones(2)),
        (torch.zeros(1), [torch.ones(2)], [torch.ones(2)]),
        (torch.zeros(1), (torch.ones(2), 3), torch.ones(2)),
        ((1, 2), (3, 4, 5), (3, 4)),
        ({"a": 1}, {"a": 2, "b": 3}, {"a": 2}),
        ({"a": 1}, ({"a": 2}, 3), {"a": 2}),
        ({"a": 1, "c": 1}, {"a": 2}, {"a": 2}),  # what is missing is for the model to say
    ],
)
def test_a_batch_is_cut_down_to_what_the_example_has(example, batch, want) -> None:
    torch.testing.assert_close(like(example, batch), want)


@pytest.mark.parametrize(("after", "said"), [(0.5, "2.00x faster"), (0.98, "no faster: "), (2.0, "2.00x slower: ")])
def test_a_model_that_is_no_faster_is_said_to_be(digits, after: float, said: str) -> None:
    net, x, _ = digits
    report = sec.compress(copy.deepcopy(net), x[:1], sec.Macs(0.9), [x[:64]], timed=False)
    timings = [dataclasses.replace(sec.latency(net, x[:1]), median=seconds) for seconds in (1.0, after)]
    assert said in str(dataclasses.replace(report, latency=tuple(timings)))
    asked = dataclasses.replace(report.plan, confirmation="asked, predicted, came")
    text = str(dataclasses.replace(report, latency=tuple(timings), plan=asked))
    assert said in text
    assert "Latency(f) as the target" not in text  # it was


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
