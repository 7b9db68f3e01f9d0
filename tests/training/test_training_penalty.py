"""Penalties under which positions become zero: the groups, the target, and that the cut then changes nothing."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sec
from secateur import training
from secateur.training.groups import Groups


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.b = nn.Conv2d(12, 8, 3, padding=1)

    def forward(self, x):
        return x + self.b(F.relu(self.norm(self.a(x))))


def convolutions():
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(nn.Conv2d(2, 8, 3), Block(), Block(), head), torch.randn(16, 2, 8, 8)


def language():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=20, num_key_value_heads=2, use_cache=False, **sizes)
    return LlamaForCausalLM(config), torch.randint(0, 20, (4, 8))


def output(model, x):
    found = model(x)
    return getattr(found, "logits", found)


def train(model, x, penalty, steps, optimizer=None, first=0):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2) if optimizer is None else optimizer
    torch.manual_seed(1)
    wanted = torch.randn_like(output(model, x))
    for _ in range(first, steps):
        optimizer.zero_grad()
        (F.mse_loss(output(model, x), wanted) + penalty(model)).backward()
        optimizer.step()
        penalty.step(model)
    return optimizer


@pytest.mark.parametrize("make", [convolutions, language])
def test_a_group_is_all_that_a_cut_of_its_position_takes(make):
    """Surgery knows nothing of groups: cut one position, and see what is missing."""
    model, x = make()
    graph = sec.trace(model, x)
    groups = Groups(graph, graph.axes)
    squares = groups.squares({name: p.detach() for name, p in model.named_parameters()})
    parameters = dict(model.named_parameters())

    def energy(net):
        return sum(float(p.detach().double().square().sum()) for p in net.parameters())

    checked = 0
    for axis in graph.axes:
        kept = axis.size - 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sec.SecateurWarning)  # sizes that others depend on
            plan = sec.plan(graph, sec.Ratio({axis.name: 1 / axis.size}))
        if [(a.name, len(a.keep)) for a in plan.axes] != [(axis.name, kept)]:
            continue  # sizes that are tied to others go with them
        (gone,) = set(range(axis.size)) - set(plan.axes[0].keep)
        small = copy.deepcopy(model)
        sec.apply(small, plan, verify=False)
        assert float(squares[axis][gone]) == pytest.approx(energy(model) - energy(small), rel=1e-3)
        missing = sum(p.numel() for p in parameters.values()) - sum(p.numel() for p in small.parameters())
        assert int(groups.sizes[axis][gone]) == missing
        checked += 1
    assert checked >= 2


METHODS = [
    training.GroupLasso(),
    training.GReg(grow=1.0),
    training.HalfSpace(epsilon=0.1),
    training.Polarization(),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_the_target_is_met_and_the_cut_changes_nothing(method):
    model, x = convolutions()
    graph = sec.trace(model, x)
    penalty = sec.Penalty(graph, method, strength=1e-3, target=sec.Macs(0.6), steps=60)
    train(model, x, penalty, 60)
    assert penalty.macs() <= 0.6 * graph.macs()
    model.eval()
    with torch.no_grad():
        before = output(model, x)
        sec.apply(model, sec.plan(sec.trace(model, x), sec.Zeros()))
        after = output(model, x)
    assert sec.macs(model, x) == penalty.macs()
    assert torch.allclose(before, after, atol=1e-5)


def test_heads_and_hidden_units_of_a_language_model():
    model, x = language()
    graph = sec.trace(model, x)
    penalty = sec.Penalty(graph, strength=1e-3, target=sec.Macs(0.8), steps=40)
    train(model, x, penalty, 40)
    with torch.no_grad():
        before = output(model.eval(), x)
        sec.apply(model, sec.plan(sec.trace(model, x), sec.Zeros()))
        assert torch.allclose(before, output(model, x), atol=1e-5)
    assert sec.macs(model, x) <= 0.8 * graph.macs()


def test_what_is_set_to_zero_was_small_already():
    """The strength follows: what goes has lost most of its weight before it is set to zero."""
    shares = {}
    for strength in (1e-9, 3e-3):
        model, x = convolutions()
        penalty = sec.Penalty(sec.trace(model, x), strength=strength, target=sec.Macs(0.6), steps=100)
        taken = []
        zero = penalty._reach

        def noted(parameters, stage, zero=zero, penalty=penalty, taken=taken):
            before = {axis: dead.clone() for axis, dead in penalty._dead.items()}
            squares = penalty._groups.squares({name: p.detach() for name, p in parameters.items()})
            zero(parameters, stage)
            new = {axis: dead & ~before[axis] for axis, dead in penalty._dead.items()}
            taken.append(sum(float(squares[axis][gone].sum()) for axis, gone in new.items()))

        penalty._reach = noted
        train(model, x, penalty, 100)
        shares[strength] = sum(taken)
    assert penalty.strength == 0.0
    assert shares[3e-3] < 0.5 * shares[1e-9]


def test_a_state_goes_on_where_it_was():
    model, x = convolutions()
    penalty = sec.Penalty(sec.trace(model, x), strength=1e-3, target=sec.Macs(0.6), steps=60)
    optimizer = train(model, x, penalty, 30)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), penalty.state_dict()))
    train(model, x, penalty, 60, optimizer, first=30)

    other, _ = convolutions()
    again = sec.Penalty(sec.trace(other, x), strength=1e-3, target=sec.Macs(0.6), steps=60)
    fresh = torch.optim.AdamW(other.parameters(), 1e-2)
    for thing, held in zip((other, fresh, again), state, strict=True):
        thing.load_state_dict(held)
    train(other, x, again, 60, fresh, first=30)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert again.zeros == penalty.zeros


def test_attached_it_does_the_same():
    model, x = convolutions()
    other = copy.deepcopy(model)
    penalty, attached = (
        sec.Penalty(sec.trace(net, x), strength=1e-3, target=sec.Macs(0.6), steps=20) for net in (model, other)
    )
    train(model, x, penalty, 20)
    optimizer = torch.optim.AdamW(other.parameters(), 1e-2)
    end = attached.attach(other, optimizer)
    torch.manual_seed(1)
    wanted = torch.randn_like(output(other, x))
    for _ in range(20):
        optimizer.zero_grad()
        F.mse_loss(output(other, x), wanted).backward()
        optimizer.step()
    end()
    assert attached.zeros == penalty.zeros
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    optimizer.step()
    assert attached._step == 20


def test_growing_regularization_by_hand():
    """Four groups of four weights of 1, 2, 3 and 4: two have to go, and what pulls them grows with every step."""
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    sizes = torch.tensor([3.0, 1.0, 4.0, 2.0])
    with torch.no_grad():
        net[0].weight.copy_(sizes[:, None].expand(4, 2))
        net[0].bias.copy_(sizes)
        net[2].weight.copy_(sizes[None])
    graph = sec.trace(net, torch.zeros(1, 2))
    penalty = sec.Penalty(graph, training.GReg(grow=0.1), strength=0.5, target=sec.Macs(0.5), steps=20)
    assert penalty(net).item() == 0
    for _ in range(3):
        penalty.step(net)
    assert penalty(net).item() == pytest.approx(0.5 * 0.5 * (0.1 * 3) * 4 * (1 + 4))
    penalty(net).backward()
    pull = torch.tensor([0.0, 1.0, 0.0, 2.0])
    assert torch.allclose(net[0].weight.grad, 0.5 * 0.1 * 3 * pull[:, None].expand(4, 2))


def test_polarization_by_hand():
    """Scales below the mean are drawn to zero, those above it away; nothing else of the model is touched."""
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([0.1, 0.9, -0.2, 1.2]))
    penalty = sec.Penalty(sec.trace(net, torch.zeros(2, 2)), training.Polarization(t=0.5), strength=2.0)
    value = penalty(net)
    value.backward()
    assert value.item() == pytest.approx(2 * (0.5 * 2.4 - (0.5 + 0.3 + 0.4 + 0.6)))
    assert torch.allclose(net[1].weight.grad, 2 * torch.tensor([1.5, -0.5, -1.5, -0.5]))
    assert all(p.grad is None or not p.grad.any() for name, p in net.named_parameters() if name != "1.weight")


@pytest.mark.parametrize(("epsilon", "gone"), [(0.0, [0]), (0.1, [0, 1])])
def test_groups_that_a_step_turns_out_of_their_half_space_are_zero_for_good(epsilon, gone):
    """By hand: the first group is turned round, the second shrinks to a twentieth, the third to a half."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
    penalty = sec.Penalty(sec.trace(net, torch.zeros(1, 2)), training.HalfSpace(epsilon))
    penalty(net)
    factors = torch.tensor([-1.0, 0.05, 0.5])
    with torch.no_grad():
        net[0].weight *= factors[:, None]
        net[0].bias *= factors
        net[2].weight *= factors
    penalty.step(net)
    wanted = factors.index_fill(0, torch.tensor(gone), 0.0)
    assert torch.equal(net[0].weight, wanted[:, None].expand(3, 2))
    assert torch.equal(net[0].bias, wanted)
    assert torch.equal(net[2].weight, wanted[None])
    with torch.no_grad():
        net[0].weight[gone] = 1.0  # as an optimizer with momentum would
    penalty.step(net)
    assert torch.equal(net[0].weight, wanted[:, None].expand(3, 2))


