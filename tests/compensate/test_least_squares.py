"""What is left takes over for what was removed: as well as mathematics allows, on any model, or not at all."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
import timm
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import secateur as sec
from represented import represented
from secateur.compensate import refit
from secateur.errors import ApplyError, CalibrationError, SecateurError, SecateurWarning


def state(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(model, before) -> bool:
    after = model.state_dict()
    return list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 5))


def test_the_solution_is_that_of_a_plain_least_squares_fit() -> None:
    net, x = mlp(), torch.randn(500, 6)
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5))
    whole = copy.deepcopy(net)
    sec.apply(net, plan, compensate=sec.LeastSquares([x[:300], x[300:]], ridge=1e-9))
    kept = torch.tensor(plan.axes[0].keep)
    inputs = torch.relu(whole[0](x))[:, kept].detach().double().numpy()
    design = np.concatenate([inputs, np.ones((500, 1))], 1)
    want, *_ = np.linalg.lstsq(design, whole(x).detach().double().numpy(), rcond=None)
    np.testing.assert_allclose(net[2].weight.detach().numpy(), want[:-1].T, atol=2e-4)
    np.testing.assert_allclose(net[2].bias.detach().numpy(), want[-1], atol=2e-4)
    assert same(nn.Sequential(net[0]), {"0.weight": whole[0].weight[kept], "0.bias": whole[0].bias[kept]})


LAYERS = {
    "conv": lambda: nn.Conv2d(12, 7, 3, padding=1),
    "conv-strided": lambda: nn.Conv2d(12, 7, 3, stride=2),
    "conv-grouped": lambda: nn.Conv2d(12, 8, 3, groups=2),
    "conv-transposed": lambda: nn.ConvTranspose2d(12, 7, 3, stride=2, padding=1),
    "conv-1x1-without-bias": lambda: nn.Conv2d(12, 7, 1, bias=False),
    "conv-norm": lambda: nn.Sequential(nn.Conv2d(12, 7, 3, bias=False), nn.BatchNorm2d(7)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_channels_that_others_can_express_are_made_up_for_completely(layer: str) -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 12, 3)
    with torch.no_grad():  # within each half, the second three channels are combinations of the first three
        for start in (0, 6):
            mix = torch.randn(3, 3)
            first.weight[start + 3 : start + 6] = torch.einsum(
                "ij,jkl...->ikl...", mix, first.weight[start : start + 3]
            )
            first.bias[start + 3 : start + 6] = mix @ first.bias[start : start + 3] + 1.0  # and a constant
    net = nn.Sequential(first, LAYERS[layer]()).eval()
    net(torch.randn(4, 3, 12, 12))
    batches = [torch.randn(16, 3, 12, 12) for _ in range(3)]
    want = net(batches[0])

    def first_three(context):
        return torch.arange(context.axis.size) % 6 < 3 if context.axis.size == 12 else torch.arange(6, 0, -1) > 3

    plan = sec.plan(sec.trace(net, batches[0]), {"0.weight": 0.5}, importance=lambda c: first_three(c).double())
    compensate = sec.LeastSquares(batches, ridge=1e-8, bias=True)
    sec.apply(net, plan, compensate=compensate)
    assert sec.outcome(net).before > 1e-3
    if layer in ("conv", "conv-transposed"):  # zeros around and between pixels take no constant
        assert sec.outcome(net).after < 0.6 * sec.outcome(net).before
    else:
        torch.testing.assert_close(net(batches[0]), want, atol=2e-3, rtol=2e-3)


def tokens(vocabulary: int):
    return [{"input_ids": torch.randint(0, vocabulary, (4, 12))} for _ in range(3)]


def images(size: int):
    return [torch.randn(4, 3, size, size) for _ in range(2)]


def recurrent(kind):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(6, 16, num_layers=2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(32, 4)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    return Reader()


class Experts(nn.Module):
    """Every expert sees everything; each is a slice of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 24)), nn.Parameter(torch.randn(3, 24, 8) / 5)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        hidden = torch.bmm(x.unsqueeze(0).expand(3, -1, -1), self.up).relu()
        return self.head(torch.bmm(hidden, self.down).sum(0))


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "resnet18": lambda: (timm.create_model("resnet18", channels=(8, 16, 24, 32)), images(64)),
    "vit": lambda: (timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64), images(64)),
    "mobilenetv3": lambda: (timm.create_model("mobilenetv3_small_050"), images(64)),
    "convnext": lambda: (timm.create_model("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 24, 32, 48)), images(64)),
    "densenet": lambda: (timm.create_model("densenet121", block_config=(2, 2), growth_rate=8), images(32)),
    "swin": lambda: (
        timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=32, num_heads=(1, 2, 4, 8)),
        images(224),
    ),
    "bert": lambda: (BertModel(BertConfig(vocab_size=99, **SMALL)), tokens(99)),
    "gpt2": lambda: (
        GPT2LMHeadModel(GPT2Config(vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
        tokens(99),
    ),
    "llama": lambda: (LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, **SMALL)), tokens(99)),
    "experts": lambda: (Experts(), [torch.randn(128, 6), torch.randn(128, 6)]),
    "lstm": lambda: (recurrent(nn.LSTM), [torch.randn(8, 10, 6), torch.randn(8, 7, 6)]),
    "gru": lambda: (recurrent(nn.GRU), [torch.randn(8, 10, 6), torch.randn(8, 7, 6)]),
}


