"""The loop: budgets of the uncut model, the floor, the step back, and all or nothing."""

import math

import pytest
import torch
from schedule_models import Conv, accuracy, digest, digits, mlp, train
from torch import nn

import secateur as sec
from secateur.schedule import Iteration, cubic, cut, iterate, linear, one_shot

X, Y = digits()
EXAMPLE = X[:1]


def no_fit(model):
    pass


def run(model, target, **keywords):
    keywords = {"fit": no_fit, "evaluate": lambda model: 1.0, "schedule": linear(3)} | keywords
    return iterate(model, keywords.pop("example", EXAMPLE), target, **keywords)


@pytest.mark.parametrize("target", [sec.Macs(0.4), sec.Params(0.4)], ids=str)
def test_a_budget_is_a_fraction_of_the_uncut_model_in_every_round(target):
    """Linear in four rounds to 0.4: 0.85, 0.7, 0.55, 0.4, each used nearly up."""
    model = mlp(64)
    whole = {"macs": sec.macs(model, EXAMPLE), "params": sum(p.numel() for p in model.parameters())}
    found = run(model, target, schedule=linear(4))
    name = "macs" if isinstance(target, sec.Macs) else "params"
    shares = [getattr(r, name) / whole[name] for r in found.rounds]
    assert shares[0] == 1.0
    for share, wanted in zip(shares[1:], (0.85, 0.7, 0.55, 0.4), strict=True):
        assert wanted - 0.02 < share <= wanted
    assert sec.macs(model, EXAMPLE) == found.rounds[-1].macs
    assert sum(p.numel() for p in model.parameters()) == found.rounds[-1].params


def test_several_budgets_hold_in_every_round():
    """Linear in two rounds to 0.5 and 0.4: 0.75 and 0.7, then 0.5 and 0.4."""
    model = mlp(64)
    size = sum(p.numel() for p in model.parameters())
    found = run(model, sec.Macs(0.5) & sec.Params(0.4), schedule=linear(2))
    shares = [(r.macs / found.rounds[0].macs, r.params / size) for r in found.rounds[1:]]
    assert all(macs <= 0.75 and 0.68 < params <= 0.7 for macs, params in shares[:1])
    assert all(macs <= 0.5 and 0.38 < params <= 0.4 for macs, params in shares[1:])


def test_a_round_whose_budget_is_met_already_cuts_nothing():
    model, widths = mlp(16), []
    fit = lambda m: widths.append(m[0].out_features)  # noqa: E731
    run(model, sec.Macs(0.5), fit=fit, schedule=lambda step: [0, 0.5, 0.5, 1][step - 1])
    assert widths[0] == 16
    assert widths[1] == widths[2]
    assert 16 > widths[1] > widths[3]


def test_a_ratio_is_that_of_the_uncut_axes_in_every_round():
    model, widths = mlp(16), []
    run(model, sec.Ratio(0.5), schedule=linear(4), fit=lambda m: widths.append((m[0].out_features, m[3].out_features)))
    assert widths == [(14, 14), (12, 12), (10, 10), (8, 8)]


def test_a_ratio_by_name_leaves_the_rest_alone():
    model, widths = mlp(16), []
    fit = lambda m: widths.append((m[0].out_features, m[3].out_features))  # noqa: E731
    run(model, {"3 features": 0.5, "0 features": 0.25}, schedule=linear(2), fit=fit)
    assert widths == [(14, 12), (12, 8)]


def test_one_shot_is_a_plan_and_its_application():
    model, other = mlp(), mlp()
    run(model, sec.Macs(0.5), schedule=one_shot())
    cut(other, EXAMPLE, sec.Macs(0.5))
    assert digest(model) == digest(other)


def test_a_target_without_parts_needs_one_shot():
    model = mlp()
    with torch.no_grad():
        model[0].weight[:4] = model[0].bias[:4] = 0
    before = digest(model)
    with pytest.raises(
        sec.SecateurError, match=r"Zeros\(\) cannot be approached in 3 steps; use schedule.one_shot\(\)"
    ):
        run(model, sec.Zeros())
    assert digest(model) == before
    run(model, sec.Zeros(), schedule=one_shot())
    assert model[0].out_features == 12