def test_rounds_of_iterate_that_learn_what_they_cut():
    """Each round's way of cutting is a penalty until its target is met, then a cut that changes nothing."""
    model, x = convolutions()
    whole, changes = sec.macs(model, x), []

    def learned(model, example, target):
        train(model, example, sec.Penalty(sec.trace(model, example), strength=1e-3, target=target, steps=30), 30)
        model.eval()
        with torch.no_grad():
            before = output(model, example)
            sec.apply(model, sec.plan(sec.trace(model, example), sec.Zeros()))
            changes.append(float((output(model, example) - before).abs().max()))

    found = sec.iterate(
        model,
        x,
        sec.Macs(0.6),
        cut=learned,
        fit=lambda model: None,
        evaluate=lambda model: float(-output(model, x).detach().abs().mean()),
        schedule=sec.schedule.linear(2),
    )
    assert len(changes) == 2
    assert max(changes) < 1e-5
    assert whole > found.rounds[1].macs > found.rounds[2].macs == sec.macs(model, x)
    assert sec.macs(model, x) <= 0.6 * whole


def test_one_step_by_hand():
    """SGD on nothing but a group lasso: each group of four 1s has length 2, so each weight loses rate · √4 / 2."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
    penalty = sec.Penalty(sec.trace(net, torch.zeros(1, 2)), strength=0.5)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    value = penalty(net)
    value.backward()
    optimizer.step()
    assert value.item() == pytest.approx(0.5 * 2 * 2 * 2)
    assert torch.allclose(net[0].weight, torch.full((2, 2), 1 - 0.1 * 0.5 * 2 * 1 / 2))


def test_bad_input():
    model, x = convolutions()
    graph = sec.trace(model, x)
    before = copy.deepcopy(model.state_dict())
    for bad, match in [
        ({"strength": 0}, "strength is a number above 0"),
        ({"strength": math.nan}, "strength is a number above 0"),
        ({"target": sec.Macs(0.5)}, "give both"),
        ({"steps": 100}, "give both"),
        ({"target": sec.Macs(0.5), "steps": 3}, "from 20 on"),
        ({"method": training.GReg()}, "give target= and steps="),
        ({"method": "lasso"}, "method is GroupLasso"),
        ({"only": "nonsense"}, "no axis goes by 'nonsense'"),
        ({"protect": "*"}, "no axis is left"),
    ]:
        with pytest.raises(sec.TrainingError, match=match):
            sec.Penalty(graph, **bad)
    with pytest.raises(sec.TrainingError, match="graph is a Graph"):
        sec.Penalty(model)
    plain = sec.trace(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.zeros(1, 2))
    with pytest.raises(sec.TrainingError, match="with a batch norm"):
        sec.Penalty(plain, training.Polarization())
    with pytest.raises(sec.TrainingError, match="trace it anew"):
        sec.Penalty(graph)(nn.Linear(2, 2))
    for p in (math.nan, math.inf):
        sick = copy.deepcopy(model)
        with torch.no_grad():
            sick[1].a.weight[0, 0, 0, 0] = p
        with pytest.raises(sec.TrainingError, match="its weights are"):
            sec.Penalty(sec.trace(sick, x))(sick)
    with pytest.raises(sec.TrainingError, match="does not have"):
        sec.Penalty(graph).attach(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    with pytest.raises(sec.TrainingError, match="no state of a penalty"):
        sec.Penalty(graph).load_state_dict({})
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


class Aside(nn.Module):
    """One layer's output is used by nobody."""

    def __init__(self):
        super().__init__()
        self.a, self.side, self.b = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(8, 2)

    def forward(self, x):
        x = self.a(x).relu()
        self.side(x)
        return self.b(x)


def test_an_axis_that_cannot_be_zero_is_refused_with_the_reason():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    graph = sec.trace(net, torch.zeros(1, 4))
    with pytest.raises(sec.TrainingError, match="0 features cannot be learnt to be zero: it is not exact"):
        sec.Penalty(graph, only="0 features")
    with pytest.raises(sec.TrainingError, match="side features cannot be learnt to be zero: no weight reads it"):
        sec.Penalty(sec.trace(Aside(), torch.zeros(1, 4)), only="side features")
    assert list(sec.Penalty(sec.trace(Aside(), torch.zeros(1, 4))).zeros) == ["a features"]
    summed = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    sec.Penalty(sec.trace(summed, torch.zeros(1, 4)))  # a sigmoid of zero is not zero, but what reads it can be
