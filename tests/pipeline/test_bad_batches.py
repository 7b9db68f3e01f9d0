"""One batch with NaN in it, and an interrupt while batches are read: the batch is named, the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur import schedule
from state.reachable import reachable


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def _data(count: int = 6) -> list[Tensor]:
    return [torch.randn(16, 6, generator=torch.Generator().manual_seed(n)) for n in range(count)]


def _broken(value: float, at: int = 3) -> list[Tensor]:
    """Batches of which the fourth has a number that is none."""
    return [batch.index_fill(0, torch.tensor([1]), value) if n == at else batch for n, batch in enumerate(_data())]


def _compensated(recipe: Callable[[Any], Any]) -> Callable[[nn.Module, Any], object]:
    def way(net: nn.Module, batches: Any) -> object:
        plan = sec.plan(sec.trace(net, _data()[0], variants=False), sec.Ratio(0.5))
        return sec.apply(net, plan, verify=False, compensate=recipe(batches))

    return way


def _recovered(net: nn.Module, batches: Any) -> object:
    return sec.recover(net, _net(), batches if isinstance(batches, list) else lambda: batches, steps=8)


WAYS: dict[str, Callable[[Any, Any], object]] = {
    "LeastSquares": _compensated(sec.LeastSquares),
    "Constants": _compensated(sec.Constants),
    "Statistics": _compensated(sec.Statistics),
    "compress": lambda net, batches: sec.compress(net, _data()[0], sec.Macs(0.5), batches, timed=False),
    "sparsify": lambda net, batches: sec.sparsify(net, batches, sec.NM(2, 4)),
    "sweep": lambda net, batches: sec.sweep(net, _data()[0], ratios=(0.5,), axis_ratio=None, batches=batches),
    "factor": lambda net, batches: sec.factor(net, "3", batches),
    "recover": _recovered,
}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_is_not_finite_is_named(way: str, value: float) -> None:
    net = _net()
    before = reachable(net)
    with pytest.raises(sec.CalibrationError, match=rf"{way}: batch 4: it is not finite"):
        WAYS[way](net, _broken(value))
    assert reachable(net) == before


def _interrupted() -> Iterator[Tensor]:
    yield from _data()[:3]
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_while_batches_are_read(way: str) -> None:
    net = _net()
    before = reachable(net)
    with pytest.raises(KeyboardInterrupt):
        WAYS[way](net, _interrupted())
    assert reachable(net) == before


def test_an_interrupt_in_a_round_leaves_the_last_complete_one() -> None:
    net, fits = _net(), [lambda: None, lambda: next(_interrupting())]

    def fit(model: nn.Module) -> None:
        fits.pop(0)()

    with pytest.raises(KeyboardInterrupt) as caught:
        sec.iterate(net, _data()[0], sec.Macs(0.5), fit=fit, evaluate=lambda model: 0.5, schedule=schedule.linear(2))
    assert caught.value.__notes__ == ["The model is as of round 1."]
    assert net[0].out_features < 16
    assert net(_data()[0]).isfinite().all()


def _interrupting() -> Iterator[Tensor]:
    raise KeyboardInterrupt
    yield


def _failing() -> Iterator[Tensor]:
    yield from _data()[:2]
    raise OSError("the disk is gone")


def test_batches_that_cannot_be_read() -> None:
    net = _net()
    before = reachable(net)
    with pytest.raises(sec.CalibrationError, match="sparsify: batch 3 could not be read: OSError: the disk is gone"):
        sec.sparsify(net, _failing, sec.NM(2, 4))
    with pytest.raises(sec.CalibrationError, match=r"sparsify: batches\(\) failed, which is called without arguments"):
        sec.sparsify(net, lambda number: _data(), sec.NM(2, 4))
    assert reachable(net) == before


class _Masked(nn.Module):
    """Some scores are minus infinity by a mask that is a part of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) + mask


def test_a_mask_of_minus_infinity_is_no_fault() -> None:
    mask = torch.tensor([0.0, -torch.inf, 0.0])
    batches = [(x, mask) for x in _data()]
    torch.manual_seed(0)
    net = _Masked()
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    sec.apply(net, plan, compensate=sec.LeastSquares(batches))
    found = sec.outcome(net)
    assert found is not None
    assert 0 < found.after < found.before < 1