@pytest.mark.parametrize("name", represented(MODELS, by=("resnet18", "vit", "gpt2")))
def test_real_architectures_come_nearer_and_no_layer_gets_worse(name: str) -> None:
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    model.eval()
    training = [module.training for module in model.modules()]
    plan = sec.plan(sec.trace(model, batches[0]), sec.Ratio(0.3))
    compensate = sec.LeastSquares(batches)
    sec.apply(model, plan, compensate=compensate)
    outcome = sec.outcome(model)
    assert outcome.after < 0.97 * outcome.before, str(outcome)
    assert all(not layer.after > layer.before * (1 + 1e-6) for layer in outcome.layers)
    assert len(outcome.layers) > 1
    assert [module.training for module in model.modules()] == training
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_a_bias_is_added_where_there_is_none_and_lasts(tmp_path) -> None:
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 24), nn.Sigmoid(), nn.Linear(24, 5, bias=False))

    net, batches = build(), [torch.randn(64, 6)]
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    sec.apply(net, plan, compensate=sec.LeastSquares(batches, bias=True))
    assert net[2].bias is not None
    sec.save(net, tmp_path / "small.safetensors")
    again = sec.load(tmp_path / "small.safetensors", build())
    assert torch.equal(again(batches[0]), net(batches[0]))
    plain = build()
    sec.apply(plain, plan, compensate=sec.LeastSquares(batches))
    assert plain[2].bias is None


def test_constants_fold_the_mean() -> None:
    net, batches = nn.Sequential(nn.Linear(6, 24), nn.Sigmoid(), nn.Linear(24, 5)), [torch.randn(200, 6)]
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    whole = copy.deepcopy(net)
    sec.apply(net, plan, compensate=sec.Constants(batches))
    kept = torch.tensor(plan.axes[0].keep)
    gone = torch.tensor(sorted(set(range(24)) - set(plan.axes[0].keep)))
    mean = torch.sigmoid(whole[0](batches[0])).mean(0)
    assert torch.equal(net[2].weight, whole[2].weight[:, kept])
    torch.testing.assert_close(net[2].bias, whole[2].bias + whole[2].weight[:, gone] @ mean[gone], atol=1e-5, rtol=1e-5)


def test_statistics_are_those_of_the_batches() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    batches = [torch.randn(4, 3, 9, 9) for _ in range(3)]
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    weights = net[2].weight.detach()[:, list(plan.axes[0].keep)].clone()
    sec.apply(net, plan, compensate=sec.Statistics(batches))
    assert torch.equal(net[2].weight, weights)
    net.eval()
    seen = net[:3](torch.cat(batches))
    torch.testing.assert_close(net[3].running_mean, seen.mean((0, 2, 3)))
    torch.testing.assert_close(net[3].running_var, seen.transpose(0, 1).flatten(1).var(1))


def test_training_goes_on_after_it() -> None:
    net, batches = mlp(), [torch.randn(64, 6)]
    optimizer = torch.optim.Adam(net.parameters())
    net(batches[0]).square().sum().backward()
    optimizer.step()
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    sec.apply(net, plan, optimizer=optimizer, compensate=sec.LeastSquares(batches))
    before = net[2].weight.detach().clone()
    net(batches[0]).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, net[2].weight)


