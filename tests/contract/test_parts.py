"""Every record has the parts that it needs: what is absent, what it costs, which arguments are sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from commutation import Trial, close, cut_to, leaves, rows
from sampling import SAMPLES, Draw, Maker, Sample
from test_commutation import FILES, sampled
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from secateur.axes import free_atoms, keep_mask
from secateur.compat import aten, draws, takes_sizes
from secateur.ops.absent import NAN
from secateur.ops.record import _SIZES, function_record, is_op, part, record_of, records
from secateur.verify.absence import AbsentFunctions, AbsentOps
from secateur.verify.run import drawn

DRAWS = 4
assert FILES  # their samples are registered


# what is absent ----------------------------------------------------------------------------------------------------

# Elements are drawn, so there is nothing to compare; or true and false, which cannot say that they are absent.
# Or torch takes it apart into ops that do not know what they fill: padding, after sequences of other lengths.
MUTE = {
    aten._pad_packed_sequence.default,
    *(aten.bernoulli.default, aten.native_dropout.default),
    *(aten._is_all_true.default, aten._is_any_true.default),
}


def absent_run(trial: Trial, sample: Sample, masks: Any) -> list[Tensor]:
    """The op on its full-size inputs, with NaN at every removed position."""
    given = []
    for tensor, value in zip(trial.tensors, trial.seen.inputs, strict=True):
        whole = tensor.clone()
        if (whole.is_floating_point() or whole.is_complex()) and not value.alike:  # zeros are made, they do not come
            for i, dim in enumerate(value.dims):
                whole.index_fill_(i, torch.from_numpy((~keep_mask(dim, masks)).nonzero()[0]), NAN)
        given.append(whole)
    over_present = part(trial.op, "absent")
    if over_present is not None and sample.run is not None:
        args, kwargs = trial.filled(given, lambda size: size.value)
        return list(leaves(over_present(sample.run, *args, **kwargs), Tensor))
    with AbsentOps(), AbsentFunctions():
        return trial.outputs(given, lambda size: size.value)


def absence(op: Any, sample: Sample, seed: int) -> Iterator[str]:
    """Where the op over what is present differs from the op on what is left."""
    rng = random.Random(seed)
    trial = Trial(op, sample.args, dict(sample.kwargs), sample.run or op, rng, 1.0)
    masks = trial.draw(trial.atoms, rng)
    pairs = zip(trial.tensors, trial.seen.inputs, strict=True)
    marked = [value for tensor, value in pairs if tensor.is_floating_point() and not value.alike]
    visible = {atom for value in marked for dim in value.dims for atom in free_atoms(dim)}
    whole = absent_run(trial, sample, masks)
    small = trial.cut_outputs(masks)
    for k, (value, full, cut) in enumerate(zip(trial.seen.outputs, whole, small, strict=sample.run is None)):
        for name, shown, big, less in rows(f"output {k}", value, full, cut):
            want = cut_to(big, shown.dims, masks)
            if want.shape != less.shape or not close(less, want):
                yield f"{name}: what is left of it is not what the op makes of what is left"
            for i, dim in enumerate(shown.dims):
                gone = torch.from_numpy((~keep_mask(dim, masks)).nonzero()[0])
                shows = big.is_floating_point() and set(free_atoms(dim)) <= visible
                if shows and not bool(big.index_select(i, gone).isnan().all()):
                    yield f"{name} dim {i}: removed positions are not absent"


@pytest.mark.parametrize(("op", "maker"), list(sampled()))
def test_every_op_knows_what_is_absent(op: Any, maker: Maker) -> None:
    for seed in range(DRAWS):
        sample = maker(Draw(seed))
        if sample.values and op not in MUTE:
            assert list(absence(op, sample, seed)) == []


# what is drawn -------------------------------------------------------------------------------------------------------

DRAWN = [case for case in sampled() if is_op(case.values[0]) and draws(case.values[0])]


@pytest.mark.parametrize(("op", "maker"), DRAWN)
def test_draws_are_the_same_at_any_size(op: Any, maker: Maker) -> None:
    """What stands for a draw in a check: cutting it is the same as making it smaller."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return drawn(op, args, kwargs, 0)

    for seed in range(DRAWS):
        sample = maker(Draw(seed))
        trial = Trial(op, sample.args, dict(sample.kwargs), run, random.Random(seed), 1.0)
        masks = trial.draw(trial.atoms, random.Random(seed))
        whole = trial.outputs(trial.tensors, lambda size: size.value)
        for value, full, less in zip(trial.seen.outputs, whole, trial.cut_outputs(masks), strict=True):
            assert close(cut_to(full, value.dims, masks), less)
            assert part(op, "settled") is not None or not masks


# what it costs -------------------------------------------------------------------------------------------------------


def counted(op: Any, sample: Sample) -> int:
    """The multiply-accumulates that the record says."""
    trial = Trial(op, sample.args, dict(sample.kwargs), sample.run or op, random.Random(0), 1.0)
    return sum(math.prod(layout.size for layout in cost.layouts) for cost in trial.seen.tracer.costs)


