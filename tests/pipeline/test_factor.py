"""Layers as products of two: exact at full rank, the best approximation below it, known to save, load, optimizers."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import secateur as sec
from secateur.calibrate import fisher_weights
from secateur.pipeline.factor import idle, split

_X = torch.randn(256, 12, generator=torch.Generator().manual_seed(1)) @ torch.diag(torch.linspace(0.2, 2, 12))


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))


class Tied(nn.Module):
    """Reads and writes words with one table."""

    def __init__(self, words: int = 40, width: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mix(self.table(ids)).tanh())


def _ids(seed: int = 0) -> Tensor:
    return torch.randint(0, 40, (16, 6), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["0", "2", "4"])
def test_at_full_rank_the_model_is_the_same(name: str) -> None:
    net = _mlp()
    before = net(_X)
    assert sec.factor(net, name, [_X]) is net
    assert torch.allclose(net(_X), before, atol=1e-5)
    assert isinstance(net.get_submodule(f"{name}.1"), nn.Linear)


def test_cut_and_refitted_it_is_the_best_approximation_of_its_rank() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8, bias=False))
    weight = net[0].weight.detach().double().numpy()
    sec.factor(net, "0", [_X])
    (matters,) = (w for part, w in fisher_weights(net, [_X]).items() if part[0] == "0.1.weight")  # of each output
    plan = sec.plan(sec.trace(net, _X), sec.Ratio(0.5), importance=sec.Reconstruction([_X]))
    assert [(axis.size, axis.keep) for axis in plan.axes] == [(8, (0, 1, 2, 3))]  # those that matter come first
    sec.apply(net, plan, compensate=sec.LeastSquares([_X], ridge=1e-9))
    x, scale = _X.double().numpy(), np.sqrt(matters[0].numpy())
    values = np.linalg.svd(x @ weight.T * scale, compute_uv=False)  # no outputs of rank 4 come nearer than this
    off = float(np.square((net(_X).detach().double().numpy() - x @ weight.T) * scale).sum())
    assert off == pytest.approx(float(np.square(values[4:]).sum()), rel=1e-3)


class Weighed(nn.Module):
    """Of its outputs, one counts a hundred times as much."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 8, bias=False)
        self.register_buffer("counts", torch.tensor([100.0] + [1.0] * 7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.counts).unsqueeze(-1)  # no table of classes


def test_the_outputs_count_by_what_they_matter_to_the_model() -> None:
    torch.manual_seed(0)
    net = Weighed()
    before = net(_X).detach()
    sec.factor(net, "inner", [_X])
    plan = sec.plan(sec.trace(net, _X), sec.Ratio(0.88), importance=sec.Reconstruction([_X]))
    sec.apply(net, plan, compensate=sec.LeastSquares([_X], ridge=1e-9))
    assert net.inner[0].weight.shape[0] == 1
    off = (net(_X) - before).square().sum(0).flatten() / before.square().sum(0).flatten()
    assert off[0].item() < 1e-3  # one direction is all that is left, and it is that of the first output


def test_one_table_for_input_and_output_stays_one() -> None:
    torch.manual_seed(0)
    net = Tied()
    before = net(_ids())
    sec.factor(net, "head", [_ids(1), _ids(2)])
    assert torch.allclose(net(_ids()), before, atol=1e-5)
    assert net.table[0].weight is net.head[1].weight
    graph = sec.trace(net, _ids())
    axis = next(axis for axis in graph.axes if ("table.0.weight", 1) in [(s.tensor, s.dim) for s in axis.sites])
    plan = sec.plan(graph, sec.Ratio({axis.name: 0.5}))
    sec.apply(net, plan)
    assert net.table[0].weight is net.head[1].weight
    assert net.table[0].weight.shape == (40, 6)
    assert net(_ids()).shape == before.shape


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 10, 1, stride=2, padding=1),
        nn.Conv2d(6, 4, 1, bias=False),
        nn.Conv2d(6, 10, 3, padding=1, dilation=2),
        nn.Conv1d(6, 10, 1),
        nn.Conv3d(6, 3, (1, 2, 1)),
    ],
)
def test_convolutions(layer: nn.Module) -> None:
    torch.manual_seed(0)
    space = (4, 5, 6)[: layer.weight.ndim - 2]
    net, x = nn.Sequential(layer, nn.ReLU(), nn.Flatten(2)), torch.randn(8, 6, *space)
    net = copy.deepcopy(net)
    before = net(x)
    sec.factor(net, "0", [x])
    assert torch.allclose(net(x), before, atol=1e-5)
    plan = sec.plan(sec.trace(net, x), sec.Ratio({"0.0": 0.5}))
    sec.apply(net, plan)
    whole = layer.weight.shape[0] if max(layer.kernel_size) > 1 else min(layer.weight.shape[:2])
    assert net[0][0].weight.shape[0] == net[0][1].weight.shape[1] == whole - whole // 2
    assert net(x).shape == before.shape


