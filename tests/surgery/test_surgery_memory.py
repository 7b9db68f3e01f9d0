"""Beside the new tensors, planning and cutting hold only a little at a time."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import secateur as sec
from secateur.importance import Magnitude
from secateur.importance.weights import slice_sums
from secateur.surgery import cut
from secateur.surgery.cut import fill, room, select


class Made(TorchDispatchMode):
    """The elements of every tensor that is made, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage()._cdata not in given:
            self.sizes.append(out.numel())
        return out


def random_index(size: int, generator: random.Random) -> tuple[int, ...]:
    return tuple(sorted(generator.sample(range(size), generator.randint(1, size))))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
@pytest.mark.parametrize("chunk", [1, 7, 40, 10_000])
def test_slices_are_those_of_plain_indexing(chunk: int, layout: torch.memory_format, monkeypatch) -> None:
    monkeypatch.setattr(cut, "_CHUNK", chunk)
    generator = random.Random(chunk)
    tensor = torch.randn(5, 6, 3, 4).contiguous(memory_format=layout)
    for dims in (c for n in range(5) for c in combinations(range(4), n)):
        kept = {d: random_index(tensor.shape[d], generator) for d in reversed(dims)}
        want = tensor
        for d, index in kept.items():
            want = want[(slice(None),) * d + (list(index),)]
        got = select(tensor, kept)
        assert torch.equal(got, want)
        assert got.is_contiguous(memory_format=layout)
        assert got.untyped_storage()._cdata != tensor.untyped_storage()._cdata


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_slices_of_every_kind_of_number(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert torch.equal(select(tensor, {0: (0, 2), 1: (1, 3)}), tensor[[0, 2]][:, [1, 3]])


def test_filling_holds_a_few_slices_at_a_time() -> None:
    tensor = torch.randn(2048, 1024)
    kept = {0: tuple(range(0, 2048, 2)), 1: tuple(range(0, 1024, 2))}
    new = room(tensor, kept)
    with Made() as made:
        fill(new, tensor, kept)
    assert torch.equal(new, tensor[::2, ::2])
    assert max(made.sizes) <= cut._CHUNK < tensor.numel() // 4


def test_what_stays_is_allocated_before_anything_that_passes() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plan = sec.plan(sec.trace(net, torch.zeros(1, 64)), sec.Ratio(0.5))
    with Made() as made:
        sec.apply(net, plan, verify=False)
    assert made.sizes[:5] == [p.numel() for n, p in net.named_parameters() if n != "4.bias"]


def test_tensors_that_lie_alike_share_their_index() -> None:
    net = nn.Sequential(nn.Linear(4, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, 300), nn.ReLU())
    net.append(nn.Linear(300, 2))
    plan = sec.plan(sec.trace(net, torch.zeros(2, 4)), sec.Ratio(0.5))
    index = plan.kept["0.weight"][0]
    assert all(plan.kept[name][0] is index for name in ("0.bias", "1.weight", "1.running_var"))
    assert plan.kept["3.weight"][1] is index
    numbers = {id(i) for dims in plan.kept.values() for index in dims.values() for i in index}
    assert len(numbers) == len({i for dims in plan.kept.values() for index in dims.values() for i in index})


@pytest.mark.parametrize("shape", [(2048, 1024), (1, 700_000), (64, 64, 3, 3), (5,)], ids=str)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_magnitudes_in_one_pass_and_little_memory(shape: tuple[int, ...], p: float) -> None:
    weight = torch.randn(shape, dtype=torch.float64 if p == 3 else torch.float32)
    dims = tuple(range(min(2, len(shape))))
    space = torch.empty(3 * 2**16, dtype=weight.dtype)
    with Made() as made:
        found = slice_sums(weight, dims, Magnitude(p).powers, space)
    for d in dims:
        want = weight.double().abs().pow(p).sum([i for i in range(weight.ndim) if i != d])
        torch.testing.assert_close(
            found[d], want if weight.ndim > 1 else weight.double().abs().pow(p), rtol=1e-5, atol=0
        )
    assert max(made.sizes) <= max(max(shape), len(space))


def test_magnitudes_of_low_precision_are_summed_in_single() -> None:
    weight = torch.full((3000, 2), 0.1, dtype=torch.bfloat16)
    exact = 3000 * float(weight[0, 0]) ** 2
    assert slice_sums(weight, (1,), Magnitude().powers)[1].tolist() == pytest.approx([exact, exact], rel=1e-6)
