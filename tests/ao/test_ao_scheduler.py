import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import pruning as original

from secateur import ao
from secateur.errors import SecateurError


def prepared(package: Any = ao, levels: tuple[float, ...] = (0.8, 0.4)) -> Any:
    sparsifier = package.WeightNormSparsifier()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in levels))
    sparsifier.prepare(model, [{"tensor_fqn": f"{i}.weight", "sparsity_level": s} for i, s in enumerate(levels)])
    return sparsifier


def levels(sparsifier: Any) -> list[float]:
    return [group["sparsity_level"] for group in sparsifier.groups]


CUBIC: list[dict[str, Any]] = [
    {},
    {"delta_t": 2, "total_t": 5},
    {"init_sl": 0.1, "init_t": 3, "delta_t": 2, "total_t": 5, "initially_zero": True},
    {
        "init_sl": [0.1, 0.2],
        "init_t": [3, 1],
        "delta_t": [1, 2],
        "total_t": [4, 2],
        "initially_zero": [True, False],
    },
    {"init_sl": 0.1, "init_t": 3, "last_epoch": 4, "delta_t": 1, "total_t": 10},
]


@pytest.mark.parametrize("options", CUBIC)
def test_cubic_goes_through_the_levels_of_the_original(options: dict[str, Any]) -> None:
    ours, theirs = prepared(ao), prepared(original)
    schedulers = ao.CubicSL(ours, **options), original.CubicSL(theirs, **options)
    for _ in range(15):
        assert levels(ours) == levels(theirs)
        assert schedulers[0].get_last_sl() == levels(ours)
        for sparsifier, scheduler in zip((ours, theirs), schedulers, strict=True):
            sparsifier.step()
            scheduler.step()


def test_cubic_falls_as_well_as_rises() -> None:
    sparsifier = prepared(levels=(0.2,))
    scheduler = ao.CubicSL(sparsifier, init_sl=0.9, delta_t=1, total_t=2)
    seen = levels(sparsifier)
    for _ in range(3):
        sparsifier.step()
        scheduler.step()
        seen += levels(sparsifier)
    assert seen == pytest.approx([0.9, 0.2 + 0.7 / 8, 0.2, 0.2])


@pytest.mark.parametrize("functions", [lambda e: 0.9**e, [lambda e: e / 4, lambda e: 1.0]])
def test_lambda_goes_through_the_levels_of_the_original(functions: Any) -> None:
    ours, theirs = prepared(ao), prepared(original)
    schedulers = ao.LambdaSL(ours, functions), original.LambdaSL(theirs, functions)
    for _ in range(4):
        assert levels(ours) == levels(theirs)
        for sparsifier, scheduler in zip((ours, theirs), schedulers, strict=True):
            sparsifier.step()
            scheduler.step()


PRUNERS = [
    (ao.WeightNormSparsifier(0.5), nn.Linear(8, 8)),
    (ao.SaliencyPruner({"sparsity_level": 0.5}), nn.Conv2d(2, 8, 1)),
    (ao.FPGMPruner(0.5), nn.Conv1d(2, 8, 1)),
    (ao.LSTMSaliencyPruner({"sparsity_level": 0.5}, coherent=True), nn.LSTM(2, 8)),
    (ao.GRUSaliencyPruner({"sparsity_level": 0.5}, coherent=True), nn.GRU(2, 8)),
]


@pytest.mark.parametrize(("sparsifier", "layer"), PRUNERS, ids=[type(p).__name__ for p, _ in PRUNERS])
def test_every_sparsifier_can_be_driven(sparsifier: ao.BaseSparsifier, layer: nn.Module) -> None:
    sparsifier, model = copy.deepcopy(sparsifier), nn.Sequential(copy.deepcopy(layer))
    sparsifier.prepare(model)
    scheduler = ao.CubicSL(sparsifier, delta_t=1, total_t=3)
    fractions = []
    for _ in range(4):
        sparsifier.step()
        fractions.append(sparsifier.state_dict()["state"][sparsifier.groups[0]["tensor_fqn"]]["mask"].float().mean())
        scheduler.step()
    assert fractions[0] == 1
    assert fractions[-1] == 0.5
    assert fractions == sorted(fractions, reverse=True)


def test_stepping_turns_mask_updates_on() -> None:
    sparsifier = prepared()
    sparsifier.enable_mask_update = False
    ao.LambdaSL(sparsifier, lambda e: 1.0)
    assert sparsifier.enable_mask_update


