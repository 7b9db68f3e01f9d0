"""What a tensor was besides its data, it still is after a cut."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils import prune as torch_prune

import secateur as sec
from oracle import Net, difference, outputs, randomised, zeroed
from secateur import prune


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def halved(net: nn.Module, example: Tensor = IMAGE, **keywords: object) -> tuple[nn.Module, sec.Plan]:
    plan = sec.plan(sec.trace(net, example), sec.Ratio(0.5))
    return sec.apply(net, plan, **keywords), plan  # type: ignore[arg-type]


def test_values_are_the_kept_slices() -> None:
    net = conv_net()
    old = copy.deepcopy(net.state_dict())
    _, plan = halved(net)
    keep = plan.keep
    assert torch.equal(net[0].weight, old["0.weight"][keep["0.weight"][0]])
    assert torch.equal(net[0].bias, old["0.bias"][keep["0.bias"][0]])
    assert torch.equal(net[1].running_var, old["1.running_var"][keep["1.running_var"][0]])
    assert torch.equal(net[3].weight, old["3.weight"][:, keep["3.weight"][1]])
    assert torch.equal(net[3].bias, old["3.bias"])
    assert set(keep) == {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.weight"}


def test_tensors_that_no_cut_touches_stay_the_same_objects() -> None:
    net = conv_net()
    bias, batches = net[3].bias, net[1].num_batches_tracked
    halved(net)
    assert net[3].bias is bias
    assert net[1].num_batches_tracked is batches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_stays_and_low_precision_is_proved_in_high(dtype: torch.dtype) -> None:
    net, _ = halved(conv_net().to(dtype), IMAGE.to(dtype))
    assert {p.dtype for p in net.parameters()} == {dtype}
    assert net(IMAGE.to(dtype)).dtype == dtype


def test_requires_grad_stays() -> None:
    net = conv_net()
    net[0].weight.requires_grad_(False)
    net[1].bias.requires_grad_(False)
    before = {name: p.requires_grad for name, p in net.named_parameters()}
    halved(net)
    assert {name: p.requires_grad for name, p in net.named_parameters()} == before
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())


def test_memory_format_stays() -> None:
    net = conv_net().to(memory_format=torch.channels_last)
    halved(net, IMAGE.to(memory_format=torch.channels_last))
    for conv in (net[0], net[3]):
        assert conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert not conv.weight.is_contiguous()
    plain = conv_net()
    halved(plain)
    assert plain[0].weight.is_contiguous()


def test_custom_attributes_stay() -> None:
    net = conv_net()
    net[0].weight.weight_decay = 0.1
    halved(net)
    assert net[0].weight.weight_decay == 0.1


def test_gradients_are_cut_along() -> None:
    net = conv_net()
    net(IMAGE).square().sum().backward()
    old = {name: p.grad.clone() for name, p in net.named_parameters()}
    _, plan = halved(net)
    for name, p in net.named_parameters():
        want = old[name]
        for dim, index in plan.keep.get(name, {}).items():
            want = want.index_select(dim, index)
        assert torch.equal(p.grad, want), name


def test_hooks_on_tensors_and_modules_still_run() -> None:
    net = conv_net()
    seen: list[str] = []
    net[0].weight.register_hook(lambda grad: seen.append(f"grad {grad.shape[0]}"))
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"after {p.shape[0]}"))
    net[0].register_forward_hook(lambda m, i, o: seen.append(f"forward {o.shape[1]}"))
    net[0].register_full_backward_hook(lambda m, i, o: seen.append("backward"))
    halved(net)
    seen.clear()
    net(IMAGE).sum().backward()
    assert sorted(seen) == ["after 4", "backward", "forward 4", "grad 4"]


def test_tied_weights_stay_tied() -> None:
    embedding = nn.Embedding(11, 8)
    out = nn.Linear(8, 11, bias=False)
    out.weight = embedding.weight
    net = Net(lambda n, i: n.out(n.mid(n.embedding(i)).relu()), embedding=embedding, mid=nn.Linear(8, 8), out=out)
    _, plan = halved(net, torch.randint(0, 11, (2, 5)))
    assert plan.params.after == sum(p.numel() for p in net.parameters()) < plan.params.before
    assert net.out.weight is net.embedding.weight
    assert net.out.weight.shape == (11, 4)


def test_weight_norm_both_ways() -> None:
    for wrap in (torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm):
        torch.manual_seed(0)
        net = nn.Sequential(wrap(nn.Linear(4, 8)), nn.ReLU(), wrap(nn.Linear(8, 2)))
        halved(net, torch.randn(3, 4))
        assert net[0].weight.shape == (4, 4)
        assert (net[0].out_features, net[2].in_features) == (4, 4)
        assert len(list(net[0].parameters())) == 3
        net(torch.randn(3, 4)).sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())


@pytest.mark.parametrize("wrap", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_is_cut_or_blocked_but_never_wrong(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(wrap(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    net.eval()
    halved(net, torch.randn(3, 4))
    net.train()
    net(torch.randn(3, 4)).sum().backward()
    assert net(torch.randn(3, 4)).shape == (3, 2)


@pytest.mark.parametrize("masks", [torch_prune, prune], ids=["torch", "secateur"])
def test_masks_are_carried_along(masks: object) -> None:
    net = randomised(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    masks.random_unstructured(net[0], "weight", amount=0.4)  # type: ignore[attr-defined]
    masks.random_unstructured(net[2], "weight", amount=0.4)  # type: ignore[attr-defined]
    x = torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        net(x)  # torch's masked weight now has no history, or torch could not copy it
    big = copy.deepcopy(net)
    _, plan = halved(net, x)
    assert net[0].weight_orig.shape == net[0].weight_mask.shape == (4, 4)
    assert net[2].weight_orig.shape == net[2].weight_mask.shape == net[2].weight.shape == (2, 4)
    assert (net[0].out_features, net[2].in_features) == (4, 4)
    assert difference(outputs(net, x), outputs(zeroed(big, plan.kept), x)) < 1e-12
    net(x).sum().backward()
    assert (net[0].weight_orig.grad[net[0].weight_mask == 0] == 0).all()
    masks.remove(net[0], "weight")  # type: ignore[attr-defined]
    assert net[0].weight.shape == (4, 4)


def test_parametrizations_of_ones_own_are_carried_along() -> None:
    class Halve(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    parametrize.register_parametrization(net[0], "weight", Halve())
    halved(net, torch.randn(3, 4))
    assert torch.equal(net[0].weight, net[0].parametrizations.weight.original / 2)
    assert net[0].weight.shape == (4, 4)


def test_tensors_in_plain_attributes_and_aliases_follow() -> None:
    def run(n, x):
        n.table["scale"] = n.table["scale"] * 1  # its own: what a model is only given is not cut
        return n.b(n.a(x) * n.table["scale"])

    net = Net(run, a=nn.Linear(4, 8), b=nn.Linear(8, 2))
    net.table = {"scale": torch.rand(8)}
    net.alias = [net.a.weight]
    halved(net, torch.randn(3, 4))
    assert net.table["scale"].shape == (4,)
    assert net.alias[0] is net.a.weight


def test_a_model_stays_in_its_mode() -> None:
    net = conv_net().train()
    net[1].eval()
    before = [m.training for m in net.modules()]
    running = net[1].running_mean.clone()
    _, plan = halved(net)
    assert [m.training for m in net.modules()] == before
    assert torch.equal(net[1].running_mean, running[plan.keep["1.running_mean"][0]])


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_weight_that_takes_a_step_when_read_in_training_takes_none(norm: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Linear(4, 12)), nn.ReLU(), norm(nn.Linear(12, 8)), nn.ReLU(), nn.Linear(8, 2)).train()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    _, plan = halved(net, torch.randn(3, 4))
    assert all(module.training for module in net.modules())
    assert [net[0].out_features, net[2].out_features] == [6, 4]
    for name, buffer in net.named_buffers():
        left = before[name]
        for dim, index in plan.keep.get(name, {}).items():
            left = left.index_select(dim, index)
        assert torch.equal(buffer, left), name