@pytest.mark.parametrize("at", range(4))
def test_a_failure_anywhere_leaves_the_model_as_it_was(at: int, monkeypatch) -> None:
    net = nn.Sequential(*mlp(), nn.ReLU(), nn.Linear(5, 4, bias=False))
    batches, before = [torch.randn(32, 6)], state(net)
    parameters = [id(p) for p in net.parameters()]
    plan = sec.plan(sec.trace(net, batches[0]), {"0.weight": 0.5})
    calls = []
    original = refit.Refit._solution

    def fail(self, *args):
        if len(calls) == at:
            raise RuntimeError("planted")
        calls.append(1)
        return original(self, *args)

    monkeypatch.setattr(refit.Refit, "_solution", fail)
    if at < 3:
        with pytest.raises(CalibrationError, match="planted"):
            sec.apply(net, plan, compensate=sec.LeastSquares(batches))
        assert same(net, before)
        assert [id(p) for p in net.parameters()] == parameters
        assert net[0].out_features == 24
    else:
        sec.apply(net, plan, compensate=sec.LeastSquares(batches))
        assert net[0].out_features == 12


def test_what_does_not_help_is_taken_back_and_said(monkeypatch) -> None:
    net, batches = mlp(), [torch.randn(64, 6)]
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
    plain = sec.apply(copy.deepcopy(net), plan)
    original = refit.Refit._write
    monkeypatch.setattr(refit.Refit, "_write", lambda self, p, w, s: original(self, p, -9 * w, s))
    compensate = sec.LeastSquares(batches)
    with pytest.warns(SecateurWarning, match="taken back"):
        sec.apply(net, plan, compensate=compensate)
    assert same(net, state(plain))
    assert sec.outcome(net).taken_back


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (torch.zeros(4, 6), "iterable"),
        ([], "no batches"),
        (iter(()), "no batches"),
        (3, "iterable"),
        ([torch.zeros(4, 7)], "failed on batch 1"),
        ([None], "failed on batch 1"),
    ],
    ids=["tensor", "empty", "used-up", "number", "wrong-width", "none"],
)
def test_bad_batches_are_refused(batches, said: str) -> None:
    net = mlp()
    before = state(net)
    plan = sec.plan(sec.trace(net, torch.zeros(1, 6)), sec.Ratio(0.5))
    with pytest.raises(SecateurError, match=said):
        sec.apply(net, plan, compensate=sec.LeastSquares(batches))
    assert same(net, before)


def test_bad_options_are_refused() -> None:
    for ridge in (0, -1, float("nan"), float("inf"), "much", True):
        with pytest.raises(CalibrationError, match="ridge"):
            sec.LeastSquares([], ridge=ridge)
    net = mlp()
    plan = sec.plan(sec.trace(net, torch.zeros(1, 6)), sec.Ratio(0.5))
    with pytest.raises(ApplyError, match="compensate"):
        sec.apply(net, plan, compensate=[torch.zeros(1, 6)])


def test_data_without_finite_numbers_change_nothing_silently() -> None:
    net = mlp()
    plan = sec.plan(sec.trace(net, torch.zeros(1, 6)), sec.Ratio(0.5))
    before = state(net)
    with pytest.raises(sec.CalibrationError, match="batch 1: it is not finite"):
        sec.apply(net, plan, compensate=sec.LeastSquares([torch.full((8, 6), float("nan"))]))
    assert same(net, before)


def test_a_norm_that_layers_share_takes_the_shift_of_none() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 12, 3)
            self.one, self.two = nn.Conv2d(12, 6, 1, bias=False), nn.Conv2d(12, 6, 1, bias=False)
            self.norm = nn.BatchNorm2d(6)

        def forward(self, x):
            x = self.first(x).relu()
            return self.norm(self.one(x)) + self.norm(self.two(x))

    torch.manual_seed(0)
    net, batches = Shared().eval(), [torch.randn(8, 3, 9, 9)]
    plan = sec.plan(sec.trace(net, batches[0]), {"first.weight": 0.5})
    mean = net.norm.running_mean.clone()
    compensate = sec.LeastSquares(batches)
    sec.apply(net, plan, compensate=compensate)
    assert torch.equal(net.norm.running_mean, mean)
    assert sec.outcome(net).after < sec.outcome(net).before


def test_where_nothing_is_off_nothing_is_changed() -> None:
    net, batches = mlp(), [torch.randn(32, 6)]
    with torch.no_grad():
        net[2].weight[:, :2] = 0  # nobody reads these
    keep = torch.arange(2, net[2].weight.shape[1])
    weight = net[2].weight.detach()[:, keep].clone()
    score = torch.ones(net[2].weight.shape[1]).index_fill_(0, torch.arange(2), 0.0)
    plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(2 / len(score)), importance=lambda context: score)
    compensate = sec.LeastSquares(batches)
    sec.apply(net, plan, compensate=compensate)
    assert torch.equal(net[2].weight, weight)
    assert "as it is" in sec.outcome(net).notes[0]