def test_order_of_steps_is_watched() -> None:
    scheduler = ao.LambdaSL(prepared(), lambda e: 1.0)
    with pytest.warns(UserWarning, match="before sparsifier.step"):
        scheduler.step()
    sparsifier = prepared()
    scheduler = ao.LambdaSL(sparsifier, lambda e: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            sparsifier.step()
            scheduler.step()
    sparsifier = prepared()
    scheduler = ao.LambdaSL(sparsifier, lambda e: 1.0)
    sparsifier.step = lambda: None
    with pytest.warns(UserWarning, match="replaced"):
        scheduler.step()


def test_a_sparsifier_with_a_step_of_its_own_is_not_suspected() -> None:
    class Own(ao.WeightNormSparsifier):
        def step(self, use_path: bool = True) -> None:
            pass

    sparsifier = Own()
    sparsifier.prepare(nn.Sequential(nn.Linear(2, 2)))
    scheduler = ao.LambdaSL(sparsifier, lambda e: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsifier.step()
        scheduler.step()


def test_get_sl_is_for_step() -> None:
    scheduler = ao.LambdaSL(prepared(), lambda e: 1.0)
    with pytest.warns(UserWarning, match="get_last_sl"):
        scheduler.get_sl()
    with pytest.raises(NotImplementedError, match="get_sl") as caught:
        ao.BaseScheduler(prepared())
    assert isinstance(caught.value, SecateurError)


def test_state_is_restored(capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> tuple[Any, Any]:
        sparsifier = prepared()
        return sparsifier, ao.CubicSL(sparsifier, delta_t=1, total_t=5)

    (first, running), (second, resumed) = make(), make()
    for _ in range(3):
        first.step()
        running.step()
    state = running.state_dict()
    assert "sparsifier" not in state
    assert {"base_sl", "last_epoch", "_step_count", "verbose"} <= state.keys()
    resumed.load_state_dict(copy.deepcopy(state))
    assert resumed.sparsifier is second
    for sparsifier, scheduler in ((first, running), (second, resumed)):
        sparsifier.step()
        scheduler.step()
    assert levels(first) == levels(second)
    assert capsys.readouterr().out == ""


def test_loading_shares_no_list() -> None:
    running, resumed = (ao.LambdaSL(prepared(), lambda e: 1.0) for _ in range(2))
    resumed.load_state_dict(running.state_dict())
    running.base_sl[0] = 7
    assert resumed.base_sl == [0.8, 0.4]


def test_verbose_prints_as_the_original(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for package in (ao, original):
        sparsifier = prepared(package)
        scheduler = package.LambdaSL(sparsifier, lambda e: 0.5, verbose=True)
        sparsifier.step()
        scheduler.step(epoch=3)
        texts.append(capsys.readouterr().out + repr(scheduler))
    assert texts[0] == texts[1]


def test_a_deep_copy_drives_its_own_sparsifier() -> None:
    sparsifier = prepared()
    scheduler = ao.CubicSL(sparsifier, delta_t=1, total_t=2)
    twin = copy.deepcopy(scheduler)
    twin.sparsifier.step()
    twin.step()
    assert levels(sparsifier) == [0.0, 0.0]
    assert levels(twin.sparsifier) == pytest.approx([0.7, 0.35])


def test_a_step_that_fails_is_not_counted() -> None:
    def late(epoch: int) -> float:
        if epoch == 1:
            raise ZeroDivisionError
        return 1.0

    sparsifier = prepared()
    scheduler = ao.LambdaSL(sparsifier, late)
    sparsifier.step()
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    assert (scheduler.last_epoch, scheduler._step_count, scheduler._get_sl_called_within_step) == (
        0,
        1,
        False,
    )


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: ao.LambdaSL(object(), lambda e: 1.0), TypeError),
        (lambda: ao.CubicSL(nn.Linear(2, 2)), TypeError),
        (lambda: ao.LambdaSL(prepared(), [lambda e: 1.0]), ValueError),
        (lambda: ao.CubicSL(prepared(), init_sl=[0.0] * 3), ValueError),
        (lambda: ao.CubicSL(prepared(), total_t=0), ValueError),
        (lambda: ao.LambdaSL(prepared(), lambda e: 1.0).load_state_dict([]), TypeError),
        (lambda: ao.LambdaSL(prepared(), lambda e: 1.0).load_state_dict({"base_sl": [1.0]}), RuntimeError),
    ],
)
def test_bad_input(call: Any, kind: type) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, SecateurError)


def test_a_group_without_a_level_and_a_group_too_many() -> None:
    sparsifier = ao.NearlyDiagonalSparsifier()
    sparsifier.prepare(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(KeyError, match=r"0\.weight: has no 'sparsity_level'") as caught:
        ao.LambdaSL(sparsifier, lambda e: 1.0)
    assert isinstance(caught.value, SecateurError)

    sparsifier = prepared(levels=(0.8,))
    scheduler = ao.LambdaSL(sparsifier, lambda e: 1.0)
    sparsifier.prepare(nn.ModuleDict({"more": nn.Linear(2, 2)}))
    sparsifier.step()
    with pytest.raises(RuntimeError, match="1 levels for 2 groups"):
        scheduler.step()


def test_levels_reach_the_masks() -> None:
    sparsifier = prepared(levels=(0.5,))
    scheduler = ao.LambdaSL(sparsifier, lambda epoch: float(epoch))
    sparsifier.step()
    assert torch.equal(sparsifier.state["0.weight"]["mask"], torch.ones(8, 8))
    scheduler.step()
    sparsifier.step()
    assert sparsifier.state["0.weight"]["mask"].mean() == 0.5