class _Overflowing(nn.Module):
    """What the norm reads is not finite on large inputs, and what is put out is in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x).exp()).nan_to_num(0, 0, 0))


def test_what_is_not_finite_is_not_taken_for_statistics() -> None:
    torch.manual_seed(0)
    net, batches = _Overflowing(), [*_data(2), 1e4 * _data()[2]]
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    before = reachable(net)
    with pytest.raises(sec.CalibrationError, match=r"Statistics: batch 3: what is normalised .* not finite"):
        sec.apply(net, plan, verify=False, compensate=sec.Statistics(batches))
    assert reachable(net) == before


def test_weights_that_are_not_finite_are_said() -> None:
    net = _net()
    plan = sec.plan(sec.trace(net, _data()[0]), sec.Ratio(0.5))
    net[0].bias.data.fill_(torch.nan)
    with pytest.raises(sec.CalibrationError, match=r"LeastSquares: batch \d: no number that .* puts out is finite"):
        sec.apply(net, plan, verify=False, compensate=sec.LeastSquares(_data()))


def test_a_task_that_gives_nan_is_named() -> None:
    net, teacher = _net(), _net()

    def task(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean() * (torch.nan if torch.equal(batch, _data()[2]) else 1.0)

    before = reachable(net)
    with pytest.raises(sec.TrainingError, match="recover: batch 2: the loss is nan; leave the batch out"):
        sec.recover(net, teacher, [_data()[0], _data()[2]], steps=4, task=task)
    assert reachable(net) == before


@pytest.mark.parametrize("at", [0, 2])
def test_a_metric_that_is_no_number_ends_the_rounds(at: int) -> None:
    """Without a floor, nothing else would."""
    net, said = _net(), [0.5, 0.5, 0.5]
    said[at] = float("nan")
    before = reachable(net)
    with pytest.raises(sec.ScheduleError, match="evaluate returned nan"):
        sec.iterate(
            net,
            _data()[0],
            sec.Macs(0.5),
            fit=lambda model: None,
            evaluate=lambda model: said.pop(0),
            schedule=schedule.one_shot(),
        )
    assert reachable(net) == before


def test_a_last_batch_of_one_sample_does_not_judge() -> None:
    net, batches = _net(), [*_data(4), _data()[4][:1]]
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    sec.apply(net, plan, verify=False, compensate=sec.LeastSquares(batches))
    found = sec.outcome(net)
    assert found is not None
    assert found.held == 1
    assert all(0 <= layer.after <= layer.before < 2 for layer in found.layers)


def test_samples_one_by_one_give_errors_that_mean_something() -> None:
    net, batches = _net(), [row.unsqueeze(0) for row in torch.cat(_data(2))]
    plan = sec.plan(sec.trace(net, _data()[0]), sec.Ratio(0.5))
    sec.apply(net, plan, verify=False, compensate=sec.LeastSquares(batches[:6], statistics=False))
    found = sec.outcome(net)
    assert found is not None
    assert all(layer.before < 100 for layer in found.layers)


def test_a_method_of_ones_own_is_not_believed_without_a_look() -> None:
    net = _net()
    before = reachable(net)
    with pytest.raises(sec.PlanError, match=r"sparsify: method leaves \d+ weights of 0.weight too many for NM"):
        sec.sparsify(net, _data(), sec.NM(1, 2), method=lambda problem, pattern: problem.weight)
    with pytest.raises(sec.PlanError, match=r"method gives a weight of shape .* for 0.weight, not \(3,\)"):
        sec.sparsify(net, _data(), sec.NM(1, 2), method=lambda problem, pattern: torch.zeros(3))
    with pytest.raises(sec.PlanError, match=r"method\(problem, pattern\) failed on 0.weight: ZeroDivisionError"):
        sec.sparsify(net, _data(), sec.NM(1, 2), method=lambda problem, pattern: 1 / 0)
    assert reachable(net) == before
