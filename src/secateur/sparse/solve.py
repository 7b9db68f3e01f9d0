"""Solve one layer after the other, each with the inputs that it has behind those that are sparse already.

The dense model and the one that gets zeros run on the same batches, from layer to layer (`calibrate.stages`): the
moments of one stage of layers are all that is held besides one batch. Weights that a run uses more than once, or part
by part, are solved before all others from the inputs that they have in the dense model, all uses together; so, after
all others, are those whose inputs data decide on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.arguments import shown
from secateur.calibrate import ParameterProduct, Runs, Step, Watch, call
from secateur.calibrate.blame import batch_name, because, blamed_on_batch
from secateur.calibrate.products import WIDEST, Part
from secateur.compensate.moments import Moments
from secateur.errors import CalibrationError, PlanError, SecateurError
from secateur.ops.product import MatrixProduct
from secateur.progress import progress
from secateur.sparse.layers import NUMBERS, Survey, input_order
from secateur.sparse.patterns import Pattern, Unstructured
from secateur.sparse.problem import Method, Problem, staying
from secateur.sparse.report import SparseLayer

_WHAT = "sparsify"


@dataclass
class Solver:
    """Finds zeros for the weights of `sparse`, whose other weights are those of `dense`."""

    dense: nn.Module
    sparse: nn.Module
    method: Method
    patterns: Mapping[str, Pattern]  # of each parameter that gets zeros
    streams: Mapping[str, int] = field(default_factory=dict)  # the op that made what a product's result is added to
    trusted: bool = True  # whether the method gives the zeros that it should
    _found: dict[str, list[SparseLayer]] = field(default_factory=dict)

    def layers(self) -> tuple[SparseLayer, ...]:
        """What was done to each parameter."""
        return tuple(_together(parts, self.sparse.get_parameter(name)) for name, parts in self._found.items())

    def left_alone(self, survey: Survey) -> dict[str, str]:
        """What got no zeros, or not everywhere, and why."""
        dense = {**dict.fromkeys(survey.shapes, "protected"), **survey.exempt(), **survey.unfit()}
        partly = {
            name: "a part of it: no batch reaches that"
            for name in self.patterns
            if sum(part.size for part in self._found.get(name, ())) < self.sparse.get_parameter(name).numel()
        }
        return {name: why for name, why in dense.items() if name not in self.patterns} | partly

    # weights that are used once, in the order of the run -------------------------------------------------------

    def once(self, names: Collection[str], batches: Sequence[Any]) -> None:
        """Stage by stage; both models have to be `calibrating`.

        Where data decide what a weight is given, as in experts, zeros before it change that: the rows that it reads are
        no longer those of the dense model. It and its like are solved from the inputs in the dense model.
        """
        left, routed = list(names), list[str]()
        while stage := self._stages(left, batches):
            forms = {NUMBERS.sub("*", name) for name in stage}
            routed += [name for name in left if NUMBERS.sub("*", name) in forms]
            left = [name for name in left if name not in self._found and name not in routed]
        self.repeated(routed, batches)

    def _stages(self, names: Collection[str], batches: Sequence[Any]) -> tuple[str, ...]:
        """As many stages as go; the one whose inputs were not those of the dense model, if there is any."""
        with Runs(self.dense, batches, what=_WHAT) as dense, Runs(self.sparse, batches, what=_WHAT) as sparse:
            for stage in progress(dense.record().stages(names), "sparsify"):
                if not self._stage(stage, dense, sparse):
                    return stage
        return ()

    def _stage(self, stage: tuple[str, ...], dense: Runs, sparse: Runs) -> bool:
        moments = {name: Moments() for name in stage}
        made: dict[str, ParameterProduct] = {}
        fine: list[_Fine] = []
        for number in range(len(dense.batches)):
            whole = _outputs(dense, number, stage, self.streams)
            data, left = _data(sparse, number, stage, self.streams) if len(whole) == len(stage) else (None, {})
            if data is None or any(data.shape != at.product.of.data.shape for at in whole.values()):
                return False
            made = {name: at.product for name, at in whole.items()}
            for name, at in whole.items():
                wanted = at.out if name not in left or at.stream is None else at.out + _gap(at, left[name])
                of = replace(at.product.of, data=data)
                fine += _add(moments[name], at.product, of, wanted, len(dense.batches), number)
        _check_finite(fine)
        for name, product in made.items():
            self._solve(product, moments[name])
        return True

    # weights that are used more than once, or in parts ----------------------------------------------------------

    def repeated(self, names: Collection[str], batches: Sequence[Any]) -> None:
        """From one run of the dense model on each batch."""
        moments: dict[Part, Moments] = {}
        products: dict[Part, ParameterProduct] = {}
        fine: list[_Fine] = []
        number = 0

        def take(product: ParameterProduct, run: Any) -> Any:
            out = run()
            if product.name in names:
                products.setdefault(product.part, product)
                known = moments.setdefault(product.part, Moments())
                fine.extend(_add(known, product, product.of, out, len(batches), number))
            return out

        for number, batch in enumerate(progress(batches, "sparsify") if names else ()):
            with blamed_on_batch(number, _WHAT), Watch(self.dense, take):
                call(self.dense, batch)
        _check_finite(fine)
        for part, product in products.items():
            self._solve(product, moments[part])

    # tables that rows are looked up in --------------------------------------------------------------------------

    def looked_up(self, names: Collection[str]) -> None:
        """Nothing can make up for an entry that is handed on as it is: by any method, the smallest go."""
        for name in names:
            weight = self.dense.get_parameter(name).detach().unsqueeze(0)
            solved = torch.where(staying(weight.abs().float(), weight != 0, self.patterns[name]), weight, 0)
            self.sparse.get_parameter(name).copy_(solved[0])
            off, size = (float(t.float().square().sum()) for t in (weight - solved, weight))
            self._note(name, weight, solved, (0.0, off / max(size, 1e-30)))

    # one weight ---------------------------------------------------------------------------------------------------

    def _solve(self, product: ParameterProduct, moments: Moments) -> None:
        moments, weight = moments.cpu(), product.weight.detach().float().cpu()
        problem = _problem(weight, moments, product.name)
        order = input_order(product.of.inputs, product.of.summed)
        solved = self._solved(problem if order is None else _ordered(problem, order), product.name)
        solved = solved if order is None else solved[..., order.argsort()]
        self._write(product, solved)
        total = float(moments.yy.sum().clamp_min(1e-30))
        before, after = (float(moments.error(w, None).sum()) / total for w in (weight, solved))
        self._note(product.name, weight, solved, (before, after))

    def _note(self, name: str, weight: Tensor, solved: Tensor, errors: tuple[float, float]) -> None:
        zeros = int((solved == 0).sum()), int((weight == 0).sum())
        self._found.setdefault(name, []).append(SparseLayer(name, tuple(weight.shape), *zeros, *errors))

    def _solved(self, problem: Problem, name: str) -> Tensor:
        """What the method makes of a problem, looked at."""
        pattern = self.patterns[name]
        try:
            solved = self.method(problem, pattern)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise CalibrationError(
                f"{name}: the moments of its inputs are singular ({error}); give more data or a larger ridge"
            ) from error
        except SecateurError:
            raise
        except Exception as error:  # a method may be any code of the user's
            raise PlanError(f"sparsify: method(problem, pattern) failed on {name}: {because(error)}") from error
        _check_solution(solved, problem, None if self.trusted else pattern, name)
        return solved

    def _write(self, product: ParameterProduct, weight: Tensor) -> None:
        """Put a weight where the product has it, but into the model that gets zeros."""
        view, into = product.of.weight, self.sparse.get_parameter(product.name)
        same = torch.as_strided(into, view.shape, view.stride(), view.storage_offset())
        replace(product.of, weight=same).write(weight.to(into))


@dataclass(frozen=True)
class _At:
    """A product of the dense model, what it puts out, and what that is added to."""

    product: ParameterProduct
    out: Tensor
    stream: Tensor | None


def _outputs(dense: Runs, number: int, stage: tuple[str, ...], streams: Mapping[str, int]) -> dict[str, _At]:
    """What the products of a stage put out in the dense model."""
    found: dict[str, _At] = {}

    def see(step: Step) -> Any:
        product = step.product if step.name in stage else None
        out = step.run()
        if product is not None:
            stream = step.made(streams[product.name]) if product.name in streams else None
            found[product.name] = _At(product, out, stream)
            if len(found) == len(stage):
                step.hold()
                step.stop()
        return out

    dense.run(number, see, [streams[name] for name in stage if name in streams])
    return found


def _data(
    sparse: Runs, number: int, stage: tuple[str, ...], streams: Mapping[str, int]
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What the products of a stage read in the model that gets zeros, and what their results are added to."""
    found: list[Tensor] = []
    left: dict[str, Tensor] = {}

    def see(step: Step) -> Any:
        if step.name == stage[0]:
            assert step.product is not None
            found.append(step.product.of.data)
            made = {name: step.made(streams[name]) for name in stage if name in streams}
            left.update({name: stream for name, stream in made.items() if stream is not None})
            step.hold()
            step.stop()
        return step.run()

    sparse.run(number, see, [streams[name] for name in stage if name in streams])
    return next(iter(found), None), left


