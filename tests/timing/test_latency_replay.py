"""Ops run alone: at full size, at any other, and where they would find their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.axes import size_after
from secateur.timing.replay import Arena, elements, key, prepared, signature, timed, variables
from secateur.tracing.steps import Operand, TimedOp


class Attention(nn.Module):
    """Two heads of eight, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm = 2, nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    """An embedding, an LSTM of two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(9, 6), nn.LSTM(6, 8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x))[0])


MODELS: dict[str, tuple[Any, Tensor]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, groups=8),
            nn.Hardswish(), nn.ConvTranspose2d(8, 8, 3, groups=8), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 6, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
        ),
        torch.zeros(2, 3, 12, 12),
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 24), nn.RMSNorm(24), nn.Linear(24, 8),
            nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 12, 1), nn.GroupNorm(1, 12), nn.Conv1d(12, 2, 1),
        ),
        torch.zeros(3, 4),
    ),
    "attention": (lambda: Attention(), torch.zeros(2, 5, 16)),
    "recurrent": (lambda: Recurrent(), torch.zeros(4, 2, dtype=torch.long)),
}  # fmt: skip


def traced(name: str) -> sec.Graph:
    make, x = MODELS[name]
    return sec.trace(make().eval(), x)


def shapes(step: TimedOp, sizes: tuple[int, ...] | None = None) -> Any:
    of = variables(step)
    return of.shape(of.sizes if sizes is None else sizes)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("divide", [1, 2])
def test_every_op_runs_alone_at_any_size(model: str, divide: int) -> None:
    graph = traced(model)
    counts = {axis.atom: axis.size // divide for axis in graph.axes}
    ran = 0
    for step in filter(timed, graph.steps):
        sizes = tuple(size_after(layout, counts) for layout in variables(step).layouts)
        shape = shapes(step, sizes)
        for operand in step.operands():
            assert shape(operand) == [size_after(dim, counts) for dim in operand.dims]
        prepared(step, shape, Arena(1000))()
        ran += 1
    assert ran >= 5


def test_ops_take_what_they_are_given() -> None:
    """A depthwise convolution, cut in half, still convolves each channel by itself."""
    (step,) = (s for s in traced("convolutions").steps if s.run is torch.ops.aten.convolution.default and s.args[8] == 8
               and not s.args[6])  # fmt: skip
    assert prepared(step, shapes(step, (4,)), Arena(1000))().shape == (2, 4, 8, 8)
    assert elements(step, shapes(step)) == 2 * 8 * 10 * 10 + 8 * 9 + 8
    assert elements(step, shapes(step, (4,))) == (2 * 8 * 10 * 10 + 8 * 9 + 8) // 2


def test_layouts_vary_by_themselves_unless_they_share_an_axis() -> None:
    by_name = {str(step.run): variables(step) for step in traced("attention").steps}
    assert by_name["aten.addmm.default"].sizes == (16,)  # heads × dims; the width is that of the input
    attention = next(of for name, of in by_name.items() if "attention" in name)
    assert attention.sizes == (2, 8, 8)  # heads, dims of queries and keys, dims of values
    recurrent = next(variables(s) for s in traced("recurrent").steps if "lstm" in str(s.run))
    assert recurrent.sizes == (6, 8, 8)  # gates × hidden and hidden are not two sizes


def test_equal_layers_are_timed_once() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4))
    steps = [s for s in sec.trace(net, torch.zeros(3, 8)).steps if timed(s)]
    names = [signature(variables(step)) for step in steps]
    assert len(steps) == 6
    assert len(set(names)) == 3  # the first reads the input, the last makes the output
    assert len({key(layout) for step in steps for layout in variables(step).layouts}) == 5
    half = sec.trace(net.half(), torch.zeros(3, 8).half())
    assert not {signature(variables(s)) for s in half.steps} & set(names)


def operand(shape: tuple[int, ...], strides: tuple[int, ...], weight: bool, dtype: torch.dtype) -> Operand:
    return Operand((), strides, dtype, torch.device("cpu"), weight)


def test_weights_are_cold_and_data_warm() -> None:
    arena, places = Arena(weights=4 * 100), {True: [], False: []}
    for weight in places:
        for _ in range(4):
            arena.start()
            tensor = arena.tensor(operand((32,), (1,), weight, torch.float32), (32,))
            places[weight].append(tensor.storage_offset())
    assert places == {True: [0, 32, 64, 0], False: [0, 0, 0, 0]}


def test_operands_do_not_overlap_and_keep_their_order() -> None:
    arena = Arena(weights=0)
    arena.start()
    one = arena.tensor(operand((3, 4), (1, 3), False, torch.float32), (3, 4))
    two = arena.tensor(operand((3, 4), (4, 1), False, torch.float32), (3, 4))
    spread = arena.tensor(operand((3, 4), (0, 1), False, torch.float32), (3, 4))
    assert (one.stride(), two.stride(), spread.stride()) == ((1, 3), (4, 1), (0, 1))
    one.zero_()
    assert two.sum() == 12
    assert spread.sum() == 12
    assert arena.tensor(operand((2,), (1,), False, torch.int64), (2,)).tolist() == [0, 0]  # valid as an index


def test_what_ops_wrote_is_undone() -> None:
    arena, floats = Arena(weights=0), operand((3,), (1,), False, torch.float32)
    arena.tensor(floats, (3,)).zero_()
    arena.start()
    assert arena.tensor(floats, (3,)).sum() == 0
    arena.refill()
    arena.start()
    assert arena.tensor(floats, (3,)).sum() == 3


def test_only_the_run_in_eval_mode_counts() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.aux = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            x = self.body(x)
            return (self.head(x), self.aux(x)) if self.training else self.head(x)

    graph = sec.trace(Auxiliary(), torch.zeros(1, 4))
    assert sum(step.run is torch.ops.aten.addmm.default for step in graph.steps) == 2
