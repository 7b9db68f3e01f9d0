"""Both oracles notice wrong cuts, name the first layer that differs, and leave the model as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from oracle import each_axis
from secateur.surgery import cut as cut_module
from surgery.surgery_state import everything
from verify.planted import Fault, attribute, roll, scale, swap_rows

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if exact else nn.GroupNorm(1, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.heads, self.head_dim = 4, 2
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.norm(self.conv1(x)).relu()).flatten(2).transpose(1, 2)
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        out = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v
        x = x + self.proj(out.transpose(1, 2).reshape(b, t, -1))
        return self.fc(x.mean(1))


def made(exact: bool) -> tuple[Net, sec.Plan]:
    torch.manual_seed(0)
    net = Net(exact)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.5)
    graph = sec.trace(net, X)
    plan = sec.plan(graph, each_axis(graph, 0.5), importance=sec.Random(1), protect=["qkv heads"])
    assert all(axis.exact for axis in plan.axes) == exact
    return net, plan


FAULTS: dict[str, tuple[Fault, str]] = {
    "two rows of a weight swapped": (swap_rows("conv1.weight"), "conv1"),
    "two columns of a weight swapped": (swap_rows("qkv.weight", 1), "qkv"),
    "a bias off by one": (roll("conv1.bias"), "conv1"),
    "a norm's scale off by one": (roll("norm.weight"), "norm"),
    "heads off by one": (roll("proj.weight", 1), "proj"),
    "query rows off by one": (roll("qkv.bias"), "qkv"),
    "slightly other numbers": (scale("fc.weight"), "fc"),
    "a bias dropped": (scale("proj.bias", 0.0), "proj"),
}


def planted(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    original = cut_module._swap

    def swap(model: nn.Module, plan: sec.Plan, new: dict[int, Tensor]) -> None:
        original(model, plan, new)
        fault(model)

    monkeypatch.setattr(cut_module, "_swap", swap)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_cut_is_noticed_and_undone(name: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, plan = made(exact)
    fault, layer = FAULTS[name]
    before = everything(net)
    with monkeypatch.context() as patch:
        planted(patch, fault)
        with pytest.raises(sec.VerifyError, match=f"the first layer that differs is {layer}[. ]"):
            sec.apply(net, plan)
    assert everything(net) == before
    sec.apply(net, plan)  # the right cut still works


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
@pytest.mark.parametrize(
    "fault",
    [attribute("", "heads", 2), attribute("", "head_dim", 2), attribute("conv2", "groups", 1)],
    ids=["heads", "head_dim", "groups"],
)
def test_a_wrong_attribute_is_noticed(fault: Fault, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, plan = made(exact)
    before = everything(net)
    planted(monkeypatch, fault)
    with pytest.raises(sec.VerifyError, match=r"does not run|differs"):
        sec.apply(net, plan)
    assert everything(net) == before


def test_without_verification_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, plan = made(True)
    planted(monkeypatch, swap_rows("conv1.weight"))
    assert sec.apply(net, plan, verify=False).conv1.out_channels == 2


def test_a_wrong_choice_of_positions_of_the_same_count_is_noticed() -> None:
    """The plan itself disagrees between two tensors of one axis."""
    net, plan = made(True)
    wrong = {name: dict(dims) for name, dims in plan.kept.items()}
    kept = wrong["conv1.bias"][0]
    other = tuple(sorted(set(range(8)) - set(kept)))
    wrong["conv1.bias"][0] = other[: len(kept)]
    before = everything(net)
    # The oracle zeroes what the plan says, so a bias is kept where its weight is gone: that is not what is cut.
    with pytest.raises(sec.VerifyError):
        sec.apply(net, replace(plan, kept=wrong))
    assert everything(net) == before


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
def test_low_precision_is_verified_in_high(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Net(exact).to(torch.bfloat16)
    plan = sec.plan(sec.trace(net, X.to(torch.bfloat16)), sec.Ratio(0.5))
    with monkeypatch.context() as patch:
        planted(patch, scale("fc.weight", 1.005))  # less than bfloat16 can be trusted with
        with pytest.raises(sec.VerifyError, match="first layer that differs is fc"):
            sec.apply(net, plan)
    sec.apply(net, plan)
    assert net.conv1.weight.dtype == torch.bfloat16


def test_verification_leaves_statistics_and_random_numbers_alone() -> None:
    net, plan = made(True)
    net.train()
    mean = net.norm.running_mean.clone()
    state = torch.get_rng_state()
    sec.apply(net, plan)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net.norm.running_mean, mean[plan.keep["norm.running_mean"][0]])
    assert net.norm.num_batches_tracked == 0
