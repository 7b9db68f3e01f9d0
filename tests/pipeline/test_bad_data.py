"""Data that tell nothing, or too little, or break the model: clear words and the model as it was, or a sound result."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import secateur as sec


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(30, 12), nn.Linear(12, 24), nn.Linear(24, 30)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.up(self.table(ids)).relu())


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))


def _ids(largest: int) -> Tensor:
    return torch.randint(0, largest, (4, 8), generator=torch.Generator().manual_seed(0))


_BROKEN = torch.randn(16, 6).index_fill(0, torch.tensor([3]), float("nan"))
_REFUSED = {
    "NaN": (_net, torch.ones(1, 6), [torch.randn(16, 6), _BROKEN], "not finite"),
    "infinite": (_net, torch.ones(1, 6), [torch.full((16, 6), float("inf"))], "not finite"),
    "tokens out of range": (Words, _ids(30), [_ids(30), _ids(30), 30 + _ids(30)], r"on batch 3.*index out of range"),
    "of another shape": (_net, torch.ones(1, 6), [torch.randn(16, 6), torch.randn(16, 5)], "failed on batch 2"),
    "none": (_net, torch.ones(1, 6), [], "no batches"),
}


def _compress(net: nn.Module, example: Tensor, batches: list[Tensor]) -> object:
    return sec.compress(net, example, sec.Params(0.6), batches, timed=False)


def _factor(net: nn.Module, _: Tensor, batches: list[Tensor]) -> object:
    return sec.factor(net, "up" if isinstance(net, Words) else "2", batches)


@pytest.mark.parametrize("case", _REFUSED)
@pytest.mark.parametrize("way", [_compress, _factor])
def test_refused_with_the_reason_and_the_model_is_as_it_was(case: str, way: Callable[..., object]) -> None:
    make, example, batches, words = _REFUSED[case]
    net = make()
    before, kinds = copy.deepcopy(net.state_dict()), [type(module) for module in net.modules()]
    with pytest.raises(sec.SecateurError, match=words):
        way(net, example, batches)
    assert [type(module) for module in net.modules()] == kinds
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    "batches",
    [[torch.ones(8, 6)] * 4, [torch.zeros(2, 6)] * 9, [torch.randn(1, 6)], [torch.randn(2, 6) for _ in range(8)]],
    ids=["that never change", "all zero", "one sample", "fewer samples than columns"],
)
def test_data_that_tell_little_do_no_harm(batches: list[Tensor]) -> None:
    net = _net()
    report = sec.compress(net, torch.ones(1, 6), sec.Params(0.6), batches, timed=False)
    assert report.params.after <= 0.6 * report.params.before
    assert report.compensation.after <= report.compensation.before * (1 + 1e-6) + 1e-9
    assert all(p.isfinite().all() for p in net.parameters())
