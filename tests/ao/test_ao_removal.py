"""`prune()` itself: what it is called with, what it reports, what it refuses, and that it does all or nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from removal_models import masked
from torch import Tensor, nn

from secateur import ao
from secateur.ao import removal
from secateur.ao.errors import SparsifierRuntimeError, SparsifierValueError
from secateur.ao.example import Recorder, call_of
from secateur.ao.fold import BiasFolds
from secateur.errors import SecateurError, VerifyError
from secateur.pipeline import apply as apply_module

Unchanged = Callable[[nn.Module], AbstractContextManager[None]]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


# -- numbers that can be checked by eye ------------------------------------------------------------------------


def test_by_eye() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    model[0].weight.data, model[0].bias.data = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0.0, 5.0, -7.0])
    model[2].weight.data = torch.tensor([[1.0, 10.0, 100.0]])
    masked(model, {"0.weight": [1, 2]}, prune_bias=False).prune()
    assert model[0].weight.tolist() == [[1.0]]
    assert model[0].bias.tolist() == [0.0]
    assert model[2].weight.tolist() == [[1.0]]
    assert model[2].bias.tolist() == [50.0]  # 10 * relu(5) + 100 * relu(-7)


def test_by_eye_without_the_bias() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    model[0].bias.data.fill_(5.0)
    masked(model, {"0.weight": [1, 2]}).prune()
    assert model[2].bias is None
    assert model[0].bias.tolist() == [5.0]


# -- the report ------------------------------------------------------------------------------------------------


def test_report() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    pruner = masked(model, {"0.weight": [1, 2], "2.weight": [4]})
    assert pruner.kept_masked == ()
    pruner.prune()
    assert pruner.removal.removed == {"2.weight": 1}
    ((name, reason),) = pruner.kept_masked
    assert (name, reason.partition(":")[0]) == ("0.weight", "2 of 6 rows")


def test_nothing_masked_changes_nothing_but_the_parametrizations() -> None:
    model, x = mlp(), torch.randn(2, 4)
    want = model(x)
    pruner = masked(model, {"0.weight": []})
    assert torch.equal(pruner.prune()(x), want)
    assert pruner.removal == removal.Removal()


def test_strict_raises_and_names_the_tensor(unchanged: Unchanged) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    pruner = masked(model, {"0.weight": [1]})
    with unchanged(model), pytest.raises(SparsifierRuntimeError, match=r"0\.weight: 1 of 6 rows.*layer_norm"):
        pruner.prune(strict=True)
    assert pruner.removal == removal.Removal()
    pruner.prune()
    assert len(pruner.kept_masked) == 1


def test_strict_is_content_with_an_exact_removal() -> None:
    model = mlp()
    masked(model, {"0.weight": [1]}, prune_bias=False).prune(strict=True)
    assert model[0].out_features == 5


# -- the example -----------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor, *, scale: Tensor) -> Tensor:
        return self.b(F.relu(self.a(self.embed(ids) * scale)))


def test_the_last_call_is_the_example() -> None:
    model = TwoInputs()
    pruner = masked(model, {"a.weight": [0, 1]})
    model(torch.tensor([[1, 6, 2]]), scale=torch.randn(1, 3, 1))
    pruner.prune()
    assert model.b.in_features == 4


def test_the_recorded_call_survives_copies() -> None:
    model = TwoInputs()
    pruner = masked(model, {"a.weight": [0, 1]})
    model(torch.tensor([[1, 6, 2]]), scale=torch.randn(1, 3, 1))
    twin = copy.deepcopy(pruner)
    twin.prune()
    assert (twin.model.b.in_features, model.b.in_features) == (4, 6)
    (recorder,) = model._forward_pre_hooks.values()
    assert pickle.loads(pickle.dumps(recorder)).recipe == recorder.recipe  # type: ignore[attr-defined]


def test_only_shapes_are_recorded() -> None:
    model = mlp()
    masked(model, {"0.weight": [0]})
    model(torch.full((3, 4), 1234.5))
    (recorder,) = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Recorder))
    assert "1234" not in str(vars(recorder))
    assert "[3, 4]" in str(vars(recorder))


def test_a_recorded_batch_is_made_small_where_the_model_allows() -> None:
    batch, single = nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(3, 4, 3))
    masked(batch, {"0.weight": [0]})
    masked(single, {"0.weight": [0]})
    batch(torch.randn(64, 3, 9, 9))
    single(torch.randn(3, 9, 9))  # no batch: two channels would not do
    assert call_of(batch)[0][0].shape == (2, 3, 9, 9)
    assert call_of(single)[0][0].shape == (3, 9, 9)


@pytest.mark.parametrize("end", ["prune", "squash_mask"])
def test_the_recorder_goes_with_the_masks(end: str) -> None:
    model = mlp()
    pruner = masked(model, {"0.weight": [0]})
    getattr(pruner, end)()
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_an_example_can_be_given_by_keyword() -> None:
    model = TwoInputs()
    masked(model, {"a.weight": [0]}).prune(example={"ids": torch.tensor([[1, 6, 2]]), "scale": torch.randn(1, 3, 1)})
    assert model.a.out_features == 5


@pytest.mark.parametrize("example", [torch.randn(2, 4), (torch.randn(2, 4),)])
def test_an_example_can_be_given(example: Any) -> None:
    model = mlp()
    masked(model, {"0.weight": [0]}).prune(example=example)
    assert model[0].out_features == 5


LAYERS = {
    "linear": (lambda: mlp(), "0.weight"),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 2, 3)), "0.weight"),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3)), "0.weight"),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.Conv3d(4, 2, 3)), "0.weight"),
    "fixed size": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 26 * 26, 2)),
        "0.weight",
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 4), nn.Linear(4, 2)), "1.weight"),
    "later layer": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3)), "1.weight"),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_without_any_call_the_layers_suggest_one(layer: str) -> None:
    build, name = LAYERS[layer]
    model = build()
    pruner = masked(model, {name: [0]})
    pruner.prune()
    assert pruner.removal.removed == {name: 1}


def test_where_no_input_is_known_it_asks_for_one(unchanged: Unchanged) -> None:
    model = TwoInputs()
    pruner = masked(model, {"a.weight": [0]})
    with unchanged(model), pytest.raises(SparsifierValueError, match="example="):
        pruner.prune()


def test_the_suggested_call_leaves_the_model_alone(unchanged: Unchanged) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).train()
    before = torch.get_rng_state()
    with unchanged(model):
        call_of(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


# -- patterns --------------------------------------------------------------------------------------------------


def test_patterns_go_before_the_engine() -> None:
    seen = []

    def mine(first: nn.Linear, function: Any, second: nn.Linear) -> None:
        seen.append((first, function, second))
        mask = first.parametrizations.weight[0].mask
        nn.utils.parametrize.remove_parametrizations(first, "weight")
        first.weight = nn.Parameter(first.weight[mask] * 2)
        first.bias = nn.Parameter(first._bias[mask])
        del first._bias
        first._forward_hooks.clear()
        stack = second.parametrizations.weight
        stack.original = nn.Parameter(stack.original[:, mask])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.b(F.relu(self.a(x)))))

    class FirstRow(ao.BaseStructuredSparsifier):
        def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
            module.parametrizations[tensor_name][0].mask[0] = False

    model = Net()
    doubled = model.a.weight[1:] * 2
    pruner = FirstRow({}, patterns={(nn.Linear, F.relu, nn.Linear): mine})
    pruner.prepare(model, [{"tensor_fqn": "a.weight"}, {"tensor_fqn": "b.weight"}])
    pruner.step()
    pruner.prune()
    assert seen == [(model.a, F.relu, model.b)]
    assert torch.equal(model.a.weight, doubled)
    assert pruner.removal.removed == {"b.weight": 1}
    assert [tuple(layer.weight.shape) for layer in (model.a, model.b, model.c)] == [(5, 4), (4, 5), (3, 4)]


def test_a_pattern_can_end_in_the_output_and_needs_a_masked_first_layer() -> None:
    calls = []

    class Nothing(ao.BaseStructuredSparsifier):
        def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None: ...

    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    pruner = Nothing({}, patterns={(nn.Linear, "output"): lambda *chain: calls.append(chain)})
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    pruner.prune()
    assert calls == []
    pruner.prepare(model, [{"tensor_fqn": "1.weight"}])
    pruner.groups = pruner.groups[1:]
    pruner.prune()
    assert calls == [(model[1],)]


def test_a_pattern_that_fails_leaves_the_model_alone(unchanged: Unchanged) -> None:
    def fails(layer: nn.Linear) -> None:
        layer.parametrizations.weight.original.data.zero_()
        layer._bias = None
        raise ZeroDivisionError("by me")

    model = mlp()
    pruner = masked(model, {"0.weight": [0]})
    pruner.patterns = {(nn.Linear,): fails}
    with unchanged(model), pytest.raises(SparsifierRuntimeError, match="fails failed: by me"):
        pruner.prune()


# -- all or nothing --------------------------------------------------------------------------------------------


def recurrent() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0])

    return Net()


CASES = {
    "folded": (mlp, {"0.weight": [1], "2.weight": [0]}),
    "joined gates": (recurrent, {"rnn.weight_ih_l0": [0, 5, 10, 15], "rnn.weight_hh_l0": [1, 6, 11, 12]}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at", ["cut", "fold", "remember"])
def test_a_failure_at_any_point_leaves_everything(
    case: str, at: str, unchanged: Unchanged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room")

    build, off = CASES[case]
    model = build()
    pruner = masked(model, off, prune_bias=False)
    groups, state = copy.copy(pruner.groups), dict(pruner.state)
    target = {"cut": (apply_module, "carry_out"), "fold": (BiasFolds, "carry_out"), "remember": (removal, "remember")}[
        at
    ]
    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        with unchanged(model), pytest.raises(MemoryError):
            pruner.prune()
    assert (pruner.groups, dict(pruner.state)) == (groups, state)
    pruner.prune()
    assert pruner.removal.removed.keys() == off.keys()


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=6)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).view(-1, self.config.width))


def test_sizes_in_objects_that_the_model_holds_are_undone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        assert model.config.width == 5
        raise MemoryError("no room")

    model = Configured()
    pruner = masked(model, {"a.weight": [0]})
    with monkeypatch.context() as patch:
        patch.setattr(removal, "remember", fail)
        with pytest.raises(MemoryError):
            pruner.prune()
    assert model.config.width == 6
    pruner.prune()
    assert model.config.width == 5


def test_a_wrong_result_is_noticed_and_undone(unchanged: Unchanged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the constants the pruned model computes something else than the masked one."""
    model = mlp()
    model[0].bias.data.fill_(1.0)
    pruner = masked(model, {"0.weight": [1]}, prune_bias=False)
    monkeypatch.setattr(BiasFolds, "carry_out", lambda self, plan: None)
    with unchanged(model), pytest.raises(VerifyError, match="output 0"):
        pruner.prune()