def test_the_metrics_before_and_after_the_fit():
    """The metric is the bias of the last layer, which no cut touches: 10 more after each fit."""
    model = mlp()
    metric = lambda m: m[5].bias.detach().mean()  # noqa: E731
    start = metric(model).item()

    def fit(m):
        m[5].bias.data += 10

    found = run(model, sec.Macs(0.5), fit=fit, evaluate=metric)
    assert [r.before - start for r in found.rounds] == pytest.approx([0, 0, 10, 20], abs=1e-4)
    assert [r.after - start for r in found.rounds] == pytest.approx([0, 10, 20, 30], abs=1e-4)
    assert all(r.seconds > 0 for r in found.rounds)


@pytest.mark.filterwarnings("ignore:the plan cuts nothing")
def test_the_keywords_of_plan_go_through():
    model = mlp()
    first = lambda context: -torch.arange(context.axis.size)  # noqa: E731
    kept = model[0].weight[:12].detach().clone()
    run(model, sec.Ratio(0.25), importance=first, protect=("3.weight",), schedule=one_shot())
    assert model[0].out_features == 16  # its consumer is protected
    run(model, sec.Ratio(0.25), importance=first, protect=("5.weight",), schedule=linear(2))
    assert torch.equal(model[0].weight, kept)
    assert model[3].out_features == 16


def test_another_way_to_cut():
    seen = []

    def by_half(model, example, target, *, batches):
        seen.append((target.amount, batches))
        cut(model, example, target)

    run(mlp(), sec.Macs(0.5), cut=by_half, batches=[1], schedule=linear(2))
    assert [batches for _, batches in seen] == [[1], [1]]
    assert seen[0][0] == 0.75


def test_the_step_is_given_to_a_fit_that_asks():
    steps = []
    run(mlp(), sec.Macs(0.5), fit=lambda model, step: steps.append(step))
    run(mlp(), sec.Macs(0.5), fit=lambda model, epochs=7: steps.append(epochs), schedule=one_shot())
    run(mlp(), sec.Macs(0.5), fit=lambda model, step=8: steps.append(step), schedule=one_shot())  # means its own
    assert steps == [1, 2, 3, 7, 8]


def metric_by_round(*values):
    """Metrics of the uncut model and after each fit; between a cut and its fit it is -1."""
    state = {"round": 0, "fitted": True}

    def fit(model, step):
        state.update(round=step, fitted=True)

    def evaluate(model):
        value = values[state["round"]] if state["fitted"] else -1
        state["fitted"] = False
        return value

    return {"fit": fit, "evaluate": evaluate}


def test_below_the_floor_it_steps_back():
    model, after = mlp(), {}
    functions = metric_by_round(0.9, 0.89, 0.85, 0.7, 0.99)
    inner = functions["fit"]

    def fit(m, step):
        inner(m, step)
        m[5].bias.data += step
        after[step] = digest(m)

    found = run(model, sec.Macs(0.3), **functions | {"fit": fit}, floor=0.8, schedule=linear(4))
    assert [r.after for r in found.rounds] == [0.9, 0.89, 0.85, 0.7]  # the fourth was not tried
    assert found.best.number == 2
    assert digest(model) == after[2]
    assert sec.macs(model, EXAMPLE) == found.best.macs


def test_the_uncut_model_is_the_best_where_the_first_round_fails():
    model = mlp()
    before, tensors = digest(model), list(model.parameters())
    found = run(model, sec.Macs(0.5), **metric_by_round(0.9, 0.1), floor=0.8)
    assert found.best.number == 0
    assert digest(model) == before
    assert all(a is b for a, b in zip(model.parameters(), tensors, strict=True))


def test_a_metric_at_the_floor_meets_it_and_nan_does_not():
    assert run(mlp(), sec.Macs(0.5), **metric_by_round(0.8, 0.8, 0.8, 0.8), floor=0.8).best.number == 3
    assert run(mlp(), sec.Macs(0.5), **metric_by_round(0.8, 0.8, math.nan), floor=0.8).best.number == 1
    assert run(mlp(), sec.Macs(0.5), **metric_by_round(0.8, 0.1, 0.1, 0.1)).best.number == 3  # no floor


