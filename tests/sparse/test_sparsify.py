"""Zeros in whole models: what gets them, what does not, and what is left after something went wrong."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import secateur as sec
from secateur import prune
from secateur.calibrate import calibrating
from secateur.errors import CalibrationError, PlanError
from secateur.sparse.layers import Survey


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def _batches(n: int = 3) -> list[Tensor]:
    return [torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(n)]


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).eval()


def _tokens(n: int = 3) -> list[dict[str, Tensor]]:
    chance = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(50, (2, 12), generator=chance)} for _ in range(n)]


def _off(dense: nn.Module, sparse: nn.Module, batch: Tensor) -> float:
    with torch.no_grad():
        wanted = dense(batch)
        return float((sparse(batch) - wanted).square().mean() / wanted.square().mean())


def test_admm_is_ahead_of_sparsegpt_ahead_of_magnitude_on_data_not_fitted_to() -> None:
    fresh, off = torch.randn(500, 8, generator=torch.Generator().manual_seed(99)), {}
    for method in (sec.ADMM(), sec.SparseGPT(), sec.Magnitude()):
        net = _net()
        sec.sparsify(net, _batches(), sec.Unstructured(0.6), method=method)
        off[type(method).__name__] = _off(_net(), net, fresh)
    assert off["ADMM"] < off["SparseGPT"] < off["Magnitude"]


def test_layers_are_solved_on_the_inputs_that_they_will_have() -> None:
    """The same by hand: the first layer alone, then the second on what the first with zeros puts out."""
    net, dense, batches = _net(), _net(), _batches()
    sec.sparsify(net, batches, sec.NM(2, 4))
    x = torch.cat(batches)
    with torch.no_grad():
        first = sec.ADMM()(sec.sparse.Problem.of(dense[0].weight, x), sec.NM(2, 4))[0]
        inputs, wanted = torch.relu(x @ first.T + dense[0].bias), torch.relu(dense[0](x)) @ dense[2].weight.T
        second = sec.ADMM()(sec.sparse.Problem.of(dense[2].weight, inputs, wanted), sec.NM(2, 4))[0]
    assert torch.allclose(net[0].weight, first, atol=1e-4)
    assert torch.allclose(net[2].weight, second, atol=2e-3)
    assert torch.equal(net[2].weight != 0, second != 0)


def test_a_language_model_keeps_its_head_and_embedding() -> None:
    model, batches = _llama(), _tokens()
    report = sec.sparsify(model, batches, sec.NM(2, 4), held_back=_tokens(1))
    assert len(report.layers) == 14
    assert all(layer.sparsity == 0.5 for layer in report.layers)
    assert report.held_back is not None
    assert 0 < report.held_back.error < 1
    assert torch.equal(model.lm_head.weight, _llama().lm_head.weight)
    for layer in report.layers:
        grouped = model.get_parameter(layer.name).view(-1, 4)
        assert ((grouped != 0).sum(1) == 2).all()
        assert layer.after < 1
    assert model(**batches[0]).logits.isfinite().all()


def test_routers_stay_dense_and_experts_are_solved_apart() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    ).eval()
    report = sec.sparsify(model, _tokens(), sec.Unstructured(0.5))
    assert "a router" in report.left_alone.values()
    experts = [layer for layer in report.layers if "expert" in layer.name]
    assert experts
    assert all(layer.sparsity == pytest.approx(0.5, abs=0.01) for layer in experts)


def test_convolutions_with_groups_strides_and_norms() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).eval()
    batches = [torch.randn(16, 4, 10, 10, generator=torch.Generator().manual_seed(s)) for s in range(2)]
    report = sec.sparsify(net, batches, sec.NM(2, 4))
    assert [layer.name for layer in report.layers] == ["0.weight", "3.weight", "5.weight"]
    for weight, inputs in ((net[0].weight, 1), (net[3].weight, 1), (net[5].weight, 0)):
        groups = weight.movedim(inputs, -1).unflatten(-1, (-1, 4))
        assert ((groups != 0).sum(-1) == 2).all()
    assert all(layer.after < 0.9 for layer in report.layers)


def test_batch_norms_take_their_statistics_anew() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).eval()
    batch, fresh = torch.randn(64, 4, 8, 8), torch.randn(16, 4, 8, 8)
    dense = copy.deepcopy(net)
    report = sec.sparsify(net, [batch], sec.Unstructured(0.8), held_back=[fresh])
    assert report.held_back is not None
    assert report.held_back.error == pytest.approx(_off(dense, net, fresh), rel=1e-4)
    out = net[0](batch)
    assert torch.allclose(net[1].running_mean, out.mean((0, 2, 3)), atol=1e-5)
    assert not net.training
    assert net[1].momentum == 0.1


def test_a_recurrent_weight_is_solved_once_for_all_steps() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    torch.manual_seed(0)
    net = Net()
    report = sec.sparsify(net, [torch.randn(32, 6, 8)], sec.Unstructured(0.5))
    assert {layer.name for layer in report.layers} == {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}
    assert int((net.rnn.weight_hh_l0 == 0).sum()) == 512


def test_a_weight_that_two_layers_share_stays_shared() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    net[2].weight = net[0].weight
    report = sec.sparsify(net, _batches(), sec.Unstructured(0.5))
    assert net[2].weight is net[0].weight
    assert [layer.name for layer in report.layers] == ["0.weight"]
    assert int((net[0].weight == 0).sum()) == 32


def test_a_weight_that_two_layers_share_is_solved_for_both() -> None:
    """The same by hand: the rows of both uses in the dense model, together."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    net[2].weight = net[0].weight
    x, weight = torch.cat(_batches()), net[0].weight.detach().clone()
    with torch.no_grad():
        rows = torch.cat([x, net[1](net[0](x))])
    sec.sparsify(net, _batches(), sec.NM(2, 4))
    both = sec.ADMM()(sec.sparse.Problem.of(weight, rows), sec.NM(2, 4))[0]
    first = sec.ADMM()(sec.sparse.Problem.of(weight, x), sec.NM(2, 4))[0]
    assert torch.allclose(net[0].weight, both, atol=1e-4)
    assert not torch.allclose(net[0].weight, first, atol=1e-2)


