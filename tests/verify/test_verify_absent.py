"""What ops compute over what is present, in numbers that can be checked by eye."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.ops.absent import NAN
from secateur.verify.absence import AbsentFunctions, AbsentOps, Count, present_along


def absent(function: object, *tensors: Tensor) -> Tensor:
    assert callable(function)
    with torch.no_grad(), AbsentOps(), AbsentFunctions():
        return function(*tensors)


def same(got: Tensor, want: list[object]) -> None:
    assert torch.allclose(got, torch.tensor(want, dtype=got.dtype), equal_nan=True, atol=1e-6), got


ROW = torch.tensor([[1.0, NAN, 3.0, 5.0]])


def test_mean_counts_what_is_there() -> None:
    same(absent(lambda x: x.mean(-1), ROW), [3.0])
    same(absent(lambda x: x.mean(), ROW), 3.0)  # type: ignore[arg-type]


def test_sum_skips_and_of_nothing_there_is_none() -> None:
    same(absent(lambda x: x.sum(0), torch.tensor([[1.0, NAN], [2.0, NAN]])), [3.0, NAN])


def test_variance_of_what_is_there() -> None:
    same(absent(lambda x: x.var(-1, unbiased=False), ROW), [8 / 3])
    same(absent(lambda x: x.var(-1), ROW), [4.0])
    same(absent(lambda x: x.std(-1), ROW), [2.0])


def test_largest_and_norm() -> None:
    same(absent(lambda x: x.amax(-1), -ROW), [-1.0])
    same(absent(lambda x: x.norm(dim=-1), torch.tensor([[3.0, NAN, 4.0]])), [5.0])
    same(absent(lambda x: x.logsumexp(-1), torch.tensor([[0.0, NAN, 0.0]])), [math.log(2)])


def test_softmax_shares_among_what_is_there() -> None:
    same(absent(lambda x: x.softmax(-1), torch.tensor([[0.0, NAN, 0.0]])), [[0.5, NAN, 0.5]])


def test_cumulative_sum() -> None:
    same(absent(lambda x: x.cumsum(-1), ROW), [[1.0, NAN, 4.0, 9.0]])


def test_layer_norm_over_what_is_there() -> None:
    want = [(v - 3) / math.sqrt(8 / 3) if v == v else NAN for v in ROW[0].tolist()]
    same(absent(lambda x: F.layer_norm(x, (4,), eps=0.0), ROW), [want])


def test_rms_norm_over_what_is_there() -> None:
    root = math.sqrt((1 + 9 + 25) / 3)
    same(absent(lambda x: F.rms_norm(x, (4,), eps=0.0), ROW), [[1 / root, NAN, 3 / root, 5 / root]])


def test_group_norm_over_what_is_there() -> None:
    x = torch.tensor([[1.0, NAN, 2.0, 6.0]])
    same(absent(lambda x: F.group_norm(x, 2, eps=1e-12), x), [[0.0, NAN, -1.0, 1.0]])


def test_products_sum_over_what_is_there() -> None:
    a, b = torch.tensor([[1.0, NAN, 2.0]]), torch.tensor([[3.0, NAN], [5.0, 7.0], [4.0, NAN]])
    same(absent(torch.mm, a, b), [[11.0, NAN]])
    same(absent(lambda a, b: F.linear(a, b.t(), torch.tensor([1.0, NAN])), a, b), [[12.0, NAN]])


def test_convolution_over_what_is_there() -> None:
    x = torch.tensor([[[1.0, 2.0], [NAN, NAN]]])
    w = torch.tensor([[[10.0], [NAN]], [[NAN], [NAN]]])
    same(absent(lambda x, w: F.conv1d(x, w, torch.tensor([0.5, NAN])), x, w), [[[10.5, 20.5], [NAN, NAN]]])


def test_attention_scales_by_what_is_there() -> None:
    q = torch.tensor([[[2.0, NAN]]])
    k = torch.tensor([[[1.0, NAN], [0.0, NAN]]])
    v = torch.tensor([[[1.0], [0.0]]])
    e = math.exp(2.0)  # one dimension is left: the root of one
    same(absent(F.scaled_dot_product_attention, q, k, v), [[[e / (e + 1)]]])


def test_masks_do_not_bring_back_what_is_absent() -> None:
    mask = torch.tensor([[False, True, True, False]])
    same(absent(lambda x: x.masked_fill(mask, 0.0), ROW), [[1.0, NAN, 0.0, 5.0]])
    same(absent(lambda x: torch.where(mask, 0.0, x), ROW), [[1.0, NAN, 0.0, 5.0]])
    same(absent(torch.ones_like, ROW), [[1.0, NAN, 1.0, 1.0]])


def test_sizes_used_as_numbers_are_those_after_the_cut() -> None:
    same(absent(lambda x: x * x.shape[-1], torch.tensor([[1.0, NAN, 2.0]])), [[2.0, NAN, 4.0]])
    same(absent(lambda x: x / math.sqrt(x.size(-1)), torch.tensor([[2.0, NAN, NAN, NAN, 2.0, 2.0, 2.0]])),
         [[1.0, NAN, NAN, NAN, 1.0, 1.0, 1.0]])  # fmt: skip
    assert present_along(torch.tensor([[1.0, NAN], [2.0, NAN]]), 1) == 1
    half = Count(8, lambda: 4)
    assert (half, float(half), half * 2, (half * 2).after(), half**-0.5, 1 / half) == (8, 4.0, 16, 8, 0.5, 0.25)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrences_step_by_step_are_torch_s(kind: type[nn.RNNBase], both: bool, packed: bool) -> None:
    torch.manual_seed(0)
    rnn = kind(3, 4, 2, bidirectional=both).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    given = nn.utils.rnn.pack_padded_sequence(x, [5, 3]) if packed else x
    with torch.no_grad():
        want, want_state = rnn(given)
    got, got_state = absent(rnn, given)  # type: ignore[arg-type, misc]
    assert torch.allclose(got.data, want.data)
    pairs = zip(got_state, want_state, strict=True) if kind is nn.LSTM else [(got_state, want_state)]
    assert all(torch.allclose(a, b) for a, b in pairs)


def test_a_step_of_a_gated_unit_without_an_absent_unit() -> None:
    """All weights zero but the bias of the candidate: h = (1 - 1/2) tanh(bias)."""
    rnn = nn.GRU(1, 2)
    with torch.no_grad():
        for p in rnn.parameters():
            p.zero_()
        rnn.bias_ih_l0.view(3, 2)[2, 0] = 1.0
        for p in rnn.parameters():
            p.view(3, 2, -1)[:, 1] = NAN
        rnn.weight_hh_l0[:, 1] = NAN
    out = absent(lambda x: rnn(x)[0], torch.zeros(1, 1, 1))
    same(out, [[[0.5 * math.tanh(1.0), NAN]]])
