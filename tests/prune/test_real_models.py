"""A whole network, pruned: the same function as a dense one with the weights set to zero by hand."""

import copy

import torch
from torch import nn
from torchvision.models import resnet18

from secateur import prune


def test_resnet18():
    torch.manual_seed(0)
    dense = resnet18().eval()
    masked = copy.deepcopy(dense)
    names = [n for n, m in masked.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    sites = [(masked.get_submodule(n), "weight") for n in names]
    total = sum(getattr(*site).numel() for site in sites)
    for kept in (0.5, 0.25):
        prune.global_unstructured(sites, prune.L1Unstructured, amount=0.5)
        assert abs(sum(int(m.weight_mask.sum()) for m, _ in sites) - kept * total) < 1

    everything = torch.cat([dense.get_submodule(n).weight.detach().abs().flatten() for n in names])
    border = everything.sort().values[round(0.75 * total) - 1]
    with torch.no_grad():
        for n in names:
            weight = dense.get_submodule(n).weight
            weight[weight.abs() <= border] = 0
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(masked(x), dense(x))
        made = [m.weight for m, _ in sites]
        masked(x)
        assert all(m.weight is w for (m, _), w in zip(sites, made, strict=True))
        assert torch.equal(copy.deepcopy(masked)(x), dense(x))
    for site in sites:
        prune.remove(*site)
    assert masked.state_dict().keys() == dense.state_dict().keys()
    for key, value in dense.state_dict().items():
        assert torch.equal(masked.state_dict()[key], value), key
