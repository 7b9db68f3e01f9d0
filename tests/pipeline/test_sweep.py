"""A trade-off curve over any targets, from one calibration."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.pipeline.sweep import OutputError, Point, SweepError, sweep

EXAMPLE = torch.zeros(1, 8)
FRACTIONS = (0.8, 0.6, 0.4)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4)).eval()


def inputs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(32, 8) for _ in range(3)]


def pictured(name: str) -> tuple[nn.Module, list[Tensor]]:
    """A network of timm's and batches for it; every block of it does something, and batch norms know what they see."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **({"img_size": 64} if "vit" in name else {}))
    batches = [torch.randn(4, 3, 64, 64) for _ in range(2)]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)  # timm starts the last of a block at zero
    with torch.no_grad():
        for _ in range(20):
            model.train()(batches[0])
    return model.eval(), batches


class Passes:
    """Batches that count how often they are gone through."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.count = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.count += 1
        return iter(self.batches)


def calls(model: nn.Module) -> list[int]:
    """Grows by one whenever the model itself, not a copy of it, is called."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, _: seen.append(1) if module is model else None)
    return seen


def labelled(batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(batch, torch.arange(len(batch)) % 4) for batch in batches]


# one calibration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "criterion",
    [
        sec.Reconstruction,
        sec.Activation,
        sec.Wanda,
        lambda batches: sec.Taylor(batches, nn.functional.cross_entropy),
    ],
    ids=["reconstruction", "activation", "wanda", "taylor"],
)
def test_the_data_of_a_criterion_are_gone_through_once(criterion: Any) -> None:
    def passes(targets: list[Any], axis_ratio: float | None) -> tuple[int, int]:
        model = mlp()
        seen = calls(model)
        made = criterion(inputs())
        data = Passes(labelled(inputs()) if isinstance(made, sec.Taylor) else inputs())
        sweep(model, EXAMPLE, targets=targets, importance=criterion(data), axis_ratio=axis_ratio)
        return data.count, len(seen)

    one = passes([sec.Macs(0.5)], None)
    assert one[0] == 1
    many = [*map(sec.Macs, FRACTIONS), *map(sec.Params, FRACTIONS), sec.Ratio(0.5), sec.Macs(0.6) & sec.Bytes(0.5)]
    assert passes(many, 0.5) == one  # nor is the model itself run more often


def test_batches_are_read_once_and_the_model_runs_as_often_for_many_targets_as_for_one() -> None:
    runs = []
    for fractions in ((0.5,), FRACTIONS):
        model, data = mlp(), Passes(inputs())
        seen = calls(model)
        sweep(model, EXAMPLE, targets=[sec.Macs(f) for f in fractions], batches=data)
        assert data.count == 1
        runs.append(len(seen))
    assert runs[0] == runs[1] > len(inputs())


def test_every_axis_is_scored_once() -> None:
    asked: Counter[str] = Counter()

    def criterion(context: sec.Context) -> Tensor:
        asked[context.axis.name] += 1
        return sec.Magnitude()(context)

    sweep(mlp(), EXAMPLE, targets=[*map(sec.Macs, FRACTIONS), sec.Ratio(0.5)], importance=criterion)
    assert asked == {"0 features": 1, "2 features": 1}


# what the points are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("test_resnet", "test_vit"))]
)
def test_the_curve_is_what_compress_gives_one_by_one(name: str) -> None:
    model, batches = (mlp(), inputs()) if name == "mlp" else pictured(name)
    example = batches[0][:1]
    targets = [sec.Macs(0.6), sec.Params(0.7) & sec.Bytes(0.6), sec.Ratio(0.25)]
    found = sweep(model, example, targets=targets, batches=batches, axis_ratio=None)
    assert [point.target for point in found.curve] == ["Macs(0.6)", "Params(0.7) & Bytes(0.6)", "Ratio(0.25)"]
    assert (found.whole, found.axes) == (0.0, ())
    for target, point in zip(targets, found.curve, strict=True):
        small = copy.deepcopy(model)
        report = sec.compress(small, example, target, batches, verify=False, timed=False)
        assert point.macs == report.plan.macs.after / report.plan.macs.before
        assert point.params == report.plan.params.after / report.plan.params.before
        assert point.metric == pytest.approx(OutputError(model, batches)(small), rel=1e-4)
        assert point.metric == pytest.approx(math.sqrt(report.compensation.after), rel=1e-3)


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("test_resnet", "test_vit"))]
)
def test_the_curve_falls(name: str) -> None:
    """Each budget is kept and used up, and what is cut further is predicted to cost more."""
    model, batches = (mlp(), inputs()) if name == "mlp" else pictured(name)
    found = sweep(model, batches[0][:1], targets=list(map(sec.Macs, FRACTIONS)), batches=batches, axis_ratio=None)
    for fraction, point in zip(FRACTIONS, found.curve, strict=True):
        assert fraction - 0.05 <= point.macs <= fraction
        assert point.ratio is None
    for now, then in zip(found.curve, found.curve[1:], strict=False):
        assert now.macs > then.macs
        assert now.params > then.params
        assert 0 < now.predicted < then.predicted
        assert 0 < now.metric < then.metric or name != "mlp"  # a few pictures can be fitted by what is left


