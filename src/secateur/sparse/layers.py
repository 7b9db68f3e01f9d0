"""Which weights get zeros: those that data are multiplied with, but for the head, embeddings and routers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.calibrate import ParameterProduct, Runs, Step
from secateur.calibrate.products import Part
from secateur.compat import schema, storage_id
from secateur.errors import PlanError
from secateur.ops.index import LOOKED_UP, RANKED
from secateur.ops.pointwise import SUMS
from secateur.planning.names import named
from secateur.sparse.patterns import Pattern
from secateur.tracing.examples import tensors_in

NUMBERS = re.compile(r"\d+")  # in names: layers of one form differ in these


@dataclass
class Survey:
    """What one run multiplies data with, and what becomes of the results.

    >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 2))
    >>> from secateur.calibrate import calibrating
    >>> with calibrating(net):
    ...     found = Survey.of(net, torch.tensor([1, 2]))
    >>> list(found.products), found.heads
    (['1.weight', '2.weight'], {'2.weight'})
    """

    products: Counter[str] = field(default_factory=Counter)  # how often each parameter is multiplied with data
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # outputs and inputs of each, and of embeddings
    whole: set[str] = field(default_factory=set)  # parameters that are multiplied as a whole
    followed: set[str] = field(default_factory=set)  # whose results go into another product
    routers: set[str] = field(default_factory=set)  # whose results are ranked
    embeddings: set[str] = field(default_factory=set)
    streams: dict[str, int] = field(default_factory=dict)  # the op that made what a product's result is added to
    parts: dict[str, set[Part]] = field(default_factory=dict)  # what of each parameter is multiplied, in which order
    unseen: set[str] = field(default_factory=set)  # matrices that are not multiplied with data

    @staticmethod
    def of(model: nn.Module, example: Any) -> Survey:
        """Run a model once; it has to be `calibrating`."""
        found = Survey(unseen={name for name, parameter in model.named_parameters() if parameter.ndim > 1})
        with Runs(model, [example], what="sparsify") as runs:
            runs.record(_Flow(found, runs))
        return found

    @property
    def heads(self) -> set[str]:
        """The parameters whose products nothing but the output follows."""
        return set(self.products) - self.followed - self.routers

    def exempt(self) -> dict[str, str]:
        """The parameters that are left alone unless they are asked for, and why."""
        kinds = ((self.heads, "the head"), (self.routers, "a router"), (self.embeddings, "an embedding"))
        return {name: why for names, why in kinds for name in sorted(names) if name in self.shapes}

    def unfit(self) -> dict[str, str]:
        """The parameters that cannot get zeros, and why."""
        ways = {name for name, parts in self.parts.items() if len(parts) > 1 and self._overlap(name)}
        unseen = dict.fromkeys(sorted(self.unseen), "not itself multiplied with data in the first batch")
        return {**unseen, **dict.fromkeys(ways, "read in more than one way, such as transposed")}

    def _overlap(self, name: str) -> bool:
        """Whether parts of a parameter that are read apart may share entries."""
        offsets = Counter(offset for _, offset, _ in self.parts[name])
        return name in self.whole or max(offsets.values()) > 1


class _Flow:
    """Follows which products a tensor was made from since the last one, by its memory."""

    def __init__(self, found: Survey, runs: Runs) -> None:
        self._found, self._parameters = found, runs.parameters
        self._learnt = {name for name, _ in runs.model.named_parameters(remove_duplicate=False)}
        self._from: dict[int, frozenset[str]] = {}
        self._made: dict[int, int] = {}  # the number of the op that last wrote into some memory
        self._results: dict[int, str] = {}  # memory that holds the result of a product, and nothing else

    def __call__(self, step: Step) -> Any:
        product = step.product
        if product is None or product.name not in self._learnt:  # a buffer is no parameter
            return self._op(step)
        return self._product(product, step)

    def _product(self, product: ParameterProduct, step: Step) -> Any:
        found, name, of = self._found, product.name, product.of
        found.products[name] += 1
        found.parts.setdefault(name, set()).add(product.part)
        found.unseen.discard(name)
        groups, outputs, _ = product.weight.shape
        found.shapes[name] = groups * outputs, of.inputs
        if of.weight.numel() == self._parameters.tensors[name].numel():
            found.whole.add(name)
        found.followed |= self._of(of.data)
        out = step.run()
        at = storage_id(out)
        self._from[at], self._made[at], self._results[at] = frozenset({name}), step.number, name
        return out

    def _op(self, step: Step) -> Any:
        given = list(tensors_in((step.args, step.kwargs)))
        sources = frozenset().union(*(self._of(tensor) for tensor in given))
        if step.op in RANKED:
            self._found.routers |= sources
        if step.op in LOOKED_UP and (name := self._parameters.name(step.args[0])) is not None:
            self._table(name)
        if step.op in SUMS and len(given) == 2 == len(step.args) and not step.kwargs:
            self._sum(*given)
        memory = {storage_id(tensor) for tensor in given}
        out = step.run()
        for tensor in tensors_in(out):
            at = storage_id(tensor)
            self._from[at] = sources | (self._from.get(at, frozenset()) if at in memory else frozenset())
            if at not in memory or schema(step.op).is_mutable:
                self._made[at] = step.number
                self._results.pop(at, None)
        return out

    def _table(self, name: str) -> None:
        """Rows of a parameter are looked up."""
        found, whole = self._found, self._parameters.tensors[name]
        found.embeddings.add(name)
        if whole.ndim == 2 and name in self._learnt:
            found.shapes.setdefault(name, (whole.shape[0], whole.shape[1]))
            found.unseen.discard(name)

    def _sum(self, one: Tensor, other: Tensor) -> None:
        """The result of a product is added to something: if that was there before it, it is a residual stream."""
        for mine, stream in ((one, other), (other, one)):
            name = self._results.get(storage_id(mine))
            number = self._made.get(storage_id(stream))
            before = name is not None and number is not None and number < self._made[storage_id(mine)]
            if before and name is not None and number is not None and mine.shape == stream.shape:
                self._found.streams.setdefault(name, number)

    def _of(self, tensor: Tensor) -> frozenset[str]:
        return self._from.get(storage_id(tensor), frozenset())


def input_order(inputs: int, summed: int) -> Tensor | None:
    """The summed elements of a product in the order in which the inputs at one place of its kernel follow each other.

    >>> input_order(inputs=2, summed=6)  # those of the first of three places, of the second, of the third
    tensor([0, 3, 1, 4, 2, 5])

    None where that is the order that they have.
    """
    if inputs in (1, summed):
        return None
    return torch.arange(summed).view(inputs, -1).T.flatten()


def chosen(survey: Survey, pattern: Pattern, protect: Collection[str], include: Collection[str]) -> tuple[str, ...]:
    """The parameters that get zeros, in the order of the run; refused where one cannot have the pattern."""
    weights = list(survey.shapes)
    for what, globs in (("protect", protect), ("include", include)):
        for glob in globs:
            if not any(named(name, glob) for name in weights):
                some = ", ".join(list(survey.products)[:3])
                raise PlanError(f"{what}={glob!r} names no weight that data are multiplied with; these are {some}, …")
    exempt, unfit = survey.exempt(), survey.unfit()
    wanted = [
        name
        for name in weights
        if (name not in exempt or any(named(name, glob) for glob in include))
        and name not in unfit
        and not any(named(name, glob) for glob in protect)
    ]
    if not wanted:
        left = (
            "; ".join(f"{name} is {why}" for name, why in list({**unfit, **exempt}.items())[:3]) or "all are protected"
        )
        raise PlanError(f"there is no weight that may get zeros ({left}); name some with include=")
    _check_fit(survey, pattern, wanted)
    return tuple(wanted)


def _check_fit(survey: Survey, pattern: Pattern, wanted: Sequence[str]) -> None:
    reasons = {name: pattern.fits(survey.shapes[name]) for name in wanted}
    odd = {name: why for name, why in reasons.items() if why is not None}
    if odd:
        some = "; ".join(f"{name}: {why}" for name, why in list(odd.items())[:4])
        names = ", ".join(map(repr, _globs(odd, survey.shapes)))
        many = "1 weight" if len(odd) == 1 else f"{len(odd)} weights"
        raise PlanError(f"{pattern} does not fit {many} ({some}); leave such dense: protect=({names},)")


def _globs(names: Collection[str], among: Collection[str]) -> list[str]:
    """A few globs that name some of many, and no others.

    >>> _globs(["0.weight", "a.0.conv", "a.1.conv"], ["0.weight", "1.weight", "a.0.conv", "a.0.fc", "a.1.conv"])
    ['0.weight', 'a.*.conv']
    """
    found = dict.fromkeys(NUMBERS.sub("*", name) for name in names)
    meant = {glob: [name for name in among if named(name, glob)] for glob in found}
    short = [glob for glob in found if len(meant[glob]) > 1 and set(meant[glob]) <= set(names)]
    return [*(name for name in names if not any(name in meant[glob] for glob in short)), *short]
