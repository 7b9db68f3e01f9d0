"""Ops on fake tensors that are carried out the short way put out what torch does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from commutation import Trial, leaves
from sampling import Draw, Maker
from test_commutation import FILES, sampled
from torch import Tensor

from secateur.compat import FakeTensorMode, OpOverload, aten, storage_id
from secateur.tracing import outlines
from secateur.tracing.outlines import carried_out

assert FILES  # their samples are registered

FICKLE = (aten.lift.default, aten.copy.default)  # of which torch itself says something else the second time
OPS = [case for case in sampled() if isinstance(case.values[0], OpOverload) and case.values[0] not in FICKLE]


def outcome(run: Any, trial: Trial, laid: Any) -> Any:
    """What an op puts out for fake tensors: how it looks, and whose memory it has; or how it fails."""
    mode = FakeTensorMode()
    tensors = [mode.from_tensor(laid(tensor)) for tensor in trial.tensors]
    args, kwargs = trial.filled(tensors, lambda size: size.value)
    try:
        with mode, torch.no_grad():
            out = run(mode, args, kwargs)
    except Exception as error:
        return type(error), str(error)
    looks = [
        (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.is_conj(), t.is_neg(), t.requires_grad)
        for t in leaves(out, Tensor)
    ]
    shared = [[storage_id(t) == storage_id(given) for given in tensors] for t in leaves(out, Tensor)]
    return type(out), looks, shared, [t.shape for t in tensors]


def laid_otherwise(tensor: Tensor) -> Tensor:
    """The same in memory that goes the other way round, from its second element on."""
    if tensor.ndim < 2:
        return tensor
    around = tensor.permute(*reversed(range(tensor.ndim)))
    memory = torch.cat([tensor.new_zeros(1), around.reshape(-1)])
    return memory[1:].view(around.shape).permute(*reversed(range(tensor.ndim)))


@pytest.mark.parametrize(("op", "maker"), OPS)
def test_the_short_way_leads_where_the_long_one_does(op: Any, maker: Maker) -> None:
    for seed in range(2):
        sample = maker(Draw(seed))
        trial = Trial(op, sample.args, dict(sample.kwargs), sample.run or op, random.Random(seed), 1.0)
        for laid in (Tensor.clone, *((laid_otherwise,) if op is not aten._reshape_alias.default else ())):
            torchs = outcome(lambda _, args, kwargs: op(*args, **kwargs), trial, laid)
            for _ in range(2):  # the second time it is remembered, if that can be
                ours = outcome(lambda mode, args, kwargs: carried_out(mode, op, args, kwargs), trial, laid)
                assert ours == torchs


def test_numbers_of_another_kind_are_another_call() -> None:
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.zeros(3, dtype=torch.int64))
    with mode:
        made = [carried_out(mode, aten.add.Tensor, (x, one), {}).dtype for one in (1, 1.0, True, 1)]
    assert made == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_tensors_that_know_their_values_go_the_long_way() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        known = torch.tensor(3)
        assert carried_out(mode, aten.add.Tensor, (known, 1), {}).item() == 4
        assert carried_out(mode, aten._local_scalar_dense.default, (known,), {}) == 3


def test_what_comes_of_data_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines, "_remembered", {})
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.zeros(3))
    with mode:
        with pytest.raises(Exception):  # noqa: B017, PT011
            carried_out(mode, aten.nonzero.default, (x,), {})
        assert outlines._remembered == {}
        carried_out(mode, aten.relu.default, (x,), {})
    assert len(outlines._remembered) == 1


def test_what_is_written_into_stays_the_same_tensor() -> None:
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        for _ in range(3):
            x = mode.from_tensor(torch.zeros(2, 3))
            assert carried_out(mode, aten.add_.Tensor, (x, 1), {}) is x
            with pytest.raises(RuntimeError):
                carried_out(mode, aten.add_.Tensor, (x, mode.from_tensor(torch.zeros(5))), {})


def test_a_tensor_that_is_written_into_no_longer_knows_its_values() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        for _ in range(2):
            known, other = torch.tensor([3.0]), torch.empty(1)
            carried_out(mode, aten.add_.Tensor, (torch.empty(1), known), {})  # as often as is remembered
            carried_out(mode, aten.add_.Tensor, (known, other), {})
            assert known.constant is None


def test_a_torch_without_the_kernels_of_fake_tensors_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines, "in_fake_kernel", None)
    monkeypatch.setattr(outlines, "_remembered", {})
    mode = FakeTensorMode()
    with mode:
        assert carried_out(mode, aten.t.default, (torch.zeros(2, 3),), {}).shape == (3, 2)
    assert outlines._remembered == {}