def test_zeros_and_masks_that_are_there_stay() -> None:
    net = _net()
    prune.l1_unstructured(net[2], "weight", amount=0.75)
    net[0].weight.data[:, :2] = 0
    zeros = net[2].weight_mask == 0
    sec.sparsify(net, _batches(), sec.Unstructured(0.5))
    assert not net[2].weight[zeros].any()
    assert int((net[2].weight_mask == 0).sum()) == int(zeros.sum())
    assert not net[0].weight[:, :2].any()
    assert int((net[0].weight == 0).sum()) == 128


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 1e-4, max_iter=2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masks_keep_zeros_through_training(kind: str) -> None:
    net = _net()
    sec.sparsify(net, _batches(), sec.NM(2, 4), method=sec.Magnitude(), masks=True)
    optimizer = OPTIMIZERS[kind](net.parameters())
    before = net[2].weight.detach().clone()
    for batch in _batches():

        def loss(batch: Tensor = batch) -> float:
            optimizer.zero_grad()
            lost = net(batch).square().sum()
            lost.backward()
            return float(lost.detach())

        optimizer.step(loss)
    net(_batches()[0])
    assert ((before == 0) == (net[2].weight == 0)).all()
    assert not torch.equal(before, net[2].weight)


def test_a_bar_goes_over_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is known beforehand: so is the time left."""
    seen = []

    def progress(items: Any, what: str) -> Any:
        seen.append((what, len(items)))
        return iter(items)

    monkeypatch.setattr("secateur.sparse.solve.progress", progress)
    sec.sparsify(_net(), _batches(), sec.NM(2, 4))
    assert seen == [("sparsify", 2)]


def test_two_of_four_are_what_sparse_tensor_cores_take() -> None:
    """torch's own packing for them, whose Python form runs anywhere: unpacked, it is the weight."""
    packing = pytest.importorskip("torch.sparse._semi_structured_conversions")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).half().float()
    batches, dense = [torch.randn(128, 64)], net[0].weight.detach().clone()
    sec.sparsify(net, batches, sec.NM(2, 4))
    weight = net[0].weight.detach().half()
    back, there = packing.sparse_semi_structured_to_dense_cutlass, packing.sparse_semi_structured_from_dense_cutlass
    assert torch.equal(back(*there(weight)), weight)
    assert not torch.equal(back(*there(dense.half())), dense.half())