def test_training_mode_and_requires_grad_stay() -> None:
    model = mlp()
    pruner = masked(model, {"0.weight": [1]}, prune_bias=False)
    model.train()
    model[2].weight.requires_grad_(False)
    pruner.prune()
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]


# -- bad input -------------------------------------------------------------------------------------------------


def test_prune_twice(unchanged: Unchanged) -> None:
    model = mlp()
    pruner = masked(model, {"0.weight": [1]})
    pruner.prune()
    with unchanged(model), pytest.raises(SparsifierValueError, match="carries no mask"):
        pruner.prune()


def test_a_module_that_was_replaced(unchanged: Unchanged) -> None:
    model = mlp()
    pruner = masked(model, {"0.weight": [1]})
    model[0] = nn.Linear(4, 6)
    with unchanged(model), pytest.raises(SparsifierValueError, match=r"0\.weight: the model has another module"):
        pruner.prune()


def test_a_mask_of_another_shape(unchanged: Unchanged) -> None:
    model = mlp()
    pruner = masked(model, {"0.weight": [1]})
    model[0].parametrizations.weight[0].mask = torch.ones(5, dtype=torch.bool)
    with unchanged(model), pytest.raises(SecateurError, match=r"0\.weight.*6"):
        pruner.prune()


def test_an_example_that_does_not_run(unchanged: Unchanged) -> None:
    model = mlp()
    pruner = masked(model, {"0.weight": [1]})
    with unchanged(model), pytest.raises(SparsifierValueError, match="does not run on the example"):
        pruner.prune(example=torch.randn(2, 5))
    pruner.prune(example=torch.randn(2, 4))
