"""Size equations: which places absorb a cut, and which counts of axes must move together.

Every size argument of the traced run is an expression that must come out as the size of a layout after any cut: for
`x.view(n, self.heads, x.shape[-1] // self.heads)`, `heads = |axis 1|` and `|width| // heads = |axis 2|`. A place that
the model reads (`blocks.0.attn.num_heads`) absorbs the change where it can: an equation with one unknown place is
solved for it, which may leave another with one unknown, and so on. What is left over are constraints on counts. Those
that hold whatever is cut, as a handful of trial cuts tell, are dropped; those that only the whole of an axis satisfies
fix it.
"""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from secateur.axes import Atom, Layout, Product, fix, free_atoms, note, resolve
from secateur.axes import atoms as atoms_in
from secateur.axes.polynomial import Counts
from secateur.sizes.explain import Explainer, SizeEquation
from secateur.sizes.size import ARITHMETIC, COMPARISONS, Attr, Dim, Expr, Lit, Op, expr_atoms, parts, places, words
from secateur.state.held import Place
from secateur.tracing.tracer import Tracer

Program = Callable[[Counts], Any]
_PAIRS = 4096  # of counts, that are all tried
_NUMBERED = re.compile(r"\.\d+\.")


@dataclass(frozen=True, eq=False)
class Constraint:
    """`left symbol right` must come out as `outcome` after any cut."""

    symbol: str
    left: Expr
    right: Expr
    outcome: bool
    where: str
    why: str = ""  # what keeps an axis whole that cannot satisfy it, if that is not plain from the rest

    def __str__(self) -> str:
        negation = "" if self.outcome else "not "
        return f"{negation}{self.left} {self.symbol} {self.right}"

    @cached_property
    def shape(self) -> str:
        """What it says, whichever layer it says it of."""
        return _NUMBERED.sub(".", f"{self} at {self.where}")