class _LowRank(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, weight.shape[1])), nn.Parameter(torch.zeros(weight.shape[0], 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def test_low_rank_updates_are_trained_and_merged_behind_the_mask() -> None:
    """On `weight_orig` the mask comes after them: the model that was trained is the one that they are merged to."""
    net = _net()
    sec.sparsify(net, _batches(), sec.NM(2, 4), masks=True)
    zeros, layer = net[2].weight == 0, net[2]
    net.requires_grad_(False)
    added = _LowRank(layer.weight_orig)
    nn.utils.parametrize.register_parametrization(layer, "weight_orig", added)
    optimizer = torch.optim.Adam(added.parameters(), 1e-2)
    for batch in _batches():
        optimizer.zero_grad()
        net(batch).square().sum().backward()
        optimizer.step()
    trained = net(_batches()[0])
    nn.utils.parametrize.remove_parametrizations(layer, "weight_orig")
    prune.remove(layer, "weight")
    assert added.b.any()
    assert torch.equal(layer.weight == 0, zeros)
    assert torch.equal(net(_batches()[0]), trained)


def test_protect_and_include() -> None:
    net = _net()
    report = sec.sparsify(net, _batches(), sec.Unstructured(0.5), protect="0", include="4.weight")
    assert [layer.name for layer in report.layers] == ["2.weight", "4.weight"]
    assert torch.equal(net[0].weight, _net()[0].weight)


def test_a_method_of_ones_own() -> None:
    net = _net()
    report = sec.sparsify(net, _batches(), sec.Unstructured(0.5), method=lambda problem, pattern: problem.weight * 0)
    assert report.sparsity == 1
    assert not net[2].weight.any()


def test_half_precision_and_frozen_weights() -> None:
    model = _llama().bfloat16().requires_grad_(False)
    sec.sparsify(model, _tokens(), sec.Unstructured(0.5))
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in model.parameters())


class _Dead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x) * 0))


