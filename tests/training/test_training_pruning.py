"""Cuts, penalties and masks in loops: the optimizer, averages of weights, states to go on from."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import secateur as sec
from represented import represented
from secateur import training
from secateur.schedule import linear


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))


X = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
Y = X[:, :3]


def train(model, optimizer, pruning, steps, first=0, scheduler=None, ema=None):
    for i in range(first, steps):
        part = slice(16 * (i % 4), 16 * (i % 4) + 16)
        optimizer.zero_grad()
        F.mse_loss(model(X[part]), Y[part]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if ema is not None:
            getattr(ema, "update", getattr(ema, "update_parameters", None))(model)
        pruning.step()


def cuts(every=4):
    return training.Cuts(X[:1], sec.Macs(0.5), every=every, schedule=linear(2))


WHATS = {
    "cuts": cuts,
    "learned": lambda: training.Learned(X[:1], sec.Macs(0.5), steps=20, strength=1e-3),
    "masks": lambda: training.Masks(training.RigL(0.8, every=3, end=50)),
}


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", WHATS)
def test_a_plain_loop(kind):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    pruning = training.Pruning(WHATS[kind]())
    pruning.begin(model, optimizer)
    train(model, optimizer, pruning, 30, scheduler=scheduler)
    log = pruning.log()
    pruning.finish()
    if kind == "masks":
        assert log["sparsity"] == pytest.approx(0.8, abs=0.02)
        assert float((model[0].weight == 0).float().mean()) > 0.5
    else:
        assert log["macs_part"] <= 0.5
        assert sec.macs(model, X[:1]) == log["macs"] <= 0.5 * sec.macs(net(), X[:1])
        moments = optimizer.state[model[0].weight]["exp_avg"]
        assert moments.shape == model[0].weight.shape
        assert moments.ne(0).any()
    before = pruning.steps
    optimizer.step()
    assert pruning.steps == before


@pytest.mark.parametrize("kind", WHATS)
def test_a_loop_that_is_begun_twice_counts_once(kind):
    found = {}
    for times in (1, 2):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        pruning = training.Pruning(WHATS[kind]())
        for _ in range(times):
            pruning.begin(model, optimizer)
        train(model, optimizer, pruning, 12)
        assert pruning.steps == 12
        found[times] = state(model)
    assert all(torch.equal(found[1][name], found[2][name]) for name in found[1])


@pytest.mark.parametrize("kind", WHATS)
@pytest.mark.parametrize("stop", represented((3, 6, 25), by=(6,)))
def test_going_on_bit_for_bit(kind, stop, tmp_path):
    whole = net()
    optimizer = torch.optim.AdamW(whole.parameters(), 1e-2)
    pruning = training.Pruning(WHATS[kind]())
    pruning.begin(whole, optimizer)
    train(whole, optimizer, pruning, stop)
    kept = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    pruning.save(tmp_path / "state")
    train(whole, optimizer, pruning, 30, first=stop)

    again, other = net(seed=9), training.Pruning(WHATS[kind]())
    other.resume(again, tmp_path / "state")
    again.load_state_dict(kept[0])
    fresh = torch.optim.AdamW(again.parameters(), 1e-2)
    fresh.load_state_dict(kept[1])
    other.begin(again, fresh)
    train(again, fresh, other, 30, first=stop)
    ours, theirs = state(whole), state(again)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert other.log() == pruning.log()


@pytest.mark.parametrize("average", represented(("timm", "torch"), by=("timm",)))
def test_averages_of_weights_are_cut_along(average):
    from timm.utils import ModelEmaV3

    model = net()
    ema = ModelEmaV3(model, decay=0.5) if average == "timm" else AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    pruning = training.Pruning(cuts())
    pruning.begin(model, optimizer, copies=(ema,))
    train(model, optimizer, pruning, 10, ema=ema)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: tuple(p.shape) for name, p in ema.module.named_parameters()
    }
    assert ema.module.eval()(X).shape == (64, 3)


def refuses_averages(ema, message, kind):
    model = ema.module
    other = copy.deepcopy(model)
    optimizer, before = torch.optim.SGD(other.parameters(), 1e-2), state(other)
    with pytest.raises(sec.TrainingError, match=message):
        training.Pruning(WHATS[kind]()).begin(other, optimizer)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize("average", represented(("timm", "torch"), by=("torch",)))
def test_averages_that_nobody_told_of_are_refused(average):
    from timm.utils import ModelEmaV3

    ema = ModelEmaV3(net()) if average == "timm" else AveragedModel(net())
    refuses_averages(ema, f"{type(ema).__name__} of Sequential would be left behind", "cuts")
    refuses_averages(ema, "make it after `begin`", "masks")
    del ema
    other = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    keeps = AveragedModel(other)  # of a model unlike the one that is cut
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    pruning = training.Pruning(cuts())
    pruning.begin(model, optimizer)
    late = AveragedModel(model)
    with pytest.raises(sec.TrainingError, match="left behind"):
        train(model, optimizer, pruning, 4)
    assert model[0].out_features == late.module[0].out_features == 24
    pruning.begin(model, optimizer, copies=[late])
    train(model, optimizer, pruning, 8, ema=late)
    assert model[0].out_features == late.module[0].out_features == 12
    assert keeps.module[0].out_features == 20


def test_an_average_of_masked_weights_has_the_masks():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-1)
    pruning = training.Pruning(WHATS["masks"]())
    pruning.begin(model, optimizer)
    ema = AveragedModel(model)
    train(model, optimizer, pruning, 10, ema=ema)
    assert torch.equal(ema.module[0].weight_mask, model[0].weight_mask)
    assert torch.equal(ema.module[1].running_mean, model[1].running_mean)
    ema.module.eval()(X)
    there = ema.module[0].weight != 0
    assert there.any()
    assert not bool((there & (model[0].weight_mask == 0)).any())


def test_a_copy_that_cannot_be_cut_leaves_all_as_it_was():
    model = net()
    other = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    pruning = training.Pruning(cuts(every=1))
    pruning.begin(model, optimizer, copies=(other,))
    F.mse_loss(model(X), Y).backward()
    optimizer.step()
    before, moment = state(model), optimizer.state[model[0].weight]["momentum_buffer"].clone()
    with pytest.raises(sec.SecateurError):
        pruning.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], moment)


def stepped(how, kind="cuts", compiled=False):
    """A model after some steps, each of them taken by `how(model, optimizer, x, y)`."""
    inner = net()
    inner[1] = nn.Identity()  # the same for parts of a batch as for all of it
    model = torch.compile(inner, backend="eager") if compiled else inner
    optimizer = torch.optim.SGD(model.parameters(), 1e-1, momentum=0.9)
    pruning = training.Pruning(WHATS[kind]())
    pruning.begin(model, optimizer)
    for i in range(22 if kind == "learned" else 10):
        optimizer.zero_grad()
        how(model, optimizer, X + 0.01 * i, Y)
        pruning.step()
    pruning.finish()
    return inner


def plainly(model, optimizer, x, y):
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def in_parts(model, optimizer, x, y):
    for part, wanted in zip(x.split(16), y.split(16), strict=True):
        (F.mse_loss(model(part), wanted) / 4).backward()
    optimizer.step()


def in_bfloat16(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(x).float(), y)
    loss.backward()
    optimizer.step()


def scaled(model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(F.mse_loss(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()


def far_apart(a, b):
    """How far the weights of two models of one size are apart, as a part of their size."""
    pairs = list(zip(a.parameters(), b.parameters(), strict=True))
    assert [p.shape for p, _ in pairs] == [q.shape for _, q in pairs]
    return max(float((p - q).norm() / q.norm()) for p, q in pairs)


@pytest.mark.parametrize("kind", WHATS)
@pytest.mark.parametrize("how", represented((in_parts, scaled), by=(in_parts,)))
def test_accumulated_and_scaled_gradients_prune_the_same(kind, how):
    assert far_apart(stepped(how, kind), stepped(plainly, kind)) < 1e-4


@pytest.mark.parametrize("kind", WHATS)
def test_a_compiled_model_in_mixed_precision(kind):
    model, plain = stepped(in_bfloat16, kind, compiled=True), stepped(in_bfloat16, kind)
    if kind == "cuts":
        assert model[0].out_features == 12
        assert 1e-5 < far_apart(plain, stepped(plainly)) < 0.1
    assert far_apart(model, plain) < 1e-5


def test_the_floor():
    pruning = training.Pruning(cuts(), floor=training.Floor("accuracy", 0.9))
    assert pruning.stops({"accuracy": 0.89})
    assert pruning.stops({"accuracy": float("nan")})
    assert not pruning.stops({"accuracy": 0.9, "loss": 0.1})
    assert not pruning.stops({})
    pruning.finish()


@pytest.mark.parametrize("loop", [*WHATS, "penalty", "sparse training"])
def test_a_loss_that_is_no_number_at_the_first_step_changes_nothing(loop):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if loop == "penalty":
        sec.Penalty(sec.trace(model, X[:1])).attach(model, optimizer)
    elif loop == "sparse training":
        training.SparseTraining(model, optimizer, training.GMP(0.5, end=10))
    else:
        training.Pruning(WHATS[loop]()).begin(model, optimizer)
    (F.mse_loss(model(X), Y) * float("nan")).backward()
    before = state(model)
    with pytest.raises(sec.TrainingError, match="NaN or infinity before the first step: the loss was no number"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_a_floor_of_a_metric_that_never_comes_is_said():
    pruning = training.Pruning(cuts(), floor=training.Floor("acuracy", 0.9))
    assert not pruning.stops({"accuracy": 0.1, "loss": 2.0})
    with pytest.warns(sec.SecateurWarning, match="ever called 'acuracy'.*there were accuracy, loss"):
        pruning.finish()


def test_bad_input(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    before = state(model)
    with pytest.raises(sec.TrainingError, match="what is Cuts"):
        training.Pruning("cuts")
    with pytest.raises(sec.TrainingError, match="from 1 on"):
        cuts(every=0)
    with pytest.raises(sec.TrainingError, match="begin"):
        training.Pruning(cuts()).step()
    with pytest.raises(sec.TrainingError, match="none of the parameters of Sequential"):
        training.Pruning(cuts()).begin(model, torch.optim.SGD(net().parameters(), 1e-2))
    with pytest.raises(sec.TrainingError, match="is a number"):
        training.Floor("accuracy", float("nan"))
    with pytest.raises(sec.TrainingError, match="no state of a Pruning"):
        training.Pruning(cuts()).resume(model, {})
    for kind, make in WHATS.items():
        for work in ({}, 3, {"done": "x"}, {"step": 1, "chance": X, "scores": {}, "kept": {}}):
            with pytest.raises(sec.TrainingError, match="no state of"):
                training.Pruning(make()).resume(model, {"steps": 3, "plan": "", "work": work})
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), kind
        assert not sec.prune.is_pruned(model)
    with pytest.raises(sec.PlanError):
        training.Pruning(cuts()).resume(model, {"steps": 3, "plan": "[1]", "work": {}})
    (tmp_path / "bad").write_bytes(b"nonsense")
    with pytest.raises(sec.FileError, match="bad"):
        training.Pruning(cuts()).resume(model, tmp_path / "bad")
    with pytest.raises(sec.PlanError):
        training.Pruning(training.Cuts(X[:1], sec.Macs(1e-9), every=3)).begin(model, optimizer)
    done = training.Pruning(cuts())
    done.begin(model, optimizer)
    done.finish()
    later = training.Pruning(cuts())
    later.begin(model, optimizer)
    with pytest.raises(sec.TrainingError, match="cut further when this was saved"):
        later.load_state_dict({"steps": 5, "plan": "{}", "work": {}})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_data_from_a_loader():
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    model = net()
    teacher = copy.deepcopy(model).eval()
    sec.apply(model, sec.plan(sec.trace(model, X[:1]), sec.Ratio(0.5)))
    found = sec.recover(model, teacher, loader, minutes=5, steps=40)
    assert found.after < found.before
