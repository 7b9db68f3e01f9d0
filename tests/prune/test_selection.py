"""Exactly the k smallest, whatever the values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.prune import selection
from secateur.prune.selection import Segment, drop_smallest


def smallest(scores, k):
    mask = torch.full_like(scores, 7.0)
    drop_smallest([Segment(scores, mask, fresh=True)], k)
    return mask


def test_ties_at_the_border_go_in_order():
    assert smallest(torch.tensor([2.0, -1.0, 1.0, 1.0, 0.5]), 3).tolist() == [1, 0, 0, 1, 0]


def test_none_and_all():
    t = torch.tensor([1.0, 2.0])
    assert smallest(t, 0).tolist() == [1, 1]
    assert smallest(t, 2).tolist() == [0, 0]


def test_infinite_and_subnormal_magnitudes_are_ranked():
    t = torch.tensor([float("inf"), 1e-45, -float("inf"), 0.0, 3e38])
    assert smallest(t, 3).tolist() == [1, 0, 1, 0, 0]


def test_masked_entries_take_no_part_and_keep_their_value():
    mask = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0])
    drop_smallest([Segment(torch.tensor([3.0, 0.0, 2.0, 0.0, 1.0]), mask, fresh=False)], 2)
    assert mask.tolist() == [1, 0, 0, 0.5, 0]


def test_several_segments_of_different_dtypes_are_one_ranking():
    a, b = torch.tensor([1.0, 4.0]), torch.tensor([2.0, 3.0, 0.5], dtype=torch.bfloat16)
    masks = torch.empty(2), torch.empty(3, dtype=torch.bfloat16)
    drop_smallest([Segment(a, masks[0], True), Segment(b, masks[1], True)], 3)
    assert masks[0].tolist() == [0, 1]
    assert masks[1].tolist() == [0, 1, 0]


def test_integers_at_the_end_of_their_range():
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    assert smallest(torch.tensor([low, 5, high, -4]), 2).tolist() == [1, 0, 1, 0]


def test_complex_scores_are_ranked_by_modulus():
    t = torch.tensor([3 + 4j, 1 + 1j, 0 - 2j])
    mask = torch.empty(3)
    drop_smallest([Segment(t, mask, True)], 2)
    assert mask.tolist() == [1, 0, 0]


def test_memory_layout_does_not_matter():
    t = torch.randn(4, 3, 5, 5)
    expected = smallest(t, 100)
    t = t.to(memory_format=torch.channels_last)
    assert torch.equal(smallest(t, 100), expected)
    strided = torch.randn(8, 6)[::2, ::3]
    assert torch.equal(smallest(strided, 4), smallest(strided.contiguous(), 4))


@settings(max_examples=120, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32]),
    n=st.integers(1, 60),
    levels=st.integers(1, 1000),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**31),
    chunk=st.sampled_from([1, 7, 64]),
    sample=st.sampled_from([1, 2, 5, 1000]),
    few=st.sampled_from([5, 1000]),
)
def test_exactly_the_k_smallest(dtype, n, levels, fraction, seed, chunk, sample, few):
    generator = torch.Generator().manual_seed(seed)
    t = (torch.randint(-levels, levels + 1, (n,), generator=generator) / (1 if dtype == torch.int32 else 7)).to(dtype)
    k = round(fraction * n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "CHUNK", chunk)
        patch.setattr(selection, "SAMPLE", sample)
        patch.setattr(selection, "FEW", few)
        mask = smallest(t, k)
    assert int((mask == 0).sum()) == k
    assert int((mask == 1).sum()) == n - k
    gone, kept = t[mask == 0].abs(), t[mask == 1].abs()
    if 0 < k < n:
        assert gone.max() <= kept.min()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("k", [1, 300_000, 999_999])
def test_large_tensors_go_by_a_sample(monkeypatch, k, fresh):
    def unwanted(*_):
        raise AssertionError("the sample should have been enough")

    monkeypatch.setattr(selection, "_threshold", unwanted)
    torch.manual_seed(0)
    t = torch.randn(8 * selection.SAMPLE)
    mask = torch.ones_like(t)
    if not fresh:
        mask[::50] = 0
    dead = mask == 0
    drop_smallest([Segment(t, mask, fresh)], k)
    assert int((mask[~dead] == 0).sum()) == k
    alive = t[~dead].abs()
    assert alive[mask[~dead] == 0].max() <= alive[mask[~dead] == 1].min()


def test_a_sample_that_misleads_is_not_believed(monkeypatch):
    monkeypatch.setattr(selection, "SAMPLE", 128)
    t = torch.ones(8 * 128 * 9)
    t[:: 8 * 9 + 1] = 5.0  # every entry that is sampled
    t += torch.arange(len(t)) / len(t)
    mask = smallest(t, 4000)
    assert int((mask == 0).sum()) == 4000
    assert t[mask == 0].max() <= t[mask == 1].min()


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_large_tensors_of_one_value(value):
    mask = smallest(torch.full((8 * selection.SAMPLE,), value), 12_345)
    assert int((mask == 0).sum()) == 12_345
    assert bool((mask[:12_345] == 0).all())


def test_scratch_memory_does_not_grow_with_the_weights(monkeypatch):
    """No step of the selection sees more than a chunk."""
    seen = []
    real = selection._keys
    monkeypatch.setattr(selection, "_keys", lambda scores: (seen.append(scores.numel()), real(scores))[1])
    smallest(torch.randn(3 * selection.CHUNK + 5), 1000)
    assert max(seen) == selection.CHUNK
    assert len(seen) == 3 * 4  # two histograms and one write, four chunks each
    seen.clear()
    smallest(torch.randn(8 * selection.CHUNK), 1000)
    assert max(seen) <= selection.CHUNK
    assert len(seen) == 1 + 2 * 8  # the sample, one pass to find the border and one to write
