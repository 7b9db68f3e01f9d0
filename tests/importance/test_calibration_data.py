"""What data-driven criteria take, what they refuse, and that they leave everything as it was."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from importance_models import scores, traced
from test_gradient_criteria import batches_for, loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import secateur as sec
from oracle import Net
from secateur.errors import CalibrationError
from secateur.importance import Activation, Hessian, Taylor, Wanda
from secateur.planning.problem import PruningProblem

WITH_LOSS = [Taylor, Hessian]
WITHOUT = [Activation, Wanda]


def made(kind: Any, batches: Any, own_loss: Any = loss) -> Any:
    return kind(batches, own_loss) if kind in WITH_LOSS else kind(batches)


def planned(kind: Any, batches: Any, own_loss: Any = loss, graph: sec.Graph | None = None) -> sec.Plan:
    return sec.plan(graph or traced("flattened"), sec.Ratio(0.5), importance=made(kind, batches, own_loss))


every_kind = pytest.mark.parametrize("kind", [*WITH_LOSS, *WITHOUT], ids=lambda k: k.__name__)


# what they take ---------------------------------------------------------------------------------------------------


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.cat(batches_for("flattened")))


@every_kind
def test_any_iterable_will_do(kind: Any) -> None:
    batches, graph = batches_for("flattened"), traced("flattened")
    want = scores(graph, made(kind, batches))["conv channels"]
    ways = {
        "tuple": tuple(batches),
        "generator": (batch for batch in batches),
        "function": lambda: iter(batches),
        "DataLoader": DataLoader(torch.cat(batches), batch_size=2),
        "IterableDataset": DataLoader(Endless(), batch_size=2),
    }
    for name, way in ways.items():
        assert torch.allclose(scores(graph, made(kind, way))["conv channels"], want, rtol=1e-6), name


def test_labelled_pairs_from_a_data_loader() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    pairs = DataLoader(TensorDataset(torch.randn(12, 3), torch.randint(2, (12,))), batch_size=4)
    graph = sec.trace(net, torch.zeros(1, 3))
    assert scores(graph, Taylor(pairs, F.cross_entropy))["0 features"].any()


@every_kind
def test_batches_may_differ_in_size(kind: Any) -> None:
    batches = torch.cat(batches_for("flattened"))
    assert planned(kind, [batches[:1], batches[1:]]).axes


@every_kind
def test_a_dict_is_passed_by_keyword(kind: Any) -> None:
    net = Net(lambda n, x, scale: n.b(n.a(x) * scale), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    example = {"x": torch.randn(2, 3), "scale": torch.tensor(2.0)}
    graph = sec.trace(net, example)
    assert planned(kind, [example], lambda model, batch: model(**batch).sum(), graph).axes


@every_kind
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_gradients_switched_off_outside(kind: Any, mode: Any) -> None:
    graph, batches = traced("flattened"), batches_for("flattened")
    want = scores(graph, made(kind, batches))
    with mode():
        got = scores(graph, made(kind, batches))
    assert torch.allclose(got["conv channels"], want["conv channels"])


# what they refuse -------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("nothing", [[], lambda: iter(()), ()], ids=["list", "function", "tuple"])
def test_no_batches(kind: Any, nothing: Any) -> None:
    with pytest.raises(CalibrationError, match=rf"{kind.__name__}: there are no batches\. A generator is used up"):
        planned(kind, nothing)


@every_kind
def test_a_generator_that_is_used_up(kind: Any) -> None:
    criterion = made(kind, iter(batches_for("flattened")))
    sec.plan(traced("flattened"), sec.Ratio(0.5), importance=criterion)
    with pytest.raises(CalibrationError, match="used up after one pass"):
        sec.plan(traced("flattened"), sec.Ratio(0.5), importance=criterion)


@every_kind
@pytest.mark.parametrize(
    "bad", [torch.zeros(4, 2, 4, 4), {"x": torch.zeros(2)}, "batches", 3, None], ids=lambda b: type(b).__name__
)
def test_what_is_no_iterable_of_batches(kind: Any, bad: Any) -> None:
    with pytest.raises(CalibrationError, match=f"{kind.__name__}: batches is an iterable of batches.* not a "):
        planned(kind, bad)


@every_kind
def test_a_batch_that_does_not_fit(kind: Any) -> None:
    batches = [*batches_for("flattened", 1), torch.zeros(2, 7, 4, 4)]
    with pytest.raises(
        CalibrationError, match=rf"{kind.__name__}: .*batch\) failed on batch 2: RuntimeError: "
    ) as caught:
        planned(kind, batches)
    assert isinstance(caught.value.__cause__, RuntimeError)


def nan_gradient(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) * 0).sum().sqrt()


@pytest.mark.parametrize("kind", WITH_LOSS, ids=lambda k: k.__name__)
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda model, batch: model(batch), r"batch\) on batch 1 has the shape \(2, 2\): take its mean"),
        (lambda model, batch: model(batch).sum().item(), "is a float, not a tensor"),
        (lambda model, batch: None, "is a NoneType, not a tensor"),
        (lambda model, batch: model(batch).sum() * math.nan, "is nan: a batch or a weight is not finite"),
        (lambda model, batch: model(batch).sum() * math.inf, "is (inf|-inf|nan)"),
        (lambda model, batch: model(batch).detach().sum(), "has no gradient"),
        (lambda model, batch: torch.ones((), requires_grad=True), "depends on no parameter"),
        (nan_gradient, "the gradient on batch 1 is not finite at conv channels, though the loss is"),
        (lambda output: output.sum(), r"loss\(model, batch\) failed on batch 1: TypeError"),
        (lambda output, target: F.mse_loss(output, target), r"loss\(model, batch\) failed on batch 1"),
        (
            F.cross_entropy,
            r"loss\(model\(inputs\), target\) failed on batch 1: .* pair \(inputs, target\), not a Tensor",
        ),
        ("cross_entropy", r"failed on batch 1: TypeError: 'str' object is not callable"),
    ],
    ids=[
        "shape",
        "float",
        "none",
        "nan",
        "inf",
        "detached",
        "unrelated",
        "nan-gradient",
        "one",
        "pair",
        "no-pair",
        "str",
    ],
)
def test_bad_losses(kind: Any, bad: Any, said: str) -> None:
    graph = traced("flattened")
    before = state(graph.model)
    with pytest.raises(CalibrationError, match=said):
        planned(kind, batches_for("flattened"), bad, graph)
    assert state(graph.model) == before


@pytest.mark.parametrize("kind", WITHOUT, ids=lambda k: k.__name__)
def test_data_that_are_not_finite(kind: Any) -> None:
    bad = torch.full((2, 2, 4, 4), math.nan)
    with pytest.raises(CalibrationError, match=rf"{kind.__name__}: batch 2: .* not finite"):
        planned(kind, [*batches_for("flattened", 1), bad])


@every_kind
def test_a_model_without_values(kind: Any) -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = sec.trace(net, torch.zeros(1, 3))
    with pytest.raises(CalibrationError, match="Sequential has tensors without values"):
        planned(kind, [torch.zeros(1, 3)], graph=graph)


# that they change nothing ------------------------------------------------------------------------------------------


def state(model: nn.Module) -> Any:
    """Everything about a model that somebody could notice, as text or numbers."""
    tensors = {
        name: (id(t), t.requires_grad, t.tolist(), None if t.grad is None else (id(t.grad), t.grad.tolist()))
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    modules = {name: (m.training, sorted(m.__dict__), len(m._forward_hooks)) for name, m in model.named_modules()}
    return tensors, modules


class Counting(nn.Module):
    """Counts its runs in a buffer, in an attribute and in a list, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.count, self.seen, self.last = 0, [], None

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.count += 1
        self.seen.append(len(x))
        self.last = x
        return F.dropout(x, 0.5, training=True)


