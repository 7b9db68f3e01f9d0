"""Whatever goes wrong wherever: everything that can be reached is object for object as it was."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur import ao
from secateur.schedule import linear
from secateur.state.transaction import Transaction, transaction, untouched
from state.reachable import reachable
from state.state_models import Frozen, Odd, trained

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
ROOT = str(Path(inspect.getfile(sec)).parent)


class Planted(BaseException):
    """Not an Exception, as an interrupt is not."""


@contextmanager
def fault(at: int) -> Iterator[list[int]]:
    """Raise at the `at`-th call of a function of the library, but not in what puts things back; counts the calls."""
    count = [0]

    def watch(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT) and not name.startswith(f"{ROOT}/state/"):
            count[0] += 1
            if count[0] == at:
                sys.setprofile(None)
                raise Planted

    sys.setprofile(watch)
    try:
        yield count
    finally:
        sys.setprofile(None)


def survives(made: Callable[[], tuple[Callable[[], Any], tuple[Any, ...]]], points: int) -> None:
    """Faults spread evenly over all calls of a job: each time, all that can be reached is as before."""
    made()[0]()  # what is done once only
    with fault(0) as count:
        run, _ = made()
        count[0] = 0
        run()
    run, roots = made()
    before, planted = reachable(*roots), 0
    # The last calls come when all is done: they close files and let other ranks go on.
    for at in range(1, count[0] - 4, max(1, count[0] // points)):
        try:
            with fault(at):
                run()
        except Planted:
            planted += 1
            assert reachable(*roots) == before, f"after {at} of {count[0]} calls"
        else:
            run, roots = made()
            before = reachable(*roots)
    assert planted > points * 0.8
    run()


def _traced(model: nn.Module, _: Any) -> Callable[[], Any]:
    return lambda: sec.trace(model, X)


def _applied(model: nn.Module, optimizer: Any) -> Callable[[], Any]:
    plan = sec.plan(sec.trace(model, X), sec.Ratio(0.5))
    return lambda: sec.apply(model, plan, optimizer=optimizer)


def _compressed(model: nn.Module, _: Any) -> Callable[[], Any]:
    return lambda: sec.compress(model, X, sec.Params(0.7), [torch.randn(16, 6)], timed=False)


def _iterated(model: nn.Module, _: Any) -> Callable[[], Any]:
    def fit(m: nn.Module) -> None:
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.add_(0.01)

    return lambda: sec.iterate(model, X, sec.Macs(0.6), fit=fit, evaluate=lambda m: 1.0, schedule=linear(1))


JOBS = {"trace": _traced, "apply": _applied, "compress": _compressed, "iterate": _iterated}
POINTS = {"trace": 6, "apply": 6, "compress": 3, "iterate": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {"frozen": Frozen, "odd": Odd}
SLOW = {("trace", "odd"), ("iterate", "odd"), ("apply", "frozen")}  # each job has another model, too


@pytest.mark.filterwarnings("ignore::secateur.SecateurWarning")  # a refit that does not help is no fault
@pytest.mark.parametrize(
    ("job", "model"),
    [
        pytest.param(job, model, marks=[pytest.mark.slow] if (job, model) in SLOW else [])
        for job in JOBS
        for model in MODELS
    ],
)
def test_a_fault_at_many_points(job: str, model: str) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        net = MODELS[model]()
        optimizer = trained(net, X)
        return JOBS[job](net, optimizer), (net, optimizer)

    survives(made, points=POINTS[job])


@pytest.mark.parametrize("model", MODELS)
def test_a_fault_while_loading(model: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = MODELS[model]()
    sec.save(sec.apply(small, sec.plan(sec.trace(small, X), sec.Ratio(0.5))), tmp_path / "file")

    def made() -> Any:
        net = MODELS[model]()
        return (lambda: sec.load(tmp_path / "file", net)), (net,)

    survives(made, points=12)


def test_a_fault_while_a_pruner_prunes() -> None:
    def made() -> Any:
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        pruner = ao.SaliencyPruner({})
        pruner.prepare(net, [{"tensor_fqn": f"{i}.weight", "sparsity_level": 0.5} for i in (0, 2)])
        pruner.enable_mask_update = True
        pruner.step()
        return (lambda: pruner.prune(example=X)), (net, vars(pruner))

    survives(made, points=10)


# the parts ------------------------------------------------------------------------------------------------------


def test_every_kind_of_change_is_undone() -> None:
    net = Odd()
    optimizer = trained(net, X)
    before = reachable(net, optimizer)
    with pytest.raises(Planted), transaction(net, optimizer) as undo:
        change(net, optimizer, undo)
    assert reachable(net, optimizer) == before


def change(net: Odd, optimizer: torch.optim.Optimizer, undo: Transaction) -> None:
    """Every kind of change, and a failure."""
    undo.keep(net.a.weight)
    with torch.no_grad():
        net.a.weight.fill_(7)
    net.b.weight.data = torch.zeros(1)
    net.b.bias.requires_grad_(False)
    net.a.bias.grad = torch.zeros(8)
    net.train(not net.training)
    net.__class__ = type("Other", (Odd,), {})
    nn.utils.parametrize.remove_parametrizations(net.out, "weight")
    nn.utils.parametrize.register_parametrization(net.a, "bias", nn.Identity())
    net.cache["seen"] = net.cache.pop("seen")
    net.cache["new"] = 1
    net.config.nested["widths"] = ()
    net.config.width = 3
    net.last.append(1)
    net.names.add("c")
    net.slots.count = 77
    net.aside[0].weight = nn.Parameter(torch.zeros(2, 2))
    net.aside.append(1)
    net.register_forward_hook(lambda *_: None)
    del net.norm
    optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.state.clear()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    raise Planted


def test_containers_that_refuse_are_put_back_too() -> None:
    net = Frozen()
    before = reachable(net)
    with untouched(net):
        OrderedDict.__setitem__(net.config, "width", 4)
        OrderedDict.move_to_end(net.config, "width")
        vars(net.config)["width"] = 5
    assert reachable(net) == before


def test_nothing_is_undone_when_all_goes_well() -> None:
    net = nn.Linear(2, 2)
    with transaction(net):
        net.bias = None
    assert net.bias is None


def test_one_can_go_back_again_and_again() -> None:
    net = nn.Linear(2, 2)
    net.weight.grad = torch.ones(2, 2)
    before = reachable(net)
    moment = Transaction(net)
    moment.keep_all()
    for _ in range(2):
        with torch.no_grad():
            net.weight.add_(1)
            net.weight.grad.add_(1)
        net.half()
        moment.roll_back()
        assert reachable(net) == before


def test_values_may_be_made_again_instead_of_kept() -> None:
    net = nn.Linear(2, 2)
    value = net.weight.detach().clone()
    with untouched(net) as undo:
        undo.keep(net.weight, again=lambda: value)
        nn.init.zeros_(net.weight)
    assert torch.equal(net.weight, value)


def test_a_tensor_whose_positions_share_memory() -> None:
    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(1).expand(3))

    net = Expanded()
    with untouched(net) as undo:
        undo.keep_all()
        net.table = torch.zeros(3)
    assert net.table.tolist() == [1, 1, 1]


def test_what_cannot_be_put_back_is_said() -> None:
    class Stubborn:
        __slots__ = ("_value",)

    net = nn.Linear(1, 1)
    net.held = Stubborn()
    net.held._value = 1
    made = Transaction(net)
    made._slots[0] = (object(), *made._slots[0][1:])
    with pytest.warns(sec.SecateurWarning, match="1 things could not be put back: a object"):
        made.roll_back()


def test_a_callback_comes_first_and_may_fail() -> None:
    net, calls = nn.Linear(1, 1), list[Tensor | None]()

    def callback() -> None:
        calls.append(net.bias)
        raise RuntimeError

    with untouched(net) as undo:
        undo.before_roll_back(callback)
        net.bias = None
    assert calls == [None]
    assert net.bias is not None