def test_an_uncut_model_below_the_floor_is_refused():
    model = mlp()
    before = digest(model)
    with pytest.raises(sec.SecateurError, match=r"the uncut model is at 0\.7, below the floor 0\.8; train it first"):
        run(model, sec.Macs(0.5), evaluate=lambda m: 0.7, floor=0.8)
    assert digest(model) == before


@pytest.mark.parametrize("floor", [None, 0.8])
def test_an_uncut_model_without_a_metric_is_refused(floor):
    with pytest.raises(sec.ScheduleError, match="evaluate returned nan, which is no number to go by"):
        run(mlp(), sec.Macs(0.5), evaluate=lambda m: math.nan, floor=floor)


def test_a_part_of_nothing_is_refused():
    with pytest.raises(sec.ScheduleError, match=r"Macs\(0\.5\) is a part of nothing"):
        sec.iterate(mlp(), EXAMPLE[:0], sec.Macs(0.5), fit=lambda m: None, evaluate=lambda m: 1.0)


def test_real_recovery():
    """Digits: half the MACs goes, in three rounds with training, and next to nothing of the accuracy."""
    model, (x, y) = mlp(64), digits(1797)
    train(model, x[:1300], y[:1300], 8)
    fit = lambda m: train(m, x[:1300], y[:1300], 2)  # noqa: E731
    evaluate = lambda m: accuracy(m, x[1300:], y[1300:])  # noqa: E731
    found = run(model, sec.Macs(0.3), fit=fit, evaluate=evaluate, schedule=cubic(3))
    assert found.rounds[0].after > 0.9
    assert found.rounds[-1].macs <= 0.3 * found.rounds[0].macs
    assert found.rounds[-1].after > found.rounds[0].after - 0.03
    worst = min(found.rounds, key=lambda r: r.before)
    assert worst.before < found.rounds[0].after - 0.03 < worst.after


class Stop(BaseException):
    """As KeyboardInterrupt: no Exception."""


# Where it fails, how, and the last complete round then.
MOMENTS = [
    ("evaluate 0", Stop, 0),
    ("cut 1", ValueError, 0),
    ("fit 1", KeyboardInterrupt, 0),
    ("evaluate 2", ValueError, 0),
    ("cut 2", KeyboardInterrupt, 1),
    ("evaluate 3", Stop, 1),
    ("fit 3", KeyboardInterrupt, 2),
]


@pytest.mark.parametrize(
    ("where", "error", "number"), MOMENTS, ids=[f"{where} {e.__name__}" for where, e, _ in MOMENTS]
)
def test_what_goes_wrong_leaves_the_last_complete_round(where, error, number):
    """A model with buffers, attention and modes; what fails has changed all of it before it does."""
    torch.manual_seed(0)
    model, calls = Conv(), {"fit": 0, "cut": 0, "evaluate": -1}
    model.conv.eval()
    model.head.bias.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)

    def state():
        modes = [(module.training, type(module)) for module in model.modules()]
        learning = [(p.requires_grad, None if p.grad is None else p.grad.tolist()) for p in model.parameters()]
        return digest(model), str(model), modes, learning, model.attention.num_heads

    complete = [state()]

    def step(name):
        calls[name] += 1
        if f"{name} {calls[name]}" == where:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.add_(1)
            model.half().train().requires_grad_(True)
            model.attention.num_heads = 77
            model.extra = nn.Linear(2, 2)
            del model.norm
            raise error("here")

    def fit(m):
        step("fit")
        modes = [module.training for module in m.modules()]
        train(m, X[:64], Y[:64])
        m.zero_grad()
        for module, mode in zip(m.modules(), modes, strict=True):
            module.training = mode
        complete.append(state())

    def evaluate(m):
        step("evaluate")
        return 1.0

    def cutting(m, example, target):
        cut(m, example, target)
        step("cut")

    with pytest.raises(error, match="here") as caught:
        run(model, sec.Macs(0.4), fit=fit, evaluate=evaluate, cut=cutting)
    assert state() == complete[number]
    assert caught.value.__notes__ == [
        "The model is as it was." if number == 0 else f"The model is as of round {number}."
    ]
    assert accuracy(model, X[:64], Y[:64]) >= 0  # it runs