def lived_in() -> nn.Module:
    """A model in the middle of a training: some of it frozen, some in eval mode, gradients there."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), Counting(), nn.Flatten(), nn.Linear(16, 2))
    net.train()
    net[1].eval()
    net(torch.randn(2, 2, 4, 4)).sum().backward()
    net[0].requires_grad_(False)
    net[4].bias.grad = None
    return net


@every_kind
@pytest.mark.parametrize("fails", [False, True], ids=["well", "badly"])
def test_everything_is_as_it_was(kind: Any, fails: bool) -> None:
    net = lived_in()
    graph = sec.trace(net, torch.zeros(2, 2, 4, 4))
    before, held = state(net), (net[2].count, list(net[2].seen), net[2].last)
    batches = batches_for("flattened")
    kept = [batch.clone() for batch in batches]
    rng = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    if fails:
        with pytest.raises(CalibrationError):
            planned(kind, [*batches, torch.zeros(1)], graph=graph)
    else:
        planned(kind, batches, graph=graph)
    assert state(net) == before
    assert (net[2].count, net[2].seen) == held[:2]
    assert net[2].last is held[2]
    assert torch.equal(torch.get_rng_state(), rng[0])
    assert (np.random.get_state()[1] == rng[1]).all()
    assert random.getstate() == rng[2]
    assert all(torch.equal(a, b) for a, b in zip(batches, kept, strict=True))


@every_kind
def test_an_interrupt_leaves_everything_as_it_was_too(kind: Any) -> None:
    net = lived_in()
    graph = sec.trace(net, torch.zeros(2, 2, 4, 4))
    before = state(net)

    def batches() -> Iterator[Tensor]:
        yield from batches_for("flattened", 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planned(kind, batches, graph=graph)
    assert state(net) == before


@every_kind
def test_the_model_runs_in_eval_mode(kind: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    graph = sec.trace(net, torch.randn(4, 3))
    x = torch.randn(4, 3) + 5
    net.train()
    training = scores(graph, made(kind, [x]))["0 features"]
    net.eval()
    assert torch.equal(scores(graph, made(kind, [x]))["0 features"], training)
    assert net[1].num_batches_tracked == 0


# how much they hold ------------------------------------------------------------------------------------------------


@every_kind
def test_memory_does_not_grow_with_the_number_of_batches(kind: Any) -> None:
    """Batches are made on demand; the most that were alive at any time is counted."""
    alive, most = 0, 0

    class Batch:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def batches() -> Iterator[Any]:
        for _ in range(12):
            yield {"x": torch.randn(2, 3), "mark": Batch()}

    net = Net(lambda n, x, mark: n.b(n.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    graph = sec.trace(net, {"x": torch.zeros(2, 3), "mark": None})
    planned(kind, batches, lambda model, batch: model(**batch).sum(), graph)
    assert 1 <= most <= 2


@every_kind
def test_what_is_kept_is_no_larger_than_the_parameters(kind: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    graph = sec.trace(net, torch.zeros(1, 3))
    criterion = made(kind, lambda: (torch.randn(4096, 3) for _ in range(3)))
    problem = PruningProblem(graph, criterion, exact=False, protect=(), round_to=1)
    problem.scores(graph.axes[0])
    held = sum(t.numel() for t in tensors_in(problem._scores()))
    assert 0 < held <= 4 * sum(p.numel() for p in net.parameters())


def tensors_in(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, dict):
        for value in item.values():
            yield from tensors_in(value)
    elif isinstance(item, tuple | list):
        for value in item:
            yield from tensors_in(value)
    elif hasattr(item, "squares_in"):
        yield from tensors_in(vars(item))


# real models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "mobilenetv2_035"])
def test_real_models(name: str) -> None:
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "depth": 2} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=10, **options).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # some start at zero, and nothing would matter behind them
            nn.init.uniform_(module.weight, 0.5, 1.5)
    pairs = [(torch.randn(2, 3, 32, 32), torch.randint(10, (2,))) for _ in range(2)]
    images = [image for image, _ in pairs]
    before = copy.deepcopy(model.state_dict())
    graph = sec.trace(model, images[0])
    criteria = (Taylor(pairs, F.cross_entropy), Hessian(pairs, F.cross_entropy), Activation(images), Wanda(images))
    for criterion in criteria:
        for axis, own in scores(graph, criterion).items():
            assert own.isfinite().all(), (criterion, axis)
            assert own.min() >= 0, (criterion, axis)
            assert own.std() > 0, (criterion, axis)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    sec.apply(model, sec.plan(graph, sec.Ratio(0.5), importance=criteria[0] + criteria[2]), verify=False)
    assert model(images[0]).shape == (2, 10)