def flops(trial: Trial, run: Any) -> int:
    """By torch's own counter, of multiply-accumulates as two operations each."""
    args, kwargs = trial.filled([t.clone() for t in trial.tensors], lambda size: size.value)
    with FlopCounterMode(display=False) as counter:
        run(*args, **kwargs)
    return counter.get_total_flops() // 2


def terms(run: Any, tensors: list[Tensor]) -> int:
    """By brute force: how many products of one element of each factor are summed, over all elements of the result."""
    eyes = [torch.eye(t.numel(), dtype=t.dtype).reshape(-1, *t.shape) for t in tensors]

    def count(chosen: list[Tensor], rest: list[Tensor]) -> int:
        if not rest:
            return int((run(*chosen) != 0).sum())
        return sum(count([*chosen, one], rest[1:]) for one in rest[0])

    return count([], eyes)


# Products that torch's counter does not know; two of them cannot be run here, and something that it knows is.
RUN_AS_OTHERS = {aten._grouped_mm.default, aten.convolution_overrideable.default}
UNCOUNTED = {op for op, r in records().items() if "cost" in r.parts and op.overloadpacket not in flop_registry}
PRODUCTS = UNCOUNTED - RUN_AS_OTHERS


@pytest.mark.parametrize(("op", "maker"), list(sampled()))
def test_every_op_costs_what_it_does(op: Any, maker: Maker) -> None:
    for seed in range(3):
        sample = maker(Draw(seed))
        trial = Trial(op, sample.args, dict(sample.kwargs), sample.run or op, random.Random(0), 1.0)
        if op in PRODUCTS:
            tensors = trial.tensors[-3 if op is aten._trilinear.default else -2 :]  # what comes before is added
            others = [torch.zeros_like(t) for t in trial.tensors[: len(trial.tensors) - len(tensors)]]
            plain = [a for a in sample.args if not isinstance(a, Tensor)]
            run = sample.run or op
            want = terms(lambda *t, run=run, others=others, plain=plain: run(*others, *t, *plain), tensors)
        elif not is_op(op):
            want = flops(trial, lambda *args, **kwargs: part(op, "absent")(op, *args, **kwargs))
        else:
            want = flops(trial, sample.run or op)
        assert counted(op, sample) == want


# what it is as a product of data with a weight ---------------------------------------------------------------------

# Products of which calibration does not see one operand as a weight.
WEIGHTLESS = {
    *(*PRODUCTS, aten.baddbmm.default),  # which no layer of torch's runs on a parameter
    aten._grouped_mm.default,  # calibration runs experts one by one
    *(case.values[0] for case in sampled() if not is_op(case.values[0])),  # and recurrent layers op by op
}


@pytest.mark.parametrize(("op", "maker"), list(sampled()))
def test_every_product_is_one_with_a_weight(op: Any, maker: Maker) -> None:
    sample = maker(Draw(1))
    trial = Trial(op, sample.args, dict(sample.kwargs), sample.run or op, random.Random(0), 1.0)
    view = part(op, "product")
    assert (view is not None) == (counted(op, sample) > 0 and op not in WEIGHTLESS)
    args, kwargs = trial.filled([t.clone() for t in trial.tensors], lambda size: size.value)
    if view is None or kwargs or not (of := view(*args)).affine:
        return
    every, out = of.sample(10**9), (sample.run or op)(*args)
    made = torch.cat(list(of.rows(every)), 1) @ of.canonical(of.weight).mT
    made = made if of.shift is None else made + of.shift
    assert close(made, torch.cat(list(of.outputs(out, every)), 1))
    weight = of.canonical(of.weight).clone()
    of.write(2 * weight)
    assert torch.equal(of.canonical(of.weight), 2 * weight)


def test_a_matrix_that_is_added_is_no_bias() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    added = [torch.randn(5), torch.randn(1, 5), torch.randn(3, 5), torch.randn(3, 1), torch.randn(1), torch.randn(())]
    assert [part(aten.addmm.default, "product")(each, x, weight).affine for each in added] == [True, True] + [False] * 4


def test_a_model_of_vectors_costs_something() -> None:
    import secateur as sec

    class Vectors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight @ x

    assert sec.macs(Vectors(), torch.randn(4)) == 20
    assert sec.macs(torch.nn.Bilinear(3, 4, 5), (torch.randn(2, 3), torch.randn(2, 4))) == 2 * 3 * 4 * 5


# which arguments are sizes -------------------------------------------------------------------------------------------


def test_every_function_that_takes_sizes_says_which() -> None:
    """A torch function of the same name as an op that takes sizes: what its numbers are is known."""
    unsaid = []
    for op in records():
        name = str(op).split(".")[1]
        found = [getattr(home, name, None) for home in (torch, Tensor, torch.nn.functional)]
        functions = [f for f in found if callable(f) and not isinstance(f, FunctionType)]  # Python is looked into
        if takes_sizes(op) and any(f not in _SIZES and function_record(f) is None for f in functions):
            unsaid.append(str(op))
    assert unsaid == []


def test_every_part_is_one_that_is_looked_up() -> None:
    known = {"cost", "absent", "product", "resize", "fake", "precise", "settled"}
    assert {name for record in records().values() for name in record.parts} <= known
    assert all(record_of(op) is not None for op in SAMPLES if is_op(op))
