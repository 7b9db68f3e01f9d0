"""Removing hidden units: gate by gate as `torch.ao` does it, or whole units, exactly."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.pruning._experimental.pruner as theirs
from removal_models import Off, masked, rows_pruner, shapes
from torch import Tensor, nn

from secateur import SecateurWarning, ao
from secateur.errors import SecateurError

GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


class Tagger(nn.Module):
    """A recurrent module and a linear layer; returns the states too if asked to."""

    def __init__(self, kind: Any, states: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 6, **options)
        width = (options.get("proj_size") or 6) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, 4)
        self.states = states

    def forward(self, x: Tensor) -> Any:
        out, states = self.rnn(x)
        return (self.out(out), states) if self.states else self.out(out)


class TorchTagger(nn.Module):
    """What torch.fx can trace."""

    def __init__(self, norm: bool, layers: int) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 6, layers), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(6) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        if self.norm is not None:
            out = self.norm(out)
        return self.out(out)


def gate_rows(layers: int, agree: bool) -> Off:
    """Two of six rows of each gate: the same ones in all gates, or others in each."""
    off = {}
    for layer in range(layers):
        for k, part in enumerate(("ih", "hh")):
            shift = [0] * 4 if agree else [layer + k + gate for gate in range(4)]
            off[f"rnn.weight_{part}_l{layer}"] = [6 * g + (i + shift[g]) % 6 for g in range(4) for i in (layer, 3)]
    return off


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("norm", [True, False])
def test_the_same_as_torch_for_the_same_masks(norm: bool, layers: int, agree: bool) -> None:
    model = TorchTagger(norm, layers)
    mine, other, x = copy.deepcopy(model), copy.deepcopy(model), torch.randn(5, 2, 3)
    off = gate_rows(layers, agree)
    other = rows_pruner(theirs.BaseStructuredSparsifier, other, off).prune()
    pruner = masked(mine, off)
    pruner.prune()
    assert shapes(mine) == shapes(other)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in mine.state_dict().items())
    torch.testing.assert_close(mine(x), other(x))
    assert mine.rnn.hidden_size == 4
    assert {name for name, _ in pruner.removal.inexact} == off.keys()  # biases are not masked


def test_saliency_pruner_against_torch() -> None:
    model = TorchTagger(norm=False, layers=2)
    mine, other, x = copy.deepcopy(model), copy.deepcopy(model), torch.randn(5, 2, 3)
    config = [{"tensor_fqn": name} for name in gate_rows(2, agree=True)]
    outputs = []
    for pruner, each in ((ao.LSTMSaliencyPruner, mine), (theirs.LSTMSaliencyPruner, other)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecateurWarning)
            p = pruner({"sparsity_level": 0.5})
            p.prepare(each, copy.deepcopy(config))
            p.step()
            outputs.append(p.prune()(x))
    torch.testing.assert_close(*outputs)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False},
]


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("options", [*OPTIONS, {"proj_size": 3, "num_layers": 2}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_coherent_units_are_removed_exactly(kind: Any, options: dict[str, Any], states: bool) -> None:
    if kind is nn.GRU and "proj_size" in options:
        options = {"num_layers": 3}  # only an LSTM has projections
    pruner = {nn.LSTM: ao.LSTMSaliencyPruner, nn.GRU: ao.GRUSaliencyPruner}[kind]({"sparsity_level": 0.4}, None, True)
    model, x = Tagger(kind, states=states, **options), torch.randn(5, 2, 3)
    pruner.prepare(model)
    pruner.step()
    want = model(x)
    got = pruner.prune()(x)
    out, expected = (got[0], want[0]) if states else (got, want)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert (pruner.kept_masked, pruner.removal.inexact) == ((), ())
    assert model.rnn.hidden_size == 4
    assert len(pruner.removal.removed) == len(pruner.groups)
    if states and kind is nn.GRU:
        kept = torch.stack([row[:, row.abs().amax(0) > 0] for row in want[1]])
        torch.testing.assert_close(got[1], kept, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("end", ["prune", "squash_mask"])
def test_a_recurrent_module_holds_its_own_parameters_when_the_masks_are_gone(end: str) -> None:
    """Before the next forward: a copy made now, or an optimizer, must not see the masked copies."""
    model = TorchTagger(norm=False, layers=2)
    pruner = masked(model, gate_rows(2, agree=False))
    model(torch.randn(5, 2, 3))
    getattr(pruner, end)()
    held = zip(model.rnn._flat_weights, model.rnn._flat_weights_names, strict=True)
    assert all(tensor is getattr(model.rnn, name) for tensor, name in held)


def test_units_of_an_rnn() -> None:
    model, x = Tagger(nn.RNN), torch.randn(5, 2, 3)
    for part in ("ih", "hh"):
        getattr(model.rnn, f"bias_{part}_l0").data[[1, 4]] = 0
    pruner = masked(model, {"rnn.weight_ih_l0": [1, 4], "rnn.weight_hh_l0": [1, 4]})
    want = model(x)
    torch.testing.assert_close(pruner.prune(strict=True)(x), want)
    assert model.rnn.hidden_size == 4


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_gates_that_disagree_are_joined_for_every_kind(kind: Any) -> None:
    model = Tagger(kind)
    gates, before = GATES[kind], copy.deepcopy(model)
    off = {f"rnn.weight_{part}_l0": [6 * g + (g + k) % 6 for g in range(gates)] for k, part in enumerate(("ih", "hh"))}
    pruner = masked(model, off)
    pruner.prune()
    assert {name for name, _ in pruner.removal.inexact} == off.keys()
    for name, rows in off.items():
        kept = [row for row in range(6 * gates) if row not in rows]
        mine, full = getattr(model.rnn, name[4:]), getattr(before.rnn, name[4:])
        if "ih" in name:
            assert torch.equal(mine, full[kept])
        bias = name[4:].replace("weight", "bias")
        assert torch.equal(getattr(model.rnn, bias), getattr(before.rnn, bias)[kept])
    last = off["rnn.weight_hh_l0"][-1] - 6 * (gates - 1)
    assert torch.equal(model.out.weight, before.out.weight[:, [unit for unit in range(6) if unit != last]])


def test_joined_gates_are_not_exact_even_without_biases() -> None:
    model = Tagger(nn.LSTM, bias=False)
    pruner = masked(model, gate_rows(1, agree=False))
    pruner.prune()
    assert model.rnn.hidden_size == 4
    assert all("joined" in reason for _, reason in pruner.removal.inexact)
    assert len(pruner.removal.inexact) == 2


def test_gates_that_keep_different_numbers_stay_masked() -> None:
    model, x = Tagger(nn.LSTM), torch.randn(5, 2, 3)
    off = {"rnn.weight_ih_l0": [0, 6, 12, 18], "rnn.weight_hh_l0": [0, 6, 12]}
    pruner = masked(model, off)
    want = model(x)
    assert torch.equal(pruner.prune()(x), want)
    assert {name for name, _ in pruner.kept_masked} == off.keys()


def test_one_matrix_alone_stays_masked() -> None:
    model, x = Tagger(nn.LSTM), torch.randn(5, 2, 3)
    pruner = masked(model, {"rnn.weight_ih_l0": [0, 6, 12, 18]})
    want = model(x)
    assert torch.equal(pruner.prune()(x), want)
    assert [name for name, _ in pruner.kept_masked] == ["rnn.weight_ih_l0"]


def test_gates_are_not_joined_where_the_units_cannot_go() -> None:
    """The units are added to the input, which nothing masks: joining gates would change what they compute."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.lift, self.out = nn.LSTM(6, 6), nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lift(x)
            return self.out(x + self.rnn(x)[0])

    model, x = Skip(), torch.randn(5, 2, 3)
    pruner = masked(model, gate_rows(1, agree=False))
    want = model(x)
    assert torch.equal(pruner.prune()(x), want)
    assert pruner.removal.removed == {}
    assert len(pruner.kept_masked) == 2


def test_layers_of_different_widths_stay_masked() -> None:
    """One module has one hidden size."""
    model, x = Tagger(nn.GRU, num_layers=2, bias=False), torch.randn(5, 2, 3)
    units = {i: [6 * g + u for g in range(3) for u in range(i + 1)] for i in (0, 1)}
    off = {f"rnn.weight_{part}_l{i}": rows for i, rows in units.items() for part in ("ih", "hh")}
    pruner = masked(model, off)
    want = model(x)
    torch.testing.assert_close(pruner.prune()(x), want)
    assert {name for name, _ in pruner.kept_masked} == off.keys()


def test_strict_refuses_what_is_not_exact() -> None:
    model = TorchTagger(norm=False, layers=1)
    pruner = masked(model, gate_rows(1, agree=True))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SecateurError, match=r"rnn\.weight_ih_l0.*biases"):
        pruner.prune(strict=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