def test_saved_and_loaded_into_a_fresh_model(tmp_path: Path) -> None:
    net = _mlp()
    sec.factor(net, ["0", "2"], [_X])
    sec.save(net, tmp_path / "full.safetensors")
    assert torch.equal(sec.load(tmp_path / "full.safetensors", _mlp())(_X), net(_X))
    sec.apply(net, sec.plan(sec.trace(net, _X), sec.Ratio(0.5)))
    sec.save(net, tmp_path / "small.safetensors")
    fresh = sec.load(tmp_path / "small.safetensors", _mlp())
    assert torch.equal(fresh(_X), net(_X))
    assert fresh[2][0].weight.shape == net[2][0].weight.shape
    sec.apply(fresh, sec.plan(sec.trace(fresh, _X), sec.Ratio(0.4)))  # and it can be cut and saved again
    sec.save(fresh, tmp_path / "again.safetensors")
    assert torch.equal(sec.load(tmp_path / "again.safetensors", _mlp())(_X), fresh(_X))


def test_a_tied_table_is_loaded_as_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Tied()
    sec.factor(net, "table", [_ids(1)])
    sec.apply(net, sec.plan(sec.trace(net, _ids()), sec.Ratio(0.3)))
    sec.save(net, tmp_path / "tied.safetensors")
    fresh = sec.load(tmp_path / "tied.safetensors", Tied())
    assert fresh.table[0].weight is fresh.head[1].weight
    assert torch.equal(fresh(_ids()), net(_ids()))


def test_a_language_model_with_one_table(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    net, whole = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    before = net(_ids()).logits
    sec.factor(net, "lm_head", [_ids(1), _ids(2)])
    assert torch.allclose(net(_ids()).logits, before, atol=1e-5)
    sec.apply(net, sec.plan(sec.trace(net, _ids()), sec.Ratio({"lm_head.0": 0.5})))
    assert net.model.embed_tokens[0].weight is net.lm_head[1].weight
    assert net.lm_head[1].weight.shape == (40, 8)
    sec.save(net, tmp_path / "small.safetensors")
    for loaded in (sec.load(tmp_path / "small.safetensors"), sec.load(tmp_path / "small.safetensors", whole)):
        assert loaded.lm_head[1].weight is loaded.model.embed_tokens[0].weight
        assert torch.equal(loaded(_ids()).logits, net(_ids()).logits)
    with pytest.raises(sec.FileError, match=r"secateur\.save"):
        net.save_pretrained(tmp_path / "folder")
    with pytest.raises(sec.SecateurError):
        sec.plan(sec.trace(net, _ids()), sec.Params(0.9), loadable=True)


def test_a_plan_says_what_became_two() -> None:
    net = _mlp()
    sec.factor(net, "2", [_X])
    sec.apply(net, sec.plan(sec.trace(net, _X), sec.Ratio(0.5)))
    from secateur.pipeline.apply import plan_of

    plan = plan_of(net)
    assert plan is not None
    assert plan.factored == ("2",)
    assert sec.Plan.from_json(plan.to_json()) == plan
    with pytest.raises(sec.ApplyError, match=r"the rank of 2.*secateur\.factor"):
        sec.apply(_mlp(), plan)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_trains_both(kind: type) -> None:
    net = _mlp()
    optimizer = kind(net.parameters(), lr=0.01)
    net(_X).square().sum().backward()
    optimizer.step()
    weight = net[0].weight
    sec.factor(net, "0", [_X], optimizer=optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in net.parameters()}
    assert weight not in optimizer.state
    before = [p.detach().clone() for p in net[0].parameters()]
    optimizer.zero_grad()
    net(_X).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, net[0].parameters(), strict=True))


class ReadsTheWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight)


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (ReadsTheWeight, "inner", "weight"),
        (lambda: nn.Sequential(nn.Linear(12, 4), nn.LayerNorm(4)), "1", "LayerNorm"),
        (lambda: nn.Sequential(nn.Linear(12, 4)), "fc", "nothing in the model is called so"),
        (lambda: nn.Sequential(nn.Linear(12, 4).half()), "0", "half precision"),
        (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(12, 4))), "0", "Linear"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_is_as_it_was(make: object, name: str, words: str) -> None:
    net = make()  # type: ignore[operator]
    before = copy.deepcopy(net.state_dict())
    kinds = [type(module) for module in net.modules()]
    with pytest.raises(sec.SecateurError, match=words):
        sec.factor(net, name, [_X])
    assert [type(module) for module in net.modules()] == kinds
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_what_was_cut_before_is_refused() -> None:
    net = _mlp()
    sec.apply(net, sec.plan(sec.trace(net, _X), sec.Ratio(0.5)))
    with pytest.raises(sec.ApplyError, match="has been cut already"):
        sec.factor(net, "2", [_X])


def test_a_failure_halfway_leaves_model_and_optimizer_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before, weight = copy.deepcopy(net.state_dict()), net[0].weight

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("secateur.pipeline.factor.remember", fails)
    with pytest.raises(MemoryError):
        sec.factor(net, "*", [_X], optimizer=optimizer)
    assert net[0].weight is weight
    assert type(net[0]) is nn.Linear
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert len(optimizer.param_groups[0]["params"]) == 6


def test_two_are_worth_it_only_where_they_are_smaller() -> None:
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    split(net, ["0", "1"])
    kept = {"0.0.weight": {0: (0, 1, 2)}, "0.1.weight": {1: (0, 1, 2)}}
    plan = sec.Plan((), kept, {}, ())
    assert idle(net, ["0", "1"], plan) == ("1",)  # 48 of 64, and 128 of 64


def test_compress_makes_two_where_that_pays(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    low = torch.randn(32, 3) @ torch.randn(3, 32) / 6
    net[2].weight.data.copy_(low)  # of rank 3: as two layers it is a fifth of its size, and nothing is lost
    whole, batches = copy.deepcopy(net), [torch.randn(128, 24) for _ in range(4)]
    report = sec.compress(net, batches[0], sec.Params(0.62), batches, rank=["2"], timed=False)
    assert (report.plan.macs, report.plan.params) == (report.macs, report.params)  # counted apart
    assert report.plan.factored == ("2",)
    assert report.params.after <= 0.62 * report.params.before
    assert report.compensation.after < 1e-3
    plain = copy.deepcopy(whole)
    without = sec.compress(plain, batches[0], sec.Params(0.62), batches, timed=False)
    assert report.compensation.after < 0.2 * without.compensation.after
    sec.save(net, tmp_path / "low.safetensors")
    assert torch.equal(sec.load(tmp_path / "low.safetensors", whole)(batches[0]), net(batches[0]))


def test_compress_leaves_alone_what_does_not_pay() -> None:
    torch.manual_seed(0)
    net, batches = _mlp(), [torch.randn(64, 12) for _ in range(4)]
    report = sec.compress(net, batches[0], sec.Params(0.9), batches, rank="*", timed=False)
    assert report.params.after <= 0.9 * report.params.before
    for name in report.plan.factored:
        first, second = net.get_submodule(name)
        assert first.weight.numel() + second.weight.numel() < first.weight.shape[1] * second.weight.shape[0]


def test_rank_is_refused_where_a_constructor_should_build_it() -> None:
    with pytest.raises(sec.PlanError, match="rank= goes neither"):
        sec.compress(_mlp(), _X, sec.Params(0.5), [_X], rank="0", loadable=True)


def test_a_factor_of_a_factor_is_saved_and_loaded(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32))

    net, x = build(), torch.randn(64, 8)
    sec.factor(net, "2", [x])
    sec.factor(net, "2.0", [x])
    sec.save(net, tmp_path / "net.safetensors")
    assert torch.equal(sec.load(tmp_path / "net.safetensors", build())(x), net(x))
