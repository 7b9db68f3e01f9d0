"""The commutation law over every rule: `op(cut(inputs)) == cut(op(inputs))`.

Set SECATEUR_DRAWS to try each sample more often than the few times that suit every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import samples_chance
import samples_compute
import samples_pointwise
import samples_reduce
import samples_view
import torch
from commutation import Verdict, commutation
from derived import by_schema, functional_of, into_out, pointwise_ops, returns_tensors, takes_names, writes_out
from sampling import SAMPLES, Draw, Maker, Sample
from zoo_ops import NO_RULE_NEEDED, ZOO_OPS

from secateur.compat import aten
from secateur.ops import record

DRAWS = int(os.environ.get("SECATEUR_DRAWS", "6"))
RULES = {**record.records(), **record.function_records()}
FILES = (samples_chance, samples_compute, samples_pointwise, samples_reduce, samples_view)  # imported to register

# Samples in which nothing can be cut exactly: positions are chosen, counted, ranked or mixed along every dimension.
WHOLE = {
    *("roll_flat", "as_strided", "grouped_mm_of_equal_groups", "over_all", "truth", "histc", "bincount", "found"),
    *("masked_select", "searchsorted", "bucketize", "scalar_tensor", "counted", "arange_start", "arange_step"),
    *("linspace", "eye", "triangle_indices", "randperm_from", "least_and_most", "in_the_middle"),
}


def law(op: Any, maker: Maker, times: int) -> list[Verdict]:
    verdicts = []
    for seed in range(times):
        sample = maker(Draw(seed))
        verdicts.append(
            commutation(op, sample.args, sample.kwargs, draws=3, seed=seed, values=sample.values, run=sample.run)
        )
    return verdicts


def failures(verdicts: list[Verdict]) -> list[str]:
    return [failure for verdict in verdicts for failure in verdict.failures]


def sampled() -> Iterator[Any]:
    for op, makers in SAMPLES.items():
        for maker in makers:
            yield pytest.param(op, maker, id=f"{_name(op)}-{maker.__name__}")


def _name(op: Any) -> str:
    return str(op) if isinstance(op, torch._ops.OpOverload) else op.__name__


@pytest.mark.parametrize(("op", "maker"), list(sampled()))
def test_every_rule_commutes(op: Any, maker: Maker) -> None:
    verdicts = law(op, maker, DRAWS)
    assert failures(verdicts) == []
    cuts = sum(verdict.cuts for verdict in verdicts)
    assert cuts > 0 or maker.__name__ in WHOLE, "the rule fixes everything, so nothing was tried"


def test_every_rule_is_tried() -> None:
    tried = {op for op in RULES if op in SAMPLES}
    others = [op for op in RULES if op not in tried]
    derived = {op for op in others if not returns_tensors(op) or writes_out(op) or takes_names(op)}
    assert [_name(op) for op in RULES if op not in tried | derived] == []


def test_every_sample_belongs_to_a_rule() -> None:
    assert [_name(op) for op in SAMPLES if op not in RULES] == []


def outs() -> Iterator[Any]:
    for op in RULES:
        if isinstance(op, torch._ops.OpOverload) and writes_out(op):
            for maker in SAMPLES[functional_of(op)]:
                yield pytest.param(op, maker, id=f"{op}-{maker.__name__}")


@pytest.mark.parametrize(("op", "maker"), list(outs()))
def test_out_variants_commute(op: Any, maker: Maker) -> None:
    assert failures(law(op, lambda draw: into_out(op, maker(draw)), 2)) == []


def in_place() -> dict[Any, list[Maker]]:
    """Ops whose rule is derived from that of the op that they are the in-place variant of."""
    found = {}
    for op, makers in SAMPLES.items():
        if isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable:
            packet = getattr(aten, op._schema.name.partition("::")[2] + "_", None)
            if packet is not None and op._overloadname in packet.overloads():
                variant = getattr(packet, op._overloadname)
                if variant not in SAMPLES and record.record_of(variant) is not None:
                    found[variant] = makers
    return found


IN_PLACE = in_place()


@pytest.mark.parametrize("op", IN_PLACE, ids=str)
def test_in_place_variants_commute(op: Any) -> None:
    drawn = [(maker, seed) for maker in IN_PLACE[op] for seed in range(DRAWS)]
    fitting = [(maker, seed) for maker, seed in drawn if _runs(op, maker(Draw(seed)))]
    assert fitting
    for maker, seed in fitting:
        assert failures(law(op, lambda _, maker=maker, seed=seed: maker(Draw(seed)), 1)) == []


def _runs(op: Any, sample: Sample) -> bool:
    """Whether the result fits into the first argument."""
    try:
        op(*(x.clone() if isinstance(x, torch.Tensor) else x for x in sample.args), **sample.kwargs)
    except RuntimeError:
        return False
    return True


POINTWISE = [op for op in pointwise_ops() if op not in SAMPLES]


@pytest.mark.parametrize("op", POINTWISE, ids=str)
def test_pointwise_ops_commute(op: Any) -> None:
    verdicts = law(op, lambda draw: by_schema(op, draw), max(2, DRAWS // 3))
    assert failures(verdicts) == []
    assert sum(verdict.cuts for verdict in verdicts) > 0


def test_every_op_of_the_zoo_is_tried() -> None:
    tried = {str(op) for op in [*SAMPLES, *POINTWISE, *IN_PLACE]} | NO_RULE_NEEDED
    assert [name for name in ZOO_OPS if name not in tried] == []