def test_targets_without_batches_are_plans_with_nothing_refitted() -> None:
    model = mlp()

    def total(small: nn.Module) -> float:
        return float(sum(p.detach().double().sum() for p in small.parameters()))

    targets = [sec.Macs(0.7), sec.Params(0.5), sec.Macs(0.7) & sec.Params(0.5), sec.Ratio({"0 *": 0.5}), {"2 *": 0.5}]
    keywords: dict[str, Any] = {"importance": sec.FPGM(), "round_to": 4, "protect": "4.bias"}
    found = sweep(model, EXAMPLE, total, targets=targets, **keywords)
    for target, point in zip(targets, found.curve, strict=True):
        plan = sec.plan(sec.trace(model, EXAMPLE), target, **keywords)
        assert point.macs == plan.macs.after / plan.macs.before
        assert point.metric == total(sec.apply(copy.deepcopy(model), plan))
    assert found.curve[3].target == "Ratio({'0 *': 0.5})"
    assert [point.ratio for point in found.curve] == [None] * 5


def test_batches_make_the_same_cut_better() -> None:
    """Refitted, the same positions gone, the outputs are nearer; a metric of the user's sees the refitted copy."""
    model, batches = mlp(), inputs()
    importance = sec.Reconstruction(batches)
    targets = list(map(sec.Macs, FRACTIONS))
    metric = OutputError(model, batches)
    plain = sweep(model, EXAMPLE, metric, targets=targets, importance=importance)
    refitted = sweep(model, EXAMPLE, metric, targets=targets, importance=importance, batches=batches)
    for before, after in zip(plain.curve, refitted.curve, strict=True):
        assert (before.macs, before.predicted) == (after.macs, after.predicted)
        assert after.metric < before.metric
    pairs = zip(plain.axes, refitted.axes, strict=True)
    assert all(after.point.metric <= before.point.metric for before, after in pairs if after.point and before.point)


def test_refitting_adds_no_biases() -> None:
    """What a point says of the parameters is what the copy has."""
    layers = [nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 24, bias=False), nn.ReLU(), nn.Linear(24, 4)]
    model = nn.Sequential(*layers)

    def size(small: nn.Module) -> float:
        return float(sum(p.numel() for p in small.parameters()))

    found = sweep(model, EXAMPLE, size, targets=list(map(sec.Params, FRACTIONS)), batches=inputs())
    for fraction, point in zip(FRACTIONS, found.curve, strict=True):
        assert point.params == point.metric / found.whole <= fraction


def test_the_prediction_by_hand() -> None:
    """Scores 1 to 4 and -1: the lowest go; what is below zero costs nothing."""
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    scores = torch.tensor([4.0, 1.0, -1.0, 3.0, 2.0])
    targets = [sec.Ratio(0.2), sec.Ratio(0.4), sec.Ratio(0.6), sec.Ratio(0.8), sec.Macs(1.0)]
    found = sweep(net, torch.zeros(1, 3), targets=targets, importance=lambda _: scores)
    assert [point.predicted for point in found.curve] == [0.0, 1.0, 3.0, 6.0, 0.0]
    assert [one.point.predicted for one in found.axes if one.point] == [1.0]  # two of five


def test_a_target_of_ones_own() -> None:
    """It may choose any positions; the prediction is that of the ones that went."""

    class Last:
        def choose(self, problem: Any) -> dict[Any, Tensor]:
            return {axis: torch.arange(2) for axis in problem.axes}

        def __str__(self) -> str:
            return "the first two"

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    scores = torch.tensor([1.0, 2.0, 4.0, 8.0])
    (point,) = sweep(net, torch.zeros(1, 3), targets=[Last()], importance=lambda _: scores).curve
    assert (point.target, point.predicted, point.macs) == ("the first two", 12.0, 0.5)


def test_a_target_that_cuts_nothing_is_a_point_too() -> None:
    found = sweep(mlp(), EXAMPLE, targets=[sec.Macs(1.0), sec.Macs(0.5)], batches=inputs())
    assert found.curve[0] == Point(None, 1.0, 1.0, found.whole, "Macs(1.0)", 0.0)
    assert len(found.curve) == 2


@pytest.mark.filterwarnings("ignore::secateur.SecateurWarning")  # a busy machine may miss the time
def test_a_curve_over_time() -> None:
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    targets = [sec.Latency(0.8), sec.Latency(0.4) & sec.Macs(0.5)]
    found = sweep(net, torch.zeros(32, 256), targets=targets, axis_ratio=None)
    assert [point.target for point in found.curve] == ["Latency(0.8)", "Latency(0.4) & Macs(0.5)"]
    assert found.curve[1].macs <= 0.5
    assert found.curve[1].macs < found.curve[0].macs <= 1


