"""All layers of a block fitted together: nearer than one after the other, or as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.compensate import blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        inner = self.down(self.up(x).relu())
        return x + (inner if scale is None else inner * scale)


class Net(nn.Module):
    """Blocks that are called with a tensor by its name, between layers that are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(6, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=x.new_ones(()))
        return self.last(x).unsqueeze(1)


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _batches(number: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(128, 6, generator=generator) for _ in range(number)]


@torch.no_grad()
def _off(net: nn.Module, whole: nn.Module) -> float:
    x = torch.randn(1000, 6, generator=torch.Generator().manual_seed(2))
    return float((net(x) - whole(x)).square().sum() / whole(x).square().sum())


def _cut(rounds: int) -> tuple[Net, Net]:
    net, batches = _net(), _batches()
    whole = copy.deepcopy(net)
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio({"layers.*.up": 0.5}))
    return sec.apply(net, plan, compensate=sec.LeastSquares(batches, rounds=rounds)), whole


def test_together_they_come_nearer_than_one_after_the_other() -> None:
    one, two = _cut(0), _cut(30)
    assert _off(*two) < 0.9 * _off(*one)  # on data that neither has seen
    outcome = sec.outcome(two[0])
    assert outcome is not None
    assert outcome.after < sec.outcome(one[0]).after  # type: ignore[union-attr]
    assert "blocks fitted as a whole: output" in outcome.notes[-1]


def test_what_does_no_better_on_other_data_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(*given: object) -> None:
        for parameter in (p for mine in given[3].values() for p in mine):  # type: ignore[attr-defined]
            parameter.data += 1

    monkeypatch.setattr(blocks, "_descend", spoilt)
    plain, tried = _cut(0)[0], _cut(1)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), tried.parameters(), strict=True))
    assert "would not be better" in sec.outcome(tried).notes[-1]  # type: ignore[union-attr]


def test_one_block_may_stay_while_others_change(monkeypatch: pytest.MonkeyPatch) -> None:
    real = blocks._descend

    def partly(*given: object) -> None:
        real(*given)  # type: ignore[arg-type]
        given[3]["layers.2"][0].data += 1  # type: ignore[index]

    monkeypatch.setattr(blocks, "_descend", partly)
    plain, tried = _cut(0)[0], _cut(20)[0]
    assert torch.equal(plain.layers[2].up.weight, tried.layers[2].up.weight)
    assert not torch.equal(plain.layers[0].up.weight, tried.layers[0].up.weight)
    assert "2 of 3 blocks" in sec.outcome(tried).notes[-1]  # type: ignore[union-attr]


def test_only_blocks_change_and_what_was_frozen_is_frozen() -> None:
    net, batches = _net(), _batches()
    whole = copy.deepcopy(net)
    net.layers[0].up.weight.requires_grad_(False)
    net.layers[1].up.weight.grad = gradient = torch.ones(24, 8)
    first = net.first.weight.detach().clone()
    net.layers[2].down.weight.data *= 0.9
    with torch.no_grad():
        better, number = blocks.fit_blocks(whole, net, batches, frozenset({7}), 4)
    assert number == 3
    assert better >= 1
    assert torch.equal(net.first.weight, first)
    assert not net.layers[0].up.weight.requires_grad
    assert net.layers[1].up.weight.grad is gradient
    assert net.layers[2].down.weight.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_a_weight_that_two_blocks_share_stays() -> None:
    net, batches = _net(), _batches()
    net.layers[1].up.weight = net.layers[0].up.weight
    whole = copy.deepcopy(net)
    shared = net.layers[0].up.weight.detach().clone()
    net.layers[2].down.weight.data *= 0.9
    with torch.no_grad():
        blocks.fit_blocks(whole, net, batches, frozenset({7}), 2)
    assert torch.equal(net.layers[0].up.weight, shared)


def test_a_model_without_blocks_is_left_alone() -> None:
    net, batches = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)), _batches()
    sec.apply(net, sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5)), compensate=sec.LeastSquares(batches, rounds=2))
    assert "0 blocks" in sec.outcome(net).notes[-1]  # type: ignore[union-attr]


def test_if_a_step_fails_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(blocks, "_descend", fails)
    net, batches = _net(), _batches()
    before = copy.deepcopy(net.state_dict())
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio({"layers.*.up": 0.5}))
    with pytest.raises(sec.CalibrationError, match="no memory left"):
        sec.apply(net, plan, compensate=sec.LeastSquares(batches, rounds=1))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("rounds", [-1, 1.5, True, "2"])
def test_rounds_are_a_number(rounds: object) -> None:
    with pytest.raises(sec.CalibrationError, match="rounds is how often"):
        sec.LeastSquares([], rounds=rounds)  # type: ignore[arg-type]
