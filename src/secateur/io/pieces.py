"""Which part of a model's tensor a file holds under another name: an expert of those that the module has as one."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import NamedTuple

from secateur.arguments import shown
from secateur.errors import PlanError
from secateur.planning.plans import Kept, Plan

# Mixtures of experts, as files and as Transformers have them: (name in the file, name of the whole, which part of the
# rows of an expert). Rows of the gate come before those of the other factor.
_EXPERTS: tuple[tuple[re.Pattern[str], str, tuple[int, int]], ...] = tuple(
    (re.compile(pattern), whole, part)
    for pattern, whole, part in (
        (r"(.+\.experts)\.(\d+)\.gate_proj\.weight", r"\1.gate_up_proj", (0, 2)),
        (r"(.+\.experts)\.(\d+)\.up_proj\.weight", r"\1.gate_up_proj", (1, 2)),
        (r"(.+\.experts)\.(\d+)\.down_proj\.weight", r"\1.down_proj", (0, 1)),
        (r"(.+)\.block_sparse_moe\.experts\.(\d+)\.w1\.weight", r"\1.mlp.experts.gate_up_proj", (0, 2)),
        (r"(.+)\.block_sparse_moe\.experts\.(\d+)\.w3\.weight", r"\1.mlp.experts.gate_up_proj", (1, 2)),
        (r"(.+)\.block_sparse_moe\.experts\.(\d+)\.w2\.weight", r"\1.mlp.experts.down_proj", (0, 1)),
    )
)
_RENAMED = ((re.compile(r"(.+)\.block_sparse_moe\.gate\.weight"), r"\1.mlp.gate.weight"),)


class Piece(NamedTuple):
    """Where a tensor of a file belongs: the model's name, and for an expert, which and which part of its rows."""

    whole: str
    expert: int | None = None
    part: int = 0
    parts: int = 1


class Left(NamedTuple):
    """What a cut leaves of a tensor of a file: under which name (None: nothing), and of which dimensions what."""

    name: str | None
    kept: Kept


def piece(name: str, known: Collection[str]) -> Piece:
    """Where a tensor of a file belongs, among the names that are known."""
    if name in known:
        return Piece(name)
    for pattern, whole, (part, parts) in _EXPERTS:
        if (found := pattern.fullmatch(name)) and found.expand(whole) in known:
            return Piece(found.expand(whole), int(found.group(2)), part, parts)
    for pattern, whole in _RENAMED:
        if (found := pattern.fullmatch(name)) and found.expand(whole) in known:
            return Piece(found.expand(whole))
    return Piece(name)


def left(name: str, shape: tuple[int, ...], of: Piece, plan: Plan) -> Left:
    """What a plan leaves of a tensor of a file; refused where it is for one of another shape."""
    if of.whole not in plan.kept:
        return Left(name, {})
    want, kept = tuple(plan.shapes[of.whole]), plan.kept[of.whole]
    rows = 0
    if of.expert is not None:
        if len(want) < 2 or of.expert >= want[0] or want[1] % of.parts:
            raise PlanError(f"the plan cuts {shown(of.whole)} of shape {want}, of which {shown(name)} is no part")
        rows = want[1] // of.parts
        want = (rows, *want[2:])
    if want != shape:
        raise PlanError(f"the plan cuts {shown(name)} of shape {want}, here it is {shape}; is it for another model?")
    if of.expert is None:
        return Left(name, kept)
    return _of_expert(name, of, kept, rows)


def _of_expert(name: str, of: Piece, kept: Kept, rows: int) -> Left:
    """What is left of an expert, which may have another number then, or be gone."""
    assert of.expert is not None
    number, experts = of.expert, kept.get(0)
    if experts is not None:
        number = bisect_left(experts, of.expert)
        if number == len(experts) or experts[number] != of.expert:
            return Left(None, {})
        head, _, tail = name.rpartition(f".experts.{of.expert}.")
        name = f"{head}.experts.{number}.{tail}"
    dims: dict[int, tuple[int, ...]] = {dim - 1: index for dim, index in kept.items() if dim > 1}
    if 1 in kept:
        first = of.part * rows
        dims[0] = tuple(i - first for i in kept[1] if first <= i < first + rows)
    return Left(name, dims)


def check_whole(pieces: Mapping[str, Piece], plan: Plan) -> None:
    """Refuse a checkpoint that holds some experts of a tensor that is cut, but not all."""
    counted: dict[str, set[tuple[int | None, int]]] = {}
    for of in pieces.values():
        if of.whole in plan.kept:
            counted.setdefault(of.whole, set()).add((of.expert, of.part))
    parts = {of.whole: of.parts for of in pieces.values()}
    for whole, found in counted.items():
        need = 1 if (None, 0) in found else plan.shapes[whole][0] * parts[whole]
        if len(found) != need:
            raise PlanError(f"the files hold {len(found)} of the {need} parts of {shown(whole)}, which the plan cuts")


__all__ = ["Left", "Piece", "check_whole", "left", "piece"]