class HeadsWithSharedPositions(nn.Module):
    """Every head is multiplied with the same parameter: a head that goes takes rows of that product with it."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 24)
        self.positions = nn.Parameter(torch.randn(5, 6))
        self.out = nn.Linear(20, 3)

    def forward(self, x):
        heads = torch.tanh(self.q(x)).view(x.shape[0], -1, 6)
        return self.out((heads @ self.positions.mT).relu().flatten(1))


def test_a_layer_whose_inputs_lost_rows_is_left_and_named() -> None:
    torch.manual_seed(0)
    net, x = HeadsWithSharedPositions(), torch.randn(200, 8)
    graph = sec.trace(net, x)
    heads = next(axis for axis in graph.axes if axis.size == 4)
    before = net.positions.detach().clone()
    compensate = sec.LeastSquares([x, torch.randn(200, 8)])
    sec.apply(net, sec.plan(graph, {heads.name: 0.5}), compensate=compensate)
    layers = {layer.name: layer for layer in sec.outcome(net).layers}
    assert "lost rows" in layers["positions"].note
    assert torch.equal(net.positions, before)
    assert layers["out.weight"].after < layers["out.weight"].before


class Reading(nn.Module):
    """Words and places are looked up; the last layer may be the table of words again."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 16), nn.Parameter(torch.randn(5, 16))
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 11, bias=False)
        if tied:
            self.last.weight = self.words.weight

    def forward(self, x):
        return self.last(self.middle(self.words(x) + self.places).relu())


@pytest.mark.parametrize("tied", [False, True])
def test_only_what_is_multiplied_with_data_is_named_as_not_refitted(tied: bool) -> None:
    torch.manual_seed(0)
    net, x = Reading(tied), torch.randint(11, (40, 5))
    if not tied:
        torch.nn.utils.parametrizations.weight_norm(net.last)
    compensate = sec.LeastSquares([x, x])
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5))
    sec.apply(net, plan, compensate=compensate)
    named = {note.split()[0]: note for note in sec.outcome(net).notes if "not refitted" in note}
    assert {"words.weight", "places"} & set(plan.kept)
    if tied:
        assert set(named) == {"words.weight"}
        assert "more than one place" in named["words.weight"]
    else:
        assert set(named) == {"last.parametrizations.weight.original1"}
        assert "made of it" in named["last.parametrizations.weight.original1"]


@pytest.mark.parametrize("recipe", [sec.LeastSquares, sec.Constants, sec.Statistics], ids=lambda r: r.__name__)
def test_a_compensation_is_a_value_that_serves_many_models(recipe) -> None:
    batches = [torch.randn(32, 6)]
    compensate = recipe(batches)
    with pytest.raises(AttributeError):
        compensate.memory = 1.0
    fields = dict(vars(compensate))
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = mlp()
        plan = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
        assert sec.outcome(net) is None
        sec.apply(net, plan, compensate=compensate)
        assert isinstance(sec.outcome(net), sec.Outcome)
        assert vars(compensate) == fields
        again = sec.plan(sec.trace(net, batches[0]), sec.Ratio(0.5))
        sec.apply(net, again)
        assert sec.outcome(net) is None  # the last cut had none


def test_options_that_do_nothing_are_not_taken_and_defaults_agree() -> None:
    for recipe, option in ((sec.Constants, "ridge"), (sec.Statistics, "ridge"), (sec.Statistics, "bias")):
        with pytest.raises(TypeError, match=option):
            recipe([], **{option: 1})
    defaults = [vars(recipe([])) for recipe in (sec.LeastSquares, sec.Constants, sec.Statistics)]
    assert all(defaults[0][name] == value for own in defaults for name, value in own.items() if name != "batches")
    options = inspect.signature(sec.compress).parameters
    for own in defaults:
        assert all(
            options[name].default == value for name, value in own.items() if name in options and name != "batches"
        )


def test_a_failure_leaves_no_outcome_behind() -> None:
    net = mlp()
    plan = sec.plan(sec.trace(net, torch.zeros(1, 6)), sec.Ratio(0.5))
    with pytest.raises(CalibrationError):
        sec.apply(net, plan, compensate=sec.LeastSquares([]))
    assert sec.outcome(net) is None
