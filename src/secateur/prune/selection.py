"""Which entries are the k smallest: found in linear passes over memory, with a fixed amount of scratch.

The bits of a floating-point magnitude, read as an integer, are in the order of the magnitudes. A sorted sample
says between which two of these keys the k-th smallest lies; one pass counts what is below and gathers what is
between, and from these few the exact key follows. Should the sample mislead, or the tensors be small, the key is
found digit by digit from histograms: one pass for 16-bit types, two for 32, four for 64. One more pass writes the
mask. Nothing of the size of the weights is sorted or allocated.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 18  # entries at a time: keys and bins of a chunk stay in the cache
RADIX = 16  # bits per histogram
SAMPLE = 1 << 17  # entries that tell roughly where the border is
FEW = 1 << 22  # entries near the border that are few enough to be gathered

_KEY_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Segment:
    """One tensor of scores and the mask to write for it, of the same shape.

    A `fresh` mask may hold anything: every entry takes part and the mask is overwritten. Otherwise only the
    entries whose mask is 1 take part, and only zeros are written.
    """

    scores: Tensor
    mask: Tensor
    fresh: bool

    def flat(self) -> tuple[Tensor, Tensor]:
        """Scores and mask as vectors, in the order of the mask's memory."""
        strides = self.mask.stride()
        order = sorted(range(self.mask.dim()), key=lambda d: -strides[d])
        scores = self.scores.detach().permute(order).reshape(-1)
        return scores, self.mask.permute(order).view(-1)

    def candidates(self) -> int:
        """How many entries take part."""
        if self.fresh:
            return self.mask.numel()
        return sum(int(torch.count_nonzero(part == 1)) for part in self.flat()[1].split(CHUNK))


@torch.no_grad()
def drop_smallest(segments: Sequence[Segment], k: int) -> None:
    """Write masks in which exactly the k smallest magnitudes over all segments are zero.

    >>> mask = torch.empty(4)
    >>> drop_smallest([Segment(torch.tensor([3.0, -1.0, 2.0, 1.0]), mask, fresh=True)], k=2)
    >>> mask
    tensor([1., 0., 1., 0.])

    Of equal magnitudes at the border, the first in memory go. There must be k candidates, and no NaN.
    """
    dtype = _comparable([s.scores for s in segments])
    if k == 0:
        for segment in segments:
            if segment.fresh:
                segment.mask.fill_(1)
        return
    large = sum(s.mask.numel() for s in segments) >= 8 * SAMPLE
    found = _threshold_in_bracket(segments, dtype, k) if large else None
    threshold, ties, tied = found or _threshold(segments, dtype, k)
    if ties == tied:  # all of them go: none has to be counted
        threshold, ties = threshold + 1, 0
    for keys, mask, fresh in _chunks(segments, dtype):
        ties -= _write(keys, mask, fresh, threshold, ties)


def _write(keys: Tensor, mask: Tensor, fresh: bool, threshold: int, ties: int) -> int:
    """Write one chunk of a mask, with at most `ties` zeros for keys at the threshold; how many those were."""
    tied = int(torch.count_nonzero(keys == threshold)) if ties else 0
    border = threshold if tied <= ties and ties else threshold - 1  # the largest key that goes as a whole
    if fresh:
        torch.gt(keys, border, out=mask)
    else:
        mask.mul_(torch.gt(keys, border, out=torch.empty_like(mask)))
    if tied > ties > 0:
        mask[(keys == threshold).nonzero()[:ties, 0]] = 0
    return min(tied, ties)