class _Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(8, 8), nn.Linear(8, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e6:
            raise KeyboardInterrupt
        return self.two(self.one(x))


class _Impatient:
    """A method that is interrupted at its second layer, when the first is written."""

    layers = 0

    def __call__(self, problem: sec.sparse.Problem, pattern: sec.sparse.Pattern) -> Tensor:
        self.layers += 1
        if self.layers == 2:
            raise KeyboardInterrupt
        return problem.weight * 0


NAN = [*_batches(2), torch.full((4, 8), float("nan"))]


@pytest.mark.parametrize(
    ("make", "call", "error", "says"),
    [
        (_net, lambda n: sec.sparsify(n, NAN, sec.NM(2, 4)), CalibrationError, "batch 3.*not finite"),
        (_net, lambda n: sec.sparsify(n, [], sec.NM(2, 4)), CalibrationError, "no batches"),
        (_net, lambda n: sec.sparsify(n, _batches(), "2:4"), PlanError, "pattern is a pattern, such as"),
        (_net, lambda n: sec.sparsify(n, _batches(), sec.NM(2, 3)), PlanError, r"0.weight: its 8 inputs.*protect=\('0"),
        (_net, lambda n: sec.sparsify(n, _batches(), sec.Block(5, 1)), PlanError, "32×8 is not made of blocks"),
        (_net, lambda n: sec.sparsify(n, _batches(), sec.NM(2, 4), method="admm"), PlanError, "method is ADMM"),
        (_net, lambda n: sec.sparsify(n, _batches(), sec.NM(2, 4), protect=("nope",)), PlanError, "names no weight"),
        (_net, lambda n: sec.sparsify(n, _batches(), sec.NM(2, 4), protect="*"), PlanError, "no weight that may get"),
        (_net, lambda n: sec.sparsify(n, [torch.ones(3, 9)], sec.NM(2, 4)), CalibrationError, "failed on batch 1"),
        (_net, lambda n: sec.sparsify(n, _batches(), sec.NM(2, 4), method=_Impatient()), KeyboardInterrupt, None),
        (_net, lambda n: sec.sparsify(n, _batches(), sec.Unstructured(1.5)), PlanError, "from 0 to below 1, not 1.5"),
        (_net, lambda n: sec.sparsify(n, _batches(), sec.NM(0, 4)), PlanError, "whole number from 1 on"),
        (_net, lambda n: sec.sparsify(n, iter(()), sec.NM(2, 4)), CalibrationError, "no batches"),
        (_Dead, lambda n: sec.sparsify(n, _batches(), sec.NM(2, 4)), CalibrationError, "two.weight: all of its inputs"),
        (
            _Interrupted,
            lambda n: sec.sparsify(n, [*_batches(2), torch.full((4, 8), 1e6)], sec.NM(2, 4)),
            KeyboardInterrupt,
            None,
        ),
    ],
)
def test_whatever_goes_wrong_the_model_is_as_it_was(make: Any, call: Any, error: type, says: str | None) -> None:
    torch.manual_seed(0)
    net = make().train()
    before, objects = copy.deepcopy(net.state_dict()), {name: id(p) for name, p in net.named_parameters()}
    with pytest.raises(error, match=says):
        call(net)
    assert net.training
    assert {name: id(p) for name, p in net.named_parameters()} == objects
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("method", [sec.ADMM(), sec.SparseGPT()], ids=["ADMM", "SparseGPT"])
def test_inputs_without_variance(method: Any) -> None:
    """Every row is the same: their moments have rank one, and one weight could do what all do."""
    net, rows = _net(), torch.ones(64, 8)
    report = sec.sparsify(net, [rows], sec.NM(2, 4), method=method)
    assert all(layer.sparsity >= 0.5 for layer in report.layers)  # SparseGPT drops weights of inputs that are zero
    assert _off(_net(), net, rows) < 1e-3


def test_losses_of_held_back_batches_are_told() -> None:
    judges = [{**batch, "labels": batch["input_ids"]} for batch in _tokens(2)]
    model = _llama()
    report = sec.sparsify(model, _tokens(), sec.NM(2, 4), held_back=judges)
    assert report.held_back is not None
    assert report.held_back.loss is not None
    assert report.held_back.perplexity is not None
    with torch.no_grad():
        losses = [float(sum(m(**batch).loss for batch in judges)) / 2 for m in (_llama(), model)]
    assert report.held_back.loss == pytest.approx(losses, rel=1e-5)
    assert report.held_back.perplexity[1] == pytest.approx(math.exp(losses[1]), rel=1e-4)
    assert f"loss on them: {losses[0]:.4f} before" in str(report)


def test_masks_come_back_after_a_failure() -> None:
    net = _net()
    prune.l1_unstructured(net[2], "weight", amount=0.5)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(CalibrationError):
        sec.sparsify(net, NAN, sec.NM(2, 4))
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert prune.is_pruned(net[2])


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        stream = torch.tanh(self.one(x))
        return self.head(stream + self.two(stream))


def test_a_layer_makes_up_for_what_its_residual_stream_lacks() -> None:
    """The same by hand: the second layer's target is its own output and the stream's error."""
    torch.manual_seed(0)
    net, batches = _Residual(), _batches()
    dense = copy.deepcopy(net)
    sec.sparsify(net, batches, sec.NM(2, 4), streams=True)
    x = torch.cat(batches)
    with torch.no_grad():
        first = sec.ADMM()(sec.sparse.Problem.of(dense.one.weight, x), sec.NM(2, 4))[0]
        stream, left = torch.tanh(dense.one(x)), torch.tanh(x @ first.T + dense.one.bias)
        wanted = stream @ dense.two.weight.T + stream - left
        second = sec.ADMM()(sec.sparse.Problem.of(dense.two.weight, left, wanted), sec.NM(2, 4))[0]
    assert torch.equal(net.two.weight != 0, second != 0)
    assert torch.allclose(net.two.weight, second, atol=2e-3)


def test_streams_of_a_language_model_are_found() -> None:
    model = _llama()
    with calibrating(model):
        found = Survey.of(model, _tokens(1)[0])
    ends = {name.partition("layers.")[2] for name in found.streams}
    assert ends == {f"{i}.{part}.weight" for i in range(2) for part in ("self_attn.o_proj", "mlp.down_proj")}


def test_a_layer_that_not_every_batch_reaches_is_solved_from_those_that_do() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.head(self.two(x) if len(x) > 10 else x)

    torch.manual_seed(0)
    net = Net()
    report = sec.sparsify(net, [*_batches(), torch.ones(5, 8)], sec.NM(2, 4))
    assert {layer.name for layer in report.layers} == {"one.weight", "two.weight"}
    assert all(float((w == 0).float().mean()) == 0.5 for w in (net.one.weight, net.two.weight))


@pytest.mark.parametrize("method", [sec.ADMM(), sec.SparseGPT(), sec.Magnitude()], ids=lambda m: type(m).__name__)
def test_experts_whose_rows_change_behind_zeros(method: Any) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate, self.head = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 3)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
            return self.head(out)

    torch.manual_seed(0)
    net = Experts()
    report = sec.sparsify(net, [torch.randn(64, 8) for _ in range(4)], sec.Unstructured(0.5), method=method)
    names = {f"experts.{number}.weight" for number in range(4)}
    assert names <= {layer.name for layer in report.layers}
    assert all(float((net.get_parameter(name) == 0).float().mean()) == 0.5 for name in names)


