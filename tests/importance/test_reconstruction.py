"""Reconstruction: the error that is left when the others take over, checked against plain least squares."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import nn

import secateur as sec
from secateur.calibrate import fisher_weights, products
from secateur.errors import SecateurError
from secateur.importance import reconstruction
from secateur.importance.reconstruction import MomentStore


def residual(inputs: np.ndarray, targets: np.ndarray) -> float:
    """The mean squared error that a fit with a shift leaves."""
    design = np.concatenate([inputs, np.ones((len(inputs), 1))], 1)
    solution, *_ = np.linalg.lstsq(design, targets, rcond=None)
    return float(((design @ solution - targets) ** 2).sum() / len(inputs))


def scored(net, batches, ridge=1e-9):
    found = {}

    def keep(context):
        found[context.axis.name] = criterion(context)
        return found[context.axis.name]

    criterion = sec.Reconstruction(batches, ridge=ridge)
    sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5), importance=keep)
    return found


def test_scores_are_what_the_error_of_a_fit_grows_by() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    x = torch.randn(400, 6)
    (scores,) = scored(net, [x]).values()
    fisher = MomentStore(net, [x]).of({"2.weight"})["2.weight"][0].fisher[0].numpy()
    hidden = torch.relu(net[0](x)).detach().double().numpy()
    targets = hidden @ net[2].weight.detach().double().numpy().T * np.sqrt(fisher)
    left, floor, before = list(range(8)), 0.0, 0.0
    for _ in range(8):
        errors = {j: residual(hidden[:, [i for i in left if i != j]], targets) - before for j in left}
        first = min(errors, key=errors.get)
        floor = max(floor, errors[first])
        assert float(scores[first]) == pytest.approx(floor, rel=2e-2, abs=1e-6)
        before += errors[first]
        left.remove(first)


def test_a_channel_that_others_express_goes_first() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3, groups=2), nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        net[0].weight[2] = net[0].weight[0] - net[0].weight[1]
    first = next(iter(scored(net, [torch.randn(8, 3, 9, 9)]).values()))
    assert int(first.argmin()) in (0, 1, 2)


def test_an_axis_that_only_data_reads_is_scored_by_what_makes_it() -> None:
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    found = scored(net, [torch.randn(4, 3, 32, 32)], ridge=1e-3)
    assert all(torch.isfinite(scores).all() and (scores > 0).any() for scores in found.values())
    assert all(float(scores.max()) < 1e20 for scores in found.values())


def test_moments_that_do_not_fit_in_memory_take_more_passes_and_come_to_the_same(monkeypatch) -> None:
    net, batches = timm.create_model("test_resnet").eval(), [torch.randn(8, 3, 64, 64) for _ in range(2)]
    passes = []
    original = MomentStore._pass
    monkeypatch.setattr(MomentStore, "_pass", lambda self, names: passes.append(names) or original(self, names))
    once = scored(net, batches)
    assert len(passes) == 1
    monkeypatch.setattr(reconstruction, "_HELD", 1)
    many = scored(net, batches)
    assert len(passes) == 1 + len(many)
    assert all(torch.equal(once[name], many[name]) for name in once)


def test_a_layer_that_is_too_wide_for_its_moments_is_scored_by_variances(monkeypatch) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), torch.randn(400, 6)
    monkeypatch.setattr(products, "WIDEST", 7)
    (scores,) = scored(net, [x]).values()
    moments = MomentStore(net, [x]).of({"2.weight"})["2.weight"][0]
    spread = torch.relu(net[0](x)).detach().double().var(0, correction=0)
    want = (net[2].weight.detach().double().square() * moments.fisher[0].unsqueeze(1)).sum(0) * spread
    torch.testing.assert_close(scores.sort().values, want.sort().values, rtol=1e-4, atol=1e-9)
    assert moments.xx.shape == (1, 8)


def test_the_model_is_as_it_was() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3)).train()
    net[0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    scored(net, [torch.randn(4, 3, 8, 8)])
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert net.training
    assert net[1].training
    assert not net[0].weight.requires_grad
    assert all(p.grad is None for p in net.parameters())


def test_bad_batches_are_refused() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    for batches in ([], torch.zeros(3, 6), None):
        with pytest.raises(SecateurError, match="batches"):
            sec.plan(sec.trace(net, torch.zeros(1, 6)), sec.Ratio(0.5), importance=sec.Reconstruction(batches))


@pytest.mark.parametrize("follows", ["bias", "norm", "nothing"])
def test_a_constant_is_free_only_where_a_shift_can_take_its_place(follows: str) -> None:
    torch.manual_seed(0)
    last = [nn.Linear(4, 2, bias=follows == "bias")] + ([nn.BatchNorm1d(2)] if follows == "norm" else [])
    net = nn.Sequential(nn.Linear(6, 4), *last, nn.Tanh(), nn.Linear(2, 3)).eval()
    with torch.no_grad():
        net[0].weight[1], net[0].bias[1] = 0.0, 5.0
    batches = [torch.randn(64, 6)]
    graph = sec.trace(net, batches[0])
    kept = sec.plan(graph, {"0.weight": 0.25}, importance=sec.Reconstruction(batches)).axes[0].keep
    assert (1 in kept) == (follows == "nothing")


def test_what_is_read_at_many_places_of_an_input_counts_more_but_not_as_often() -> None:
    """Errors at 16 places count as 2: layers behind make up for some of their sum."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 3)
    )
    tokens = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))  # each layer reads as often as the others
    for model, shape, times in (
        (net, (8, 3, 4, 4), {"2.weight": 2.0, "5.weight": 1.0}),
        (tokens, (8, 16, 3), {"2.weight": 1.0}),
    ):
        batches = [torch.randn(shape) for _ in range(2)]
        once, counted = fisher_weights(model, batches), MomentStore(model, batches)._fisher
        assert {part[0] for part in once} >= times.keys()
        for part in (part for part in once if part[0] in times):
            torch.testing.assert_close(counted[part], times[part[0]] * once[part])