def _threshold(segments: Sequence[Segment], dtype: torch.dtype, k: int) -> tuple[int, int, int]:
    """The k-th smallest key, how many of the entries that have it are among the k smallest, and of how many."""
    total = bits = 8 * dtype.itemsize - 1
    low = 0
    while bits > 0:
        width = (bits - 1) % RADIX + 1
        bits -= width
        bins = 1 << width
        histogram = torch.zeros(bins, dtype=torch.int64)
        for keys, _, _ in _chunks(segments, dtype):
            if bits + width == total:
                counts = torch.bincount(keys.bitwise_right_shift_(bits), minlength=bins)
            else:  # one more bin for all keys below, one for all above
                digits = keys.sub_(low).bitwise_right_shift_(bits).clamp_(-1, bins).add_(1)
                counts = torch.bincount(digits, minlength=bins + 2)[1:-1]
            histogram += counts.cpu()
        upto = histogram.cumsum(0)
        digit = int(torch.searchsorted(upto, k))
        k -= int(upto[digit] - histogram[digit])
        low += digit << bits
    return low, k, int(histogram[digit])


def _threshold_in_bracket(segments: Sequence[Segment], dtype: torch.dtype, k: int) -> tuple[int, int, int] | None:
    """The same in one pass, by way of a sample that nearly always brackets it; None if it did not."""
    sample = torch.cat([keys.cpu() for keys, _, _ in _chunks(_thinned(segments), dtype)]).sort().values
    rank = k * len(sample) / sum(s.mask.numel() for s in segments)
    margin = 2 * math.sqrt(len(sample))  # four standard deviations, at least
    low = int(sample[max(round(rank - margin), 0)]) if rank > margin else 0
    high = int(sample[min(round(rank + margin), len(sample) - 1)])
    below, near, size = 0, [], 0
    for keys, _, _ in _chunks(segments, dtype):
        below += int(torch.count_nonzero(keys < low))
        near.append(_between(keys, low, high))
        size += len(near[-1])
        if size > FEW:
            return None
    if not below < k <= below + size:
        return None
    candidates = torch.cat(near)
    threshold = int(candidates.kthvalue(k - below).values)
    smaller, tied = (int(torch.count_nonzero(c)) for c in (candidates < threshold, candidates == threshold))
    return threshold, k - below - smaller, tied


def _thinned(segments: Sequence[Segment]) -> list[Segment]:
    """About `SAMPLE` entries; the odd step keeps clear of the widths of layers."""
    step = sum(s.mask.numel() for s in segments) // SAMPLE | 1
    flat = [(*s.flat(), s.fresh) for s in segments]
    return [Segment(scores[::step], mask[::step], fresh) for scores, mask, fresh in flat]


def _between(keys: Tensor, low: int, high: int) -> Tensor:
    if keys.device.type != "cpu":
        return keys[(keys >= low) & (keys <= high)].cpu()
    array = keys.numpy()  # which selects several times faster here
    return torch.from_numpy(array[(array >= low) & (array <= high)])


def _chunks(segments: Sequence[Segment], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, bool]]:
    for segment in segments:
        scores, mask = segment.flat()
        for start in range(0, mask.numel(), CHUNK):
            part = mask[start : start + CHUNK]
            chunk = scores[start : start + CHUNK]
            keys = _keys((chunk.abs() if chunk.is_complex() else chunk).to(dtype))
            if not segment.fresh:  # all bits of what takes no part, which is much faster than a masked fill
                keys |= torch.ne(part, 1, out=torch.empty_like(keys)).neg_()
                keys &= torch.iinfo(keys.dtype).max
            yield keys, part, segment.fresh


def _keys(scores: Tensor) -> Tensor:
    """Integers in the order of the magnitudes; the largest integer is free, for what does not take part."""
    if scores.dtype.is_floating_point:
        key = _KEY_DTYPES[scores.dtype.itemsize]
        return scores.view(key) & torch.iinfo(key).max
    most = torch.iinfo(torch.int64).max - 1
    return scores.clamp(-most, most).abs()


def _comparable(scores: Sequence[Tensor]) -> torch.dtype:
    """One dtype in which all scores can be ranked, exactly."""
    common = scores[0].dtype.to_real()
    for other in scores[1:]:
        common = torch.promote_types(common, other.dtype.to_real())
    if not common.is_floating_point:
        return torch.int64
    return common if common.itemsize in _KEY_DTYPES else torch.float32
