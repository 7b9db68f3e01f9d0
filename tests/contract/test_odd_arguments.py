"""Whatever is passed to a public name: it works, or a SecateurError names the argument, and the model is as it was."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from contract import odd_arguments
from contract.odd_arguments import CALLS, LONG, ODD, OWN_ERRORS, QUICK, RESULTS, Call
from secateur import schedule, training
from state.reachable import reachable


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(odd_arguments, "FOLDER", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_public_name_is_here() -> None:
    public = {*sec.__all__, *(f"training.{n}" for n in training.__all__), *(f"schedule.{n}" for n in schedule.__all__)}
    called = {*CALLS, *(f"{home}.{name}" for name in CALLS for home in ("training", "schedule"))}
    rest = public - called - RESULTS
    assert {name for name in rest if not _plain(name)} == set()


def _plain(name: str) -> bool:
    """Whether a name is a module, an error, or takes no arguments."""
    found: Any = sec
    for part in name.split("."):
        found = getattr(found, part)
    if inspect.ismodule(found) or (isinstance(found, type) and issubclass(found, Exception | Warning)):
        return True
    return not inspect.signature(found).parameters


@pytest.mark.parametrize("name", CALLS)
def test_every_parameter_is_here(name: str) -> None:
    call = CALLS[name]
    assert name == "Sum" or set(inspect.signature(call.function).parameters) - {"options"} <= set(call.names())


def _odd(call: Call, parameter: str, value: Any) -> None:
    given = call.make()
    models = [each for each in given.values() if isinstance(each, nn.Module)]
    models += [each.model for each in given.values() if isinstance(each, sec.Graph)]
    before, raised = reachable(*models), None
    try:
        call.use(call.function(**{**given, parameter: value}))
    except Exception as error:
        raised = error
    if raised is not None:
        assert _says(raised, parameter, value), repr(raised)
        assert reachable(*models) == before


def _says(error: Exception, parameter: str, value: Any) -> bool:
    """Whether an error is one of ours and names the argument, or a file; or is of a function of the user's."""
    if not isinstance(error, sec.SecateurError):
        return parameter in OWN_ERRORS and callable(value)
    stem = parameter.removesuffix("es").removesuffix("s").split("_")[0]
    its_own = isinstance(value, nn.Module) and type(value).__name__ in str(error)  # that it cannot be run, say
    stem = "takes a fraction" if stem == "amount" else stem  # of a budget, which has no other
    return stem.lower() in str(error).lower() or its_own or isinstance(error, sec.FileError)


@pytest.mark.parametrize("name", [name for name in CALLS if name in QUICK])
def test_it_works_or_says_what_is_wrong(name: str) -> None:
    call = CALLS[name]
    for parameter in call.names():
        for make in ODD.values():
            _odd(call, parameter, make())


@pytest.mark.parametrize("name", [name for name in CALLS if name not in QUICK | LONG])
def test_it_works_or_says_what_is_wrong_in_short(name: str) -> None:
    """Of what takes longer, one value for each parameter; together they have them all."""
    call, values = CALLS[name], list(ODD.values())
    for number, parameter in enumerate(call.names()):
        _odd(call, parameter, values[(len(name) + 7 * number) % len(values)]())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CALLS if name not in QUICK])
def test_it_works_or_says_what_is_wrong_at_length(name: str) -> None:
    call = CALLS[name]
    for parameter in call.names():
        for make in ODD.values():
            _odd(call, parameter, make())


def test_a_value_that_cannot_be_shown_is_no_obstacle() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    for value in (Odd(), 10**5000):
        with pytest.raises(sec.PlanError, match="Magnitude: p is a number above 0 to 1000, not a value of type"):
            sec.Magnitude(value)  # type: ignore[arg-type]


def test_names_that_can_be_gone_through_once_only_are_refused() -> None:
    """They would be gone the second time, and what they protect would be cut."""
    with pytest.raises(sec.PlanError, match=r"protect is names, globs or modules.*give a list"):
        sec.plan(odd_arguments.graph(), sec.Ratio(0.5), protect=(name for name in ["0.*"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [(), {}], ids=["no budgets", "no ratios"])
def test_a_target_that_asks_for_nothing_is_refused(target: Any) -> None:
    with pytest.raises(sec.PlanError, match=r"a target is|ratio is empty"):
        sec.plan(odd_arguments.graph(), target)


def _recovered(net: nn.Module, batches: list[Tensor]) -> object:
    return sec.recover(net, nn.Linear(3, 2), batches)


def _factored(net: nn.Module, batches: list[Tensor]) -> object:
    return sec.factor(net, "1", batches)


def _traced(net: nn.Module, batches: list[Tensor]) -> object:
    return sec.trace(net, batches[0])


def _timed(net: nn.Module, batches: list[Tensor]) -> object:
    return sec.latency(net, batches[0], seconds=0.001)


@pytest.mark.parametrize("way", [_recovered, _factored, _traced, _timed])
def test_lazy_layers_that_have_not_run(way: Callable[[nn.Module, list[Tensor]], object]) -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(sec.SecateurError, match="lazy layers that have not run; call the model once first"):
        way(net, [torch.randn(4, 3)] * 2)
    assert net(torch.randn(4, 3)).shape == (4, 2)  # it still waits for its first run


class _Endless:
    def __iter__(self) -> Iterator[str]:
        return itertools.repeat("0.weight")


@pytest.mark.parametrize("name", ["blocks", "rank", "protect"])
def test_names_and_numbers_without_end_are_refused(name: str) -> None:
    model, example = odd_arguments.net(), torch.zeros(1, 4)
    with pytest.raises(sec.PlanError, match=f"{name}[a-z]* (is|takes) "):
        sec.compress(model, example, sec.Macs(0.5), odd_arguments.data(), **{name: _Endless()})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["blocks", "joint"])
@pytest.mark.parametrize("value", [torch.ones(3), torch.zeros(0)], ids=["several", "none"])
def test_what_decides_on_reading_data_is_no_tensor(name: str, value: Tensor) -> None:
    with pytest.raises(sec.PlanError, match=f"compress: {name} is "):
        sec.compress(odd_arguments.net(), torch.zeros(1, 4), sec.Macs(0.5), [], **{name: value})  # type: ignore[arg-type]


def test_a_variant_is_asked_for_or_not() -> None:
    with pytest.raises(sec.TraceError, match="trace: variants is True or False, not tensor"):
        sec.trace(odd_arguments.net(), torch.zeros(1, 4), variants=torch.ones(3))  # type: ignore[arg-type]


def test_what_is_no_fault_of_a_batch_is_not_blamed_on_it() -> None:
    with pytest.raises(sec.SecateurError, match=r"batches\(\) failed.*missing 1 required positional argument: 'a'$"):
        sec.compress(odd_arguments.net(), torch.zeros(1, 4), sec.Macs(0.5), lambda a: a)