def test_ratios_as_before() -> None:
    model = mlp()
    assert [point.ratio for point in sweep(model, EXAMPLE).curve] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    given = sweep(model, EXAMPLE, ratios=(0.25, 0.5))
    assert given == sweep(model, EXAMPLE, targets=[sec.Ratio(0.25), sec.Ratio(0.5)])
    assert [point.target for point in given.curve] == ["Ratio(0.25)", "Ratio(0.5)"]
    assert [one.point.target for one in given.axes if one.point] == ["Ratio(0.5)"] * 2


# the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_model_stays_as_it_is(training: bool) -> None:
    model, batches = pictured("test_resnet")
    model.train(training)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    held = set(model.__dict__)
    kept, random = copy.deepcopy(batches), torch.get_rng_state()
    sweep(model, batches[0][:1], targets=[sec.Macs(0.5), sec.Ratio(0.3)], batches=batches, axis_ratio=None)
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert set(model.__dict__) == held
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(batches, kept, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_outputs_are_those_in_eval_mode() -> None:
    """With dropout and batch statistics, a model in training mode would not even agree with itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)).train()
    found = sweep(model, torch.randn(16, 8), targets=[sec.Macs(0.5)])
    assert found.whole == 0.0
    metric = OutputError(model.train(), inputs())
    assert metric(model) == 0.0
    assert model.training
    assert int(model[1].num_batches_tracked) == 0


# hostile input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"targets": []}, SweepError, "a sweep needs at least one target, such as Macs"),
        ({"targets": iter(())}, SweepError, "a sweep needs at least one target"),
        ({"targets": sec.Macs(0.5)}, sec.PlanError, r"targets is a list of targets, such as .* not Macs"),
        ({"targets": "macs"}, sec.PlanError, "targets is a list of targets, such as .* not 'macs'"),
        ({"targets": {"0 *": 0.5}}, sec.PlanError, "targets is a list of targets"),
        ({"targets": 0.5}, sec.PlanError, "targets is a list of targets, such as .* not 0.5"),
        ({"targets": [0.5]}, sec.PlanError, r"a target is Ratio\(r\), Macs\(f\), .* not 0.5"),
        ({"targets": [sec.Macs]}, sec.PlanError, r"a target is Ratio\(r\), Macs\(f\), .* not <class"),
        ({"targets": [sec.Macs(0.5), None]}, sec.PlanError, r"a target is .* not None"),
        ({"targets": [(sec.Macs(0.5), sec.Ratio(0.5))]}, sec.PlanError, "only budgets can be combined"),
        ({"targets": [sec.Macs(0.5)], "ratios": (0.5,)}, SweepError, "over targets or over ratios: give one of them"),
        ({"ratios": ("0.5",)}, sec.PlanError, "ratios are numbers between 0 and 1, at least one"),
        ({"axis_ratio": 1.0}, sec.PlanError, "axis_ratio is a number between 0 and 1, or None, not 1.0"),
        ({"axis_ratio": "half"}, sec.PlanError, "axis_ratio is a number between 0 and 1, or None, not 'half'"),
        ({"metric": "accuracy"}, SweepError, "metric is a function from a model to a number, or None, not 'accuracy'"),
        ({"batches": []}, sec.CalibrationError, "sweep: there are no batches"),
        ({"batches": torch.zeros(4, 8)}, sec.CalibrationError, "sweep: batches is an iterable of batches"),
        ({"batches": [torch.zeros(4, 3)]}, SweepError, "Sequential could not be run on batch 1: RuntimeError"),
        ({"batches": [torch.full((4, 8), float("nan"))]}, sec.CalibrationError, "sweep: batch 1: it is not finite"),
        ({"importance": "magnitude"}, sec.PlanError, "importance is a function of a Context"),
        ({"round_to": 0}, sec.PlanError, "round_to is a whole number from 1 on, not 0"),
        ({"protect": "layr4.*"}, sec.PlanError, "protect: no tensor and no axis matches 'layr4"),
    ],
)
def test_what_is_refused(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sweep(mlp(), EXAMPLE, **keywords)


def test_a_target_out_of_reach_is_refused_before_anything_is_cut() -> None:
    seen: list[nn.Module] = []

    def metric(model: nn.Module) -> float:
        seen.append(model)
        return 0.0

    with pytest.raises(sec.PlanError, match=r"Macs\(0.001\) cannot be reached: the lowest is 0\.\d+"):
        sweep(mlp(), EXAMPLE, metric, targets=[sec.Macs(0.5), sec.Macs(0.001)])
    assert [model[0].out_features for model in seen] == [32]  # the whole one


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    with pytest.raises(sec.CalibrationError, match="a sweep: Sequential has tensors without values"):
        sweep(model, torch.zeros(1, 8, device="meta"), targets=[sec.Macs(0.5)])


def test_scores_without_end_are_no_numbers_in_json() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(9, 4)
    forever = lambda context: torch.full((context.axis.size,), float("inf"))  # noqa: E731
    found = sec.sweep(net, x, targets=[sec.Macs(0.5)], batches=[x], importance=forever)
    assert found.curve[0].predicted == float("inf")
    assert json.loads(json.dumps(found.to_data(), allow_nan=False))["curve"][0]["predicted"] is None