def test_masks_on_a_shared_weight_keep_it_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.two(torch.relu(self.one(x)))))

    torch.manual_seed(0)
    net = Twice()
    for sparsity in (0.25, 0.5):  # the second time, masks are there
        sec.sparsify(net, _batches(), sec.Unstructured(sparsity), masks=True)
    zeros = (net.one.weight == 0).clone()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for batch in _batches():
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    net(_batches()[0])
    assert torch.equal(net.one.weight, net.two.weight)
    assert torch.equal(net.two.weight == 0, zeros)


class _Odd(nn.Module):
    """A filter that is a buffer, a weight used in both directions, one that is normalised, and one not reached."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.both, self.head = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.idle = nn.Linear(8, 8)
        self.register_buffer("filter", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(x) @ self.filter)
        return self.head(self.normed(torch.relu(x @ self.both) @ self.both.T))


def test_what_cannot_get_zeros_is_said() -> None:
    torch.manual_seed(0)
    net = _Odd()
    report = sec.sparsify(net, _batches(), sec.NM(2, 4))
    assert [layer.name for layer in report.layers] == ["one.weight"]
    assert "more than one way" in report.left_alone["both"]
    assert "not itself multiplied" in report.left_alone["idle.weight"]
    assert any("normed" in name for name in report.left_alone)
    assert net.filter.all()
    assert net.both.all()