def test_measuring_changes_nothing_in_the_uncut_model():
    """So that a run that is taken up from its very beginning goes on from the same."""
    model, seen = Conv(), []
    before = digest(model)

    def evaluate(m):
        m.train()(X)  # moves the statistics of the BatchNorm
        assert digest(m) != before
        return 1.0

    def cutting(m, example, target):
        seen.append((digest(m), m.training))
        cut(m, example, target)

    run(model.eval(), sec.Macs(0.5), evaluate=evaluate, cut=cutting, schedule=one_shot())
    assert seen == [(before, False)]


def test_modes_and_gradients_do_not_leak_from_one_round_to_the_next():
    model, seen = mlp().eval(), []

    def fit(m):
        seen.append((m.training, all(p.grad is None for p in m.parameters())))
        m.train()
        m(X).sum().backward()

    run(model, sec.Macs(0.5), fit=fit)
    assert seen == [(False, True)] * 3
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        pytest.param({"fit": None}, "fit is a function of the model, not None", id="fit"),
        pytest.param({"evaluate": 3}, "evaluate is a function of the model, not 3", id="evaluate"),
        pytest.param({"cut": "half"}, "cut is a function of the model, not 'half'", id="cut"),
        pytest.param({"floor": "high"}, "floor is the lowest metric", id="floor"),
        pytest.param({"floor": math.nan}, "floor is the lowest metric", id="floor nan"),
        pytest.param({"floor": -math.inf}, "floor is the lowest metric", id="floor infinite"),
        pytest.param({"chekpoint": "x"}, "goes to cut: .*unexpected keyword argument 'chekpoint'", id="typo"),
        pytest.param({"protect": "nowhere"}, "protect: no tensor and no axis matches", id="protect"),
        pytest.param({"round_to": 0}, "round_to is a whole number", id="round_to"),
        pytest.param({"evaluate": lambda m: "good"}, "evaluate returned a str; it returns one number", id="text"),
        pytest.param({"evaluate": lambda m: torch.ones(2)}, "evaluate returned a Tensor", id="two numbers"),
        pytest.param({"evaluate": lambda m: None}, "evaluate returned a NoneType", id="nothing"),
    ],
)
def test_bad_input_is_refused_before_anything_is_cut(keywords, words):
    model, fitted = mlp(), []
    before = digest(model)
    with pytest.raises(sec.SecateurError, match=words):
        run(model, sec.Macs(0.5), **({"fit": fitted.append} | keywords))
    assert digest(model) == before
    assert fitted == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        pytest.param(sec.Macs(0.001), "cannot be reached", id="unreachable"),
        pytest.param({"nowhere": 0.5}, "no axis and no tensor matches", id="glob"),
        pytest.param(0.5, "a target is", id="number"),
        pytest.param(None, "a target is", id="none"),
    ],
)
def test_a_bad_target_is_refused_before_anything_is_measured(target, words):
    measured = []
    with pytest.raises(sec.SecateurError, match=words):
        run(mlp(), target, evaluate=measured.append)
    assert measured == []


def test_the_report_is_a_value_that_prints_as_a_table():
    found = run(mlp(), sec.Macs(0.5), **metric_by_round(0.9, 0.85, 0.2), floor=0.8)
    assert isinstance(found, Iteration)
    with pytest.raises(AttributeError):
        found.rounds = ()
    lines = str(found).splitlines()
    assert len(lines) == 1 + 3 + 1
    assert [line.split()[0] for line in lines[1:4]] == ["0", "*", "2"]
    assert "(100.0%)" in lines[1]
    assert lines[-1] == "* the model is left at round 1: round 2 fell below the floor 0.8"
    whole = run(mlp(), sec.Macs(0.5))
    assert str(whole).splitlines()[-1] == "* the model is left at round 3, the target is met"