class Equations:
    """Solved equations. `held_now` is what each place holds that they speak of, `whole` the axes that they do not let
    lose anything, with the reason; `names` is asked what to call an axis in one. Of `fields` those stay as they are
    without which the others could not be told.
    """

    def __init__(
        self,
        wanted: Iterable[Constraint],
        seen: Iterable[Constraint],
        said: Mapping[Place, Expr],
        held_now: Mapping[Place, float],
        names: Callable[[], Mapping[Atom, str]],
        fields: Collection[Place] = (),
    ) -> None:
        self.wanted, self.seen, self._said = _distinct(wanted), _distinct(seen), said
        exprs = [expr for c in (*self.wanted, *self.seen) for expr in (c.left, c.right)]
        self.read = {place for expr in exprs for place in places(expr)}  # by code that was followed
        self.definitions = {place: expr for place, expr in said.items() if place in held_now}
        self.held_now = held_now
        self.whole: dict[Atom, str] = {}
        self._programs: dict[int, tuple[Expr, Program]] = {}  # by the id of the expression
        self._involved: dict[tuple[Expr, ...], list[Atom]] = {}
        self._solved = False
        equal = (("==", True), ("!=", False))
        self._define([*self.wanted, *(c for c in self.seen if (c.symbol, c.outcome) in equal)], fields)
        self._programs.clear()  # now all that can be defined is
        self.constraints = self._tighten(self._open([*self.wanted, *self.seen]), names)
        self._solved = True

    @staticmethod
    def of(tracer: Tracer, read: Callable[[Place], int], names: Callable[[], Mapping[Atom, str]]) -> "Equations":
        """Those of a traced run. Axes that must stay whole are fixed; `read` tells what places hold."""
        sizes = tracer.sizes
        lone = _lone(sizes) - names().keys()
        met = [e for e in sizes.equations if not _follows(e, lone)]
        wanted = [Constraint("==", e.expr, Dim(e.layout), True, e.where, e.why) for e in met]
        seen = [Constraint(c.symbol, c.left, c.right, c.outcome, c.where, c.why) for c in sizes.comparisons]
        exprs = [e for c in (*wanted, *seen) for e in (c.left, c.right)] + [use.expr for use in sizes.value_uses]
        asked = dict.fromkeys(place for expr in exprs for place in places(expr))  # in an order that every process has
        said = {place: expr for place, expr in tracer.said.items() if place in asked}
        inner = dict.fromkeys(place for expr in said.values() for place in places(expr))
        made = Equations(wanted, seen, said, {place: read(place) for place in asked | inner}, names)
        made.read = {*asked}
        for atom, reason in made.whole.items():
            fix(atom, reason)
        for use in sizes.value_uses:
            for atom in made.atoms_of(use.expr):
                note(atom, f"its size is used as a number, by {use.use} ({use.where})")
        return made

    def joined(
        self, more: Iterable[Constraint], held: Mapping[Place, float], names: Callable[[], Mapping[Atom, str]]
    ) -> "Equations":
        """These and those of another program that speaks of the same axes; nothing is fixed by it."""
        wanted, seen = [*self.wanted], [*self.seen]
        for constraint in more:
            (wanted if constraint.symbol == "==" and constraint.outcome else seen).append(constraint)
        return Equations(wanted, seen, self._said, {**self.held_now, **held}, names, held)

    # evaluation --------------------------------------------------------------------------------------------

    def value(self, expr: Expr, counts: Counts) -> Any:
        """An expression after a cut, with every place holding what it will hold."""
        return self._program(expr)(counts)

    def held(self, place: Place, counts: Counts) -> Any:
        """What a place holds after a cut."""
        return self._program(Attr(place))(counts)

    def _program(self, expr: Expr) -> Program:
        """A function of counts. Searches for counts evaluate the same expressions thousands of times."""
        if isinstance(expr, Attr):
            return self._held_program(expr.place)
        if id(expr) not in self._programs:
            self._programs[id(expr)] = expr, self._made(expr)
        return self._programs[id(expr)][1]

    def _made(self, expr: Op | Dim | Lit) -> Program:
        if isinstance(expr, Op):
            compute, left, right = ARITHMETIC[expr.symbol], self._program(expr.left), self._program(expr.right)
            return lambda counts: compute(left(counts), right(counts))
        if isinstance(expr, Lit):
            value = expr.value
            return lambda _: value
        return _size_program(expr.layout)

    def _held_program(self, place: Place) -> Program:
        defined, now = self.definitions.get(place), self.held_now[place]
        if defined is None:
            return lambda _: now
        inner = self._program(defined)
        return (lambda counts: int(inner(counts))) if isinstance(now, int) else (lambda counts: float(inner(counts)))

    def holds(self, constraint: Constraint, counts: Counts) -> bool:
        try:
            left, right = self.value(constraint.left, counts), self.value(constraint.right, counts)
        except ZeroDivisionError:
            return False
        return COMPARISONS[constraint.symbol](left, right) == constraint.outcome

    def atoms_of(self, *exprs: Expr) -> list[Atom]:
        """The free axes whose counts an expression depends on, through places too."""
        if self._solved and exprs in self._involved:
            return self._involved[exprs]
        found: dict[Atom, None] = {}
        for expr in exprs:
            found.update(dict.fromkeys(atom for atom in expr_atoms(expr) if atom not in self.whole))
            for place in places(expr):
                if place in self.definitions:
                    found.update(dict.fromkeys(self.atoms_of(self.definitions[place])))
        if self._solved:
            self._involved[exprs] = list(found)
        return list(found)

    def changed_places(self, counts: Counts) -> dict[Place, Any]:
        """The places that must be rewritten for a cut, with their new values."""
        changed = {}
        for place in self.definitions:
            value = self.held(place, counts)
            if value != self.held_now[place]:
                changed[place] = value
        return changed

    # definitions -------------------------------------------------------------------------------------------

    def _define(self, equations: list[Constraint], fields: Collection[Place]) -> None:
        for equation in equations:
            for side, other in ((equation.left, equation.right), (equation.right, equation.left)):
                if isinstance(side, Attr) and not places(other) and self.held_now[side.place] == self.value(other, {}):
                    self.definitions.setdefault(side.place, other)
        stays: set[Place] = set()
        pending = equations
        while pending:
            rest = []
            for equation in pending:
                unknown = [place for place in self._unknown(equation) if place not in stays]
                if len(unknown) == 1:
                    self._solve(equation, unknown[0])
                elif unknown:
                    rest.append(equation)
            if len(rest) == len(pending):
                among = fields or {place for e in rest for side in (e.left, e.right) for place in _divisors(side)}
                hardest = _hardest(rest, [p for e in rest for p in self._unknown(e) if p in among and p not in stays])
                if hardest is None:
                    break
                stays.add(hardest)
            pending = rest

    def _unknown(self, equation: Constraint) -> list[Place]:
        both = (*places(equation.left), *places(equation.right))
        return [place for place in dict.fromkeys(both) if place not in self.definitions]

    def _solve(self, equation: Constraint, place: Place) -> None:
        """Define the only unknown place of an equation, by undoing the arithmetic around it."""
        here, there = equation.left, equation.right
        if _uses(here, place) + _uses(there, place) != 1:
            return
        if _uses(there, place):
            here, there = there, here
        for divided in (0, 1):
            found = self._undone(here, there, place, divided)
            with suppress(ZeroDivisionError):  # it cannot be told in this way
                if found is not None and self.held_now[place] == self.value(found, {}):
                    self.definitions[place] = found
                    return

    def _undone(self, here: Expr, there: Expr, place: Place, divided: int) -> Expr | None:
        real = isinstance(self.held_now[place], float)
        while isinstance(here, Op):
            on_left = _uses(here.left, place) > 0
            undone = _undo(here, there, on_left, real=real, divided=divided)
            if undone is None:
                return None
            here, there = (here.left if on_left else here.right), undone
        return there

    # constraints -------------------------------------------------------------------------------------------

    def _open(self, constraints: Iterable[Constraint]) -> list[Constraint]:
        """Those that do not hold whatever is cut, found by trying."""
        rng = random.Random(0)
        left = []
        for constraint in constraints:
            atoms = self.atoms_of(constraint.left, constraint.right)
            if atoms and not self._always(constraint, atoms, rng):
                left.append(constraint)
        return left

    def _always(self, constraint: Constraint, atoms: list[Atom], rng: random.Random) -> bool:
        tries = [{atom: max(1, atom.size // 2) for atom in atoms}, dict.fromkeys(atoms, 1)]
        tries += [{atom: rng.randint(1, atom.size) for atom in atoms} for _ in range(6)]
        tries += [{atom: atom.size - 1} for atom in atoms[:8]]
        literals = {p.value for e in (constraint.left, constraint.right) for p in parts(e) if isinstance(p, Lit)}
        near = {int(n) + d for n in literals if math.isfinite(n) for d in (-1, 0, 1)}
        tries += [{atom: n} for atom in atoms[:8] for n in near if 0 < n < atom.size]
        return all(self.holds(constraint, counts) for counts in tries)

    def _tighten(self, constraints: list[Constraint], names: Callable[[], Mapping[Atom, str]]) -> list[Constraint]:
        """Fix the axes that some constraint lets keep only all of their positions; until nothing changes."""
        while True:
            changed = False
            rest = []
            for constraint in constraints:
                atoms = self.atoms_of(constraint.left, constraint.right)
                if not atoms:
                    continue
                whole = self._only_whole(constraint, atoms)
                if whole:
                    self.whole |= dict.fromkeys(whole, _reason(constraint, names()))
                    changed = True
                if len(whole) < len(atoms):
                    rest.append(constraint)
            constraints = rest
            if not changed:
                return constraints

    def _only_whole(self, constraint: Constraint, atoms: list[Atom]) -> set[Atom]:
        """Those of its axes, one or two small ones, that lose nothing wherever a constraint holds."""
        if len(atoms) > 2 or math.prod(atom.size for atom in atoms) > max(_PAIRS, atoms[0].size):
            return set()
        found = {*atoms}
        for sizes in itertools.product(*(range(1, atom.size + 1) for atom in atoms)):
            counts = dict(zip(atoms, sizes, strict=True))
            if any(counts[atom] < atom.size for atom in found) and self.holds(constraint, counts):
                found -= {atom for atom in atoms if counts[atom] < atom.size}
                if not found:
                    break
        return found


def _size_program(layout: Layout) -> Program:
    """The size of a layout, as a function of counts."""
    layout = resolve(layout)
    if isinstance(layout, Atom):
        atom, size = layout, layout.size
        return (lambda counts: counts.get(atom, size)) if layout.fixed is None else (lambda _: size)
    if not free_atoms(layout):
        whole = layout.size
        return lambda _: whole
    parts, combine = [_size_program(part) for part in layout.parts], math.prod if isinstance(layout, Product) else sum
    return lambda counts: combine([part(counts) for part in parts])


def _lone(sizes: Explainer) -> set[Atom]:
    """Axes that were made from nothing, and of which one size speaks."""
    speak = Counter(atom for expr in sizes.exprs() for atom in expr_atoms(expr))
    speak.update(atom for equation in sizes.equations for atom in free_atoms(equation.layout))
    return {atom for atom, times in speak.items() if times == 1 and atom in sizes.made}


def _follows(equation: SizeEquation, lone: Collection[Atom]) -> bool:
    """Whether an axis that was made with a size has met nothing since: then it is as long as it is told to be.

    What was computed from it may tell how long it was, so that the axes that told it are inexact.
    """
    told = expr_atoms(equation.expr)
    if not told or resolve(equation.layout) not in lone:
        return False
    for atom in told:
        note(atom, f"a tensor is made with its size ({equation.where})")
    return True


def _distinct(constraints: Iterable[Constraint]) -> list[Constraint]:
    """Each only once: runs say the same about the same axes."""
    found = {(c.symbol, c.outcome, _key(c.left), _key(c.right)): c for c in reversed([*constraints])}
    return [*found.values()][::-1]


def _key(expr: Expr) -> object:
    """What two expressions have in common that are made of the same axes, places and numbers in the same way."""
    if isinstance(expr, Op):
        return expr.symbol, _key(expr.left), _key(expr.right)
    return _layout_key(resolve(expr.layout)) if isinstance(expr, Dim) else expr


def _layout_key(layout: Layout) -> object:
    if isinstance(layout, Atom):
        return layout.size if layout.fixed is not None else layout
    return type(layout), tuple(map(_layout_key, layout.parts))


def _reason(constraint: Constraint, names: Mapping[Atom, str]) -> str:
    """Why a constraint keeps an axis whole, in words."""
    if constraint.why:
        return constraint.why
    literal = next((p for e in (constraint.left, constraint.right) for p in parts(e) if isinstance(p, Lit)), None)
    equal = constraint.symbol == "==" and constraint.outcome
    if equal and (isinstance(constraint.left, Lit) or isinstance(constraint.right, Lit)):
        assert literal is not None
        return f"{literal.value} is a literal at {constraint.where}; hold it in an attribute to make it cuttable"

    def named(layout: Layout) -> str:
        found = next((names[atom] for atom in atoms_in(layout) if atom in names), None)
        return f"a size of {layout.size}" if found is None else f"the {layout.size} of {found}"

    negation = "" if constraint.outcome else "not "
    left, right = (words(expr, named) for expr in (constraint.left, constraint.right))
    return f"its size must satisfy {negation}{left} {constraint.symbol} {right} at {constraint.where}"


def _uses(expr: Expr, place: Place) -> int:
    """How often an expression reads a place."""
    return sum(isinstance(part, Attr) and part.place == place for part in parts(expr))


def _divisors(expr: Expr) -> Iterator[Place]:
    """The places by which something is divided: a number of heads may stay as it is where a width follows."""
    if isinstance(expr, Op):
        if expr.symbol in ("//", "/") and isinstance(expr.right, Attr):
            yield expr.right.place
        yield from (*_divisors(expr.left), *_divisors(expr.right))


def _hardest(equations: Sequence[Constraint], among: Sequence[Place]) -> Place | None:
    """The place that stands most in the way of telling the others: equations read it more than once, and many do."""

    def weight(place: Place) -> tuple[int, int]:
        uses = [_uses(e.left, place) + _uses(e.right, place) for e in equations]
        return sum(n > 1 for n in uses), sum(n > 0 for n in uses)

    return max(dict.fromkeys(among), key=weight, default=None)


def _undo(op: Op, result: Expr, on_left: bool, *, real: bool, divided: int) -> Expr | None:
    """The expression for the operand on one side of `left op right = result`; None where it is not determined.

    `real`: what is looked for in the end is no whole number. Of all that a whole division makes the same of, it is the
    least, or with `divided=1` the one in the middle: `(n + 4) // 8 * 8` rounds.
    """
    if op.symbol in ("ceil", "round"):
        return result
    quotient = "least ratio" if real else "//"
    if on_left:
        inverse = {"+": "-", "-": "+", "*": quotient, "//": "*", "/": "*"}.get(op.symbol)
        if inverse is None:
            return None
        least = Op(inverse, result, op.right)
        return Op("+", least, Op("//", op.right, Lit(2))) if divided and op.symbol == "//" else least
    if op.symbol in ("+", "*"):
        return Op("-" if op.symbol == "+" else quotient, result, op.left)
    if op.symbol in ("-", "//", "/"):
        return Op("-" if op.symbol == "-" else "/" if real else "//", op.left, result)
    return None
