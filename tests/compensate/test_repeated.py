"""Parameters that a run uses again and again: fitted to what the uncut model feeds them."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import secateur as sec
from represented import represented
from secateur.calibrate import calibrating
from secateur.compensate.refit import repeated


class Last(nn.Module):
    """What a recurrent layer says at the end."""

    def __init__(self, kind, **more) -> None:
        super().__init__()
        self.rnn = kind(5, 24, batch_first=True, **more)
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def smooth(n: int, steps: int) -> torch.Tensor:
    """Series in which neighbouring steps are alike, as a recurrence meets them."""
    return torch.randn(n, steps, 5).cumsum(1) / 4


def naive_recurrence(net: Last, x: torch.Tensor, kept: list[int]) -> np.ndarray:
    """The recurrent weight of kept units that fits an uncut LSTM's own states best, by numpy."""
    rnn, hidden = net.rnn, 24
    h = c = torch.zeros(len(x), hidden)
    inputs, outputs = [], []
    for t in range(x.shape[1]):
        recurrent = h @ rnn.weight_hh_l0.T + rnn.bias_hh_l0
        inputs.append(h)
        outputs.append(recurrent)
        i, f, g, o = (x[:, t] @ rnn.weight_ih_l0.T + rnn.bias_ih_l0 + recurrent).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    rows = [gate * hidden + unit for gate in range(4) for unit in kept]
    design = torch.cat(inputs)[:, kept].detach().double().numpy()
    design = np.concatenate([design, np.ones((len(design), 1))], 1)
    solution, *_ = np.linalg.lstsq(design, torch.cat(outputs)[:, rows].detach().double().numpy(), rcond=None)
    return solution[:-1].T


def test_a_recurrence_is_fitted_to_the_states_of_the_uncut_model() -> None:
    torch.manual_seed(0)
    net, x = Last(nn.LSTM).eval(), smooth(256, 12)
    plan = sec.plan(sec.trace(net, x[:1]), sec.Ratio(0.25))
    want = naive_recurrence(net, x, list(plan.axes[0].keep))
    small = copy.deepcopy(net)
    sec.apply(small, plan)
    with calibrating(net, small):
        kept = {name: {d: torch.as_tensor(k) for d, k in dims.items()} for name, dims in plan.kept.items()}
        uses, tensors = Counter({"rnn.weight_hh_l0": 12}), dict(small.named_parameters())
        ((slot, folds),) = repeated(net, tensors, kept, [x], frozenset(), uses)
        weight, _ = folds.fit.solve(slot.weight, 1e-9, shift=True)
    assert torch.equal(slot.weight[0], small.rnn.weight_hh_l0)
    np.testing.assert_allclose(weight[0].numpy(), want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("more", represented(({}, {"bias": False}, {"num_layers": 2}), by=({},)), ids=str)
def test_what_is_left_of_a_recurrence_takes_over(kind, more) -> None:
    torch.manual_seed(0)
    net, batches = Last(kind, **more).eval(), [smooth(64, 20) for _ in range(4)]
    fresh = smooth(256, 20)
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    errors = []
    for compensate in (None, sec.LeastSquares(batches)):
        small = copy.deepcopy(net)
        sec.apply(small, plan, compensate=compensate)
        errors.append((small(fresh) - net(fresh)).square().mean().item())
    assert errors[1] < 0.5 * errors[0]
    assert any("weight_hh" in layer.name and layer.after < layer.before for layer in sec.outcome(small).layers)


def test_a_layer_that_is_used_twice_is_refitted() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.shared, self.out = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x):
            x = self.into(x).relu()
            return self.out(self.shared(self.shared(x).relu()).relu())

    torch.manual_seed(0)
    net, batches = Twice().eval(), [torch.randn(256, 6)]
    compensate = sec.LeastSquares(batches)
    sec.apply(net, sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.4)), compensate=compensate)
    assert "shared.weight" in [layer.name for layer in sec.outcome(net).layers]
    assert sec.outcome(net).after < 0.5 * sec.outcome(net).before
    assert not any("shared.weight" in note for note in sec.outcome(net).notes)


@pytest.mark.parametrize("how", represented(("eager", "grouped_mm", "batched_mm"), by=("eager",)))
def test_experts_are_refitted_however_they_are_carried_out(how: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=99, num_key_value_heads=2, num_local_experts=4, **sizes)
    config._experts_implementation = how
    model = MixtralForCausalLM(config).eval()
    batches = [{"input_ids": torch.randint(0, 99, (8, 16))} for _ in range(3)]
    plan = sec.plan(sec.trace(model, batches[0]), {"*.experts.gate_up_proj": 0.5}, round_to=8)
    compensate = sec.LeastSquares(batches)
    sec.apply(model, plan, compensate=compensate)
    layers = [layer for layer in sec.outcome(model).layers if layer.name.endswith("experts.down_proj")]
    assert len(layers) == 8  # four experts in each of two layers
    assert all(layer.after < 0.8 * layer.before for layer in layers)
    assert not any("experts" in note for note in sec.outcome(model).notes)
    assert model.config._experts_implementation == how


def test_parts_of_a_packed_parameter_are_refitted_each_by_itself() -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 32), nn.Linear(6, 32)
            self.attention, self.head = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 3)

        def forward(self, x, y):
            x, y = self.one(x).relu(), self.other(y).relu()
            return self.head(self.attention(x, y, y, need_weights=False)[0])

    torch.manual_seed(0)
    net, batches = Across().eval(), [(torch.randn(32, 5, 6), torch.randn(32, 7, 6)) for _ in range(3)]
    whole = copy.deepcopy(net)
    plan = sec.plan(sec.trace(net, batches[0]), {"one.weight": 0.5, "other.weight": 0.5})
    compensate = sec.LeastSquares(batches)
    sec.apply(net, plan, compensate=compensate)
    fresh = torch.randn(64, 5, 6), torch.randn(64, 7, 6)
    plain = sec.apply(copy.deepcopy(whole), plan)
    errors = [(model(*fresh) - whole(*fresh)).square().mean().item() for model in (plain, net)]
    assert errors[1] < 0.7 * errors[0]


def test_a_fit_of_a_recurrence_that_does_not_help_is_taken_back(monkeypatch) -> None:
    from secateur.compensate.moments import Moments

    torch.manual_seed(0)
    net, batches = Last(nn.LSTM).eval(), [smooth(64, 20)]
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.25))
    plain = sec.apply(copy.deepcopy(net), plan)
    monkeypatch.setattr(Moments, "solve", lambda self, start, ridge, shift: (start.double() * 50, self.y))
    monkeypatch.setattr(Moments, "error", lambda self, weight, shift: 1 / weight.double().abs().sum(2))
    compensate = sec.LeastSquares(batches)
    with pytest.warns(sec.SecateurWarning, match="taken back"):
        sec.apply(net, plan, compensate=compensate)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