def _gap(at: _At, left: Tensor) -> Tensor | float:
    """What the stream lacks in the model that gets zeros, in the shape of the product's output."""
    if at.stream is None or at.stream.numel() != at.out.numel() or left.numel() != at.out.numel():
        return 0.0
    return (at.stream - left).reshape(at.out.shape)


_Fine = tuple[str, int, Tensor]  # whether what is known of a layer, after so many batches, is finite


def _add(
    moments: Moments, product: ParameterProduct, of: MatrixProduct, out: Tensor, shares: int, number: int
) -> list[_Fine]:
    """Take in the inputs of a product and what the dense model puts out there, without its bias."""
    if not of.data.numel():  # an expert that no row of this batch came to
        return []
    if not product.narrow:
        raise CalibrationError(
            f"{product.name} sums over {of.summed} inputs; methods that look at moments take {WIDEST}: protect it"
        )
    sample = of.sample(-(-product.enough // shares), number)
    for x, y in zip(of.rows(sample), product.of.outputs(out, sample), strict=True):
        moments.add(x, y if product.shift is None else y - product.shift)
    return [(product.name, number, moments.xx.isfinite().all() & moments.xy.isfinite().all())]


def _check_finite(fine: Sequence[_Fine]) -> None:
    """Refuse what is no numbers, and say from which batch on; the device is asked once."""
    flags = [flag.to(fine[0][2].device) for *_, flag in fine]
    wrong = (~torch.stack(flags)).nonzero().flatten().tolist() if flags else []
    if wrong:
        name, number, _ = fine[wrong[0]]
        raise CalibrationError(
            f"{_WHAT}: {batch_name(number)}: what goes into {name}, or comes out of it, is not finite; are the weights?"
        )


def _check_solution(solved: object, problem: Problem, pattern: Pattern | None, name: str) -> None:
    """Refuse what a method gave, where it is no weight or has not the zeros of a pattern.

    Anywhere, the number of zeros may be rounded row by row.
    """
    weight = problem.weight
    if not isinstance(solved, Tensor) or solved.shape != weight.shape:
        got = tuple(solved.shape) if isinstance(solved, Tensor) else shown(solved)
        raise PlanError(f"sparsify: method gives a weight of shape {tuple(weight.shape)} for {name}, not {got}")
    if not solved.isfinite().all():
        raise CalibrationError(f"{name}: the solution is not finite; protect it, or give a larger ridge")
    if pattern is None:
        return
    over = int(((solved != 0) & ~problem.mask(solved.abs().to(weight.dtype), pattern)).sum())
    if over > (weight.shape[:2].numel() if isinstance(pattern, Unstructured) else 0):
        raise PlanError(
            f"sparsify: method leaves {over} weights of {name} too many for {pattern}; problem.mask(scores, pattern) "
            "says which may stay"
        )


def _problem(weight: Tensor, moments: Moments, name: str) -> Problem:
    n = max(1, moments.rows)
    if not moments.rows or not moments.xx.diagonal(dim1=-2, dim2=-1).any():
        raise CalibrationError(
            f"{name}: all of its inputs are zero in every batch, so nothing tells its weights apart; give data that "
            f"reach it, or protect=({name!r},)"
        )
    price = torch.ones(weight.shape[:2])
    return Problem(weight, (moments.xx / n).float(), (moments.xy.mT / n).float(), weight != 0, price, n)


def _ordered(problem: Problem, order: Tensor) -> Problem:
    """The summed elements in another order."""
    return replace(
        problem,
        weight=problem.weight[..., order],
        xx=problem.xx[:, order][..., order],
        yx=problem.yx[..., order],
        free=problem.free[..., order],
    )


def _together(parts: list[SparseLayer], whole: Tensor) -> SparseLayer:
    """The parts of one parameter as one."""
    zeros, before = int((whole == 0).sum()), sum(part.zeros_before for part in parts)
    errors = [sum(getattr(part, name) for part in parts) / len(parts) for name in ("before", "after")]
    return SparseLayer(parts[0].name, tuple(whole.shape), zeros, before, *errors)
