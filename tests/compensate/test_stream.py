"""Data come and go: any iterable, as much as one likes, in the memory of one batch; what is held back judges."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import secateur as sec
from secateur.compensate import moments
from secateur.compensate.moments import Folds, held_back

_MEMORY = """
import copy, resource
import torch
from torch import nn
import secateur as sec
from secateur.calibrate import data, stages

data._ROOM = stages.Runs.__init__.__kwdefaults__["room"] = 2**23
torch.manual_seed(0)
torch.set_num_threads(1)
layers = [nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 8, 1)]
net = nn.Sequential(*layers).eval()
plan = sec.plan(sec.trace(net, torch.zeros(1, 3, 24, 24)), sec.Ratio(0.5))
for count in (3, 30):
    small = copy.deepcopy(net)
    batches = (torch.randn(32, 3, 24, 24) for _ in range(count))
    sec.apply(small, plan, compensate=sec.LeastSquares(batches), verify=False)
    assert sec.outcome(small).after < sec.outcome(small).before
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_ten_times_the_data_take_no_more_memory() -> None:
    ran = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    few, many = map(int, ran.stdout.split())  # what two layers put out for 30 batches is 280 MB
    assert many < 1.2 * few


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5, bias=False)).eval()


def batches(n: int, rows: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=generator) for _ in range(n)]


def fitted(data, **options) -> nn.Module:
    model = net()
    plan = sec.plan(sec.trace(model, torch.zeros(1, 6)), sec.Ratio(0.5))
    return sec.apply(model, plan, compensate=sec.LeastSquares(data, **options))


def test_a_stream_gives_what_a_list_does() -> None:
    want = fitted(batches(10))
    loader = DataLoader(TensorDataset(torch.cat(batches(10))), batch_size=40)
    streams = {
        "generator": iter(batches(10)),
        "function": lambda: iter(batches(10)),
        "endless": sec.Data(itertools.cycle(batches(10)), samples=400),
        "loader": (inputs for (inputs,) in loader),
    }
    for name, stream in streams.items():
        got = fitted(stream)
        assert all(torch.equal(a, b) for a, b in zip(got.parameters(), want.parameters(), strict=True)), name
        assert str(sec.outcome(got)) == str(sec.outcome(want))


def test_errors_are_those_on_data_that_were_not_fitted() -> None:
    data = batches(16)
    model = fitted(data)
    whole, outcome = net(), sec.outcome(model)
    plain = sec.apply(net(), sec.plan(sec.trace(net(), torch.zeros(1, 6)), sec.Ratio(0.5)))
    unseen = torch.cat([data[n] for n in held_back(16)])
    for cut, said in ((plain, outcome.before), (model, outcome.after)):
        off = (cut(unseen) - whole(unseen)).square().sum() / whole(unseen).square().sum()
        assert float(off.detach()) == pytest.approx(said, rel=1e-4)
    assert outcome.held == 2
    assert "on 2 batches that were not fitted" in str(outcome)


def test_batches_that_are_held_back_have_no_part_in_the_fit() -> None:
    data = batches(8)
    other = [*data[:6], data[6] + 0.01 * torch.randn(40, 6), data[7]]  # one of eight is held back, not the last
    one, two = fitted(data, ridge=1e-3), fitted(other, ridge=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_the_ridge_is_chosen_by_what_was_not_fitted() -> None:
    """Outputs that are noise: the less a fit of as many columns as rows moves, the better it does elsewhere."""
    generator = torch.Generator().manual_seed(0)
    folds, start = Folds(held_back(8)), torch.zeros(1, 2, 24, dtype=torch.double)
    for number in range(8):
        x, y = (torch.randn(1, 4, n, dtype=torch.double, generator=generator) for n in (24, 2))
        folds.of(number).add(x, y)
    least = folds.fit.solve(start, 1e-6, shift=False)[0]
    chosen = moments.fitted(folds, start, 1e-6, shift=False)[0]
    assert chosen.square().sum() < 0.8 * least.square().sum()  # what is off anywhere else, beside the noise itself


def test_a_layer_whose_fit_does_not_carry_over_stays_as_it_is() -> None:
    data = [torch.randn(3, 6) for _ in range(8)]  # 21 rows for 24 columns, and noise in the rest
    data[6] = 30 * torch.randn(200, 6) ** 3
    model = net()
    plan = sec.plan(sec.trace(model, torch.zeros(1, 6)), sec.Ratio(0.1))
    plain = sec.apply(copy.deepcopy(model), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sec.SecateurWarning)
        sec.apply(model, plan, compensate=sec.LeastSquares(data, ridge=1e-9))
    outcome = sec.outcome(model)
    assert outcome.after <= outcome.before
    left = [layer.name for layer in outcome.layers if "left as it was" in layer.note]
    for name in left:
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name))
    assert left or outcome.taken_back


def test_inputs_that_never_change_and_fewer_rows_than_columns() -> None:
    for data in ([torch.ones(2, 6)] * 9, [torch.zeros(1, 6)] * 4, [torch.randn(1, 6)]):
        model = net()
        plan = sec.plan(sec.trace(model, torch.zeros(1, 6)), sec.Ratio(0.5))
        sec.apply(model, plan, compensate=sec.LeastSquares(data))
        assert sec.outcome(model).after <= sec.outcome(model).before
        assert all(p.isfinite().all() for p in model.parameters())


def test_a_language_model_is_compressed_from_a_stream_of_tokens() -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_hidden_layers=2, **small)).eval()
    stream = ({"input_ids": torch.randint(0, 99, (8, 16)), "labels": torch.zeros(8)} for _ in itertools.count())
    example = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    report = sec.compress(model, example, sec.Params(0.8), sec.Data(stream, tokens=1000), timed=False)
    assert report.compensation.held == 1  # of 8 batches of 128 tokens
    assert report.compensation.after < report.compensation.before
    assert report.params.after <= 0.8 * report.params.before


def test_batches_on_which_a_model_goes_another_way_are_refused() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one, self.two = nn.Linear(6, 24), nn.Linear(24, 5), nn.Linear(24, 5)

        def forward(self, x):
            return (self.one if x.sum() > 0 else self.two)(self.first(x).relu())

    model, data = Forked().eval(), [torch.ones(40, 6), -torch.ones(40, 6)]
    before = copy.deepcopy(model.state_dict())
    plan = sec.plan(sec.trace(model, data[0]), {"first.weight": 0.5})
    with pytest.raises(sec.CalibrationError, match=r"batch 2 does not come to one.weight"):
        sec.apply(model, plan, compensate=sec.LeastSquares(data))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
