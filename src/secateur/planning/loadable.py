"""Plans that a model's constructor can build: the result is an ordinary model, which its own library loads.

The constructor was followed as a program (`tracing.constructor`): each dimension of each parameter, and each number
that a module holds, is an expression over its fields. After a cut these must come out as what the cut model has, with
some values of the fields; that makes more equations of the kind that plans satisfy already. What equations cannot tell
(a table that is computed anew, a scale made of a width, a validator) is found by building: the constructor is called
with the new fields, and what it makes is compared with what the cut would leave, number by number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from secateur.axes import free_atoms, size_after
from secateur.axes.polynomial import Counts
from secateur.errors import PlanError
from secateur.planning.counts import components, settle, settle_group
from secateur.sizes.size import Attr, Dim, Lit
from secateur.state.held import Key, Place
from secateur.tracing.constructor import Constructed, Field, Maker, Sized, constructed, numbers_in
from secateur.tracing.equations import Constraint
from secateur.tracing.graph import Axis, Graph
from secateur.tracing.makers import maker_of, with_fields
from secateur.tracing.shell import tables


class Loadable:
    """What of a graph can be cut so that the model's constructor builds the result."""

    def __init__(self, graph: Graph) -> None:
        maker = maker_of(graph.model, graph.make)
        if maker is None:
            raise PlanError(
                f"loadable=True: how a {graph.source.name} is built is not known; "
                "trace it with make=functools.partial(Net, width=64): the call that builds it"
            )
        self._whole_graph, self.maker = graph, with_fields(maker, graph.model)
        self._base = _built(self.maker, {})
        made = _followed(self.maker, graph.model)
        _check_same(graph, self._base)
        names = {axis.atom: axis.name for axis in graph.axes}
        self.fields = self.maker.fields()
        self.equations = graph.equations.joined(_demands(graph, made), self.fields, lambda: names)
        self.held_back: dict[Axis, str] = {
            a: self.equations.whole[a.atom] for a in graph.axes if a.atom in self.equations.whole
        }
        self._try_each()

    @property
    def graph(self) -> Graph:
        """The graph with only the axes that the constructor lets be cut, under its equations as well."""
        axes = tuple(axis for axis in self._whole_graph.axes if axis not in self.held_back)
        return replace(self._whole_graph, axes=axes, equations=self.equations)

    def why(self, *, all_: bool = False) -> str:
        """What the constructor keeps from being cut, in words; `all_`: also what no counts of others would free."""
        reasons = Counter([*self.held_back.values(), *(self._stuck() if all_ else ())])
        return "; ".join(
            f"{'an axis stays' if n == 1 else f'{n} axes stay'} whole, as it is made: {r}"
            for r, n in reasons.most_common(3)
        )

    def _stuck(self) -> Iterator[str]:
        """Why axes stay whole whose counts depend on each other, if there are no other counts for them."""
        of = {axis.atom for axis in self.graph.axes}
        for atoms, constraints in components(self.equations):
            least = {atom: 1 if atom in of else atom.size for atom in atoms}
            settled = settle_group(self.equations, atoms, constraints, least)
            broken = (c for c in constraints if not self.equations.holds(c, least))
            if all(settled[atom] == atom.size for atom in atoms) and (first := next(broken, None)) is not None:
                why = f"no counts were found with which all sizes come out right; {first.why or first}"
                yield from [why] * len(of.intersection(atoms))

    @cached_property
    def _numbers(self) -> dict[Place, Any]:
        return numbers_in(self._base)

    # by building ------------------------------------------------------------------------------------------------

    def _try_each(self) -> None:
        """Leave out axes whose cut, by itself, the constructor would not build; those of one count go together."""
        for group in _alike(self.graph):
            wanted = {axis.atom: max(1, axis.size // 2) for axis in group}
            for held in self.held_back:
                wanted.pop(held.atom, None)
            whole = {axis.atom: axis.size for axis in self.graph.axes}
            counts = settle(self.equations, {**whole, **wanted})
            if all(counts[axis.atom] == axis.size for axis in group):
                continue  # only together with others
            problem = self.problem({atom: n for atom, n in counts.items() if n < whole.get(atom, n)})
            if problem is not None:
                self.held_back |= dict.fromkeys(group, problem)

    def hold_back(self, counts: Counts) -> bool:
        """Leave out the axes that keep the constructor from building what a cut leaves; whether there are such."""
        problem = self.problem(counts)
        if problem is None:
            return False
        cut = [
            group for group in _alike(self.graph) if any(counts.get(axis.atom, axis.size) < axis.size for axis in group)
        ]
        for group in cut:
            without = {axis.atom: axis.size for axis in group}
            rest = settle(self.equations, {**{axis.atom: axis.size for axis in self.graph.axes}, **counts, **without})
            if self.problem({atom: n for atom, n in rest.items() if n < atom.size}) is None:
                self.held_back |= dict.fromkeys(group, problem)
                return True
        raise PlanError(f"loadable=True: {problem}")

    def problem(self, counts: Counts) -> str | None:
        """Why the constructor does not build what a cut leaves; None if it does."""
        try:
            self.told(counts)
        except PlanError as error:
            return str(error)
        return None

    def values(self, counts: Counts) -> dict[Place, float]:
        """The fields that change, with their new values."""
        found = {place: self.equations.held(place, counts) for place in self.fields}
        return {place: value for place, value in found.items() if value != self.fields[place]}

    def told(self, counts: Counts) -> dict[Place, tuple[Any, Any]]:
        """The numbers that modules hold and a cut changes: before, and as the constructor makes them; else refused."""
        values = self.values(counts)
        built = _built(self.maker, values)
        _check_shapes(self._whole_graph, counts, built)
        _check_tables(self._whole_graph, counts, self._base, built)
        return self._changed(counts, values, built)

    def _changed(self, counts: Counts, values: Mapping[Place, float], built: nn.Module) -> dict[Place, tuple[Any, Any]]:
        ours = self.equations.changed_places(counts)
        before, after, mine = self._numbers, numbers_in(built), numbers_in(self._whole_graph.model)
        copies = {(self.fields[place], value) for place, value in values.items()}
        found: dict[Place, tuple[Any, Any]] = {}
        for place in {**before, **after, **{p: None for p in ours if not isinstance(p, Field)}}:
            was, now = before.get(place), after.get(place)
            if place in ours and ours[place] != now:
                raise PlanError(f"the cut makes {place} {ours[place]}, the constructor {now}")
            if was == now or place not in mine:
                continue
            if was is None or now is None or mine[place] != was:
                raise PlanError(
                    f"{place} is {mine.get(place)}; the constructor makes it {was}, and {now} after the cut"
                )
            if isinstance(was, float) and (was, now) not in copies:
                raise PlanError(
                    f"the constructor computes {place} from sizes: it would be {now:.6g} instead of {was:.6g}"
                )
            found[place] = was, now
        return found


def _built(maker: Maker, values: Mapping[Place, float]) -> nn.Module:
    try:
        return maker.build(values)
    except Exception as error:  # any code of the user's may run here
        said = ", ".join(f"{place}={value}" for place, value in values.items())
        raise PlanError(
            f"the constructor refuses {said or 'its own arguments'}: {type(error).__name__}: {error}"
        ) from None


def _followed(maker: Maker, model: nn.Module) -> Constructed:
    try:
        return constructed(maker, model)
    except Exception as error:
        raise PlanError(
            f"loadable=True: the constructor of {type(model).__name__} could not be followed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _registered(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _check_same(graph: Graph, built: nn.Module) -> None:
    """Refuse a constructor that does not build the model as it is."""
    mine = {name: form.shape for name, form in graph.source.tensors.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in _registered(built).items()}
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            raise PlanError(
                f"loadable=True: the constructor does not build this model: {name} is {mine.get(name, 'not there')}, "
                f"it makes it {theirs.get(name, 'not there')}. Was the model changed or cut before? "
                "Trace it with make=, the call that builds it as it is"
            )


def _demands(graph: Graph, made: Constructed) -> Iterator[Constraint]:
    """What a constructor asks of the axes of a graph, and of the numbers that the model's code reads."""
    yield from made.constraints
    for name, sizes in made.dims.items():
        for sized, layout in zip(sizes, graph.layouts.get(name, ()), strict=False):
            yield Constraint(
                "==", sized.expr, Dim(layout), True, sized.where or f"the constructor of {name}", _size(sized)
            )
    for place, value in graph.equations.held_now.items():
        if place in graph.equations.definitions or place in made.numbers:
            expr = made.numbers.get(place, Lit(value))
            yield Constraint("==", expr, Attr(place), True, "", f"the constructor makes {place} {expr}")
    for place, expr in made.scales.items():
        why = f"the constructor computes {place} from it, which would be another"
        yield Constraint("==", expr, Lit(made.now(expr)), True, "", why)


def _size(sized: Sized) -> str:
    at = f" at {sized.where}" if sized.where else ""
    if isinstance(sized.expr, Lit):
        return f"the constructor makes it {sized.size}{at}, whatever its arguments"
    return f"the constructor makes it {sized.expr}{at}, which something else keeps as it is"


def _alike(graph: Graph) -> list[list[Axis]]:
    """Axes that only go together: those whose counts are tied by plain equations, the same in every layer."""
    of = {axis.atom: axis for axis in graph.axes}
    groups = [[of[atom] for atom in atoms if atom in of] for atoms, _ in components(graph.equations)]
    tied = {axis for group in groups for axis in group}
    by_size: list[list[Axis]] = []
    for group in groups:
        sizes: dict[int, list[Axis]] = {}
        for axis in group:
            sizes.setdefault(axis.size, []).append(axis)
        by_size += sizes.values()
    return [*by_size, *([axis] for axis in graph.axes if axis not in tied)]


def _check_shapes(graph: Graph, counts: Counts, built: nn.Module) -> None:
    theirs = _registered(built)
    for name, form in graph.source.tensors.items():
        cut = tuple(size_after(dim, counts) for dim in graph.layouts[name]) if name in graph.layouts else form.shape
        made = tuple(theirs[name].shape) if name in theirs else "not there"
        if cut != made:
            raise PlanError(f"the cut makes {name} {cut}, the constructor {made}")


def _check_tables(graph: Graph, counts: Counts, base: nn.Module, built: nn.Module) -> None:
    """Tensors that no file keeps must be, after the cut, what the constructor makes."""
    made = dict(tables(built))
    for name, tensor in tables(base):
        if any(atom in counts for dim in graph.layouts.get(name, ()) for atom in free_atoms(dim)):
            raise PlanError(f"{name} is not in files: the constructor makes it anew, so it must not be cut")
        if name in made and not _equal(tensor, made[name]):
            raise PlanError(f"the constructor computes {name}, which is not in files, from sizes: it would be another")


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and (one.is_meta or torch.equal(one, other))


def named_fields(maker: Maker, values: Mapping[Place, float]) -> dict[str, Any]:
    """Fields by name, with their new values; a field inside of a list is the list.

    >>> maker = Maker(dict, {"dims": [4, 8], "text": {"width": 2}})
    >>> named_fields(maker, {place: 2 * value for place, value in maker.fields().items()})
    {'dims': [8, 16], 'text.width': 4}
    """
    new = maker.changed(lambda place, value: values.get(place, value))
    found: dict[str, Any] = {}
    for place in values:
        value: Any = new
        path: list[Any] = []
        for step in place.path:
            if isinstance(step, int):
                break
            path.append(step)
            value = value[step.key] if isinstance(step, Key) else getattr(value, step)
        found[str(Field("", tuple(path)))] = list(value) if isinstance(value, tuple) else value
    return found


__all__ = ["Loadable", "named_fields"]
