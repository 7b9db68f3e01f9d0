"""Size equations: which places absorb a cut, and which counts of axes must move together.

Every size argument of the traced run is an expression that must come out as the size of a layout after any cut. A
place that the model reads (`blocks.0.attn.num_heads`) absorbs the change where it can: it is defined by an equation.
What is left over are constraints on counts; those that always hold are dropped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from secateur.axes import Atom, Layout, fix, note
from secateur.axes import atoms as atoms_in
from secateur.trace.sizes import (
    COMPARISONS,
    Attr,
    Dim,
    Expr,
    Lit,
    Op,
    Place,
    evaluate,
    expr_atoms,
    parts,
    places,
    words,
)
from secateur.trace.tracer import Tracer

Counts = Mapping[Atom, int]


@dataclass(frozen=True, eq=False)
class Constraint:
    """`left symbol right` must come out as `outcome` after any cut."""

    symbol: str
    left: Expr
    right: Expr
    outcome: bool
    where: str

    def __str__(self) -> str:
        negation = "" if self.outcome else "not "
        return f"{negation}{self.left} {self.symbol} {self.right}"


class Sizes:
    """The solved equations of a traced run."""

    def __init__(self, tracer: Tracer, now: Callable[[Place], int], names: Callable[[], Mapping[Atom, str]]) -> None:
        self._now = now
        self._names = names
        wanted = [Constraint("==", e.expr, Dim(e.layout), True, e.where) for e in tracer.equations]
        seen = [Constraint(c.symbol, c.left, c.right, c.outcome, c.where) for c in tracer.comparisons]
        exprs = [e for c in (*wanted, *seen) for e in (c.left, c.right)] + [use.expr for use in tracer.value_uses]
        self.read = {place for expr in exprs for place in places(expr)}  # by the model's code, in the traced run
        self.definitions = {place: expr for place, expr in tracer.said.items() if place in self.read}
        self._define([*wanted, *(c for c in seen if (c.symbol, c.outcome) in (("==", True), ("!=", False)))])
        self.constraints = self._tighten(self._open([*wanted, *seen]))
        for use in tracer.value_uses:
            for atom in self.atoms_of(use.expr):
                note(atom, f"its size is used as a number, by {use.use} ({use.where})")

    # evaluation --------------------------------------------------------------------------------------------

    def value(self, expr: Expr, counts: Counts) -> int:
        """An expression after a cut, with every place holding what it will hold."""
        return evaluate(expr, counts, lambda place: self.held(place, counts))

    def held(self, place: Place, counts: Counts) -> int:
        """What a place holds after a cut."""
        defined = self.definitions.get(place)
        return self._now(place) if defined is None else self.value(defined, counts)

    def holds(self, constraint: Constraint, counts: Counts) -> bool:
        try:
            left, right = self.value(constraint.left, counts), self.value(constraint.right, counts)
        except ZeroDivisionError:
            return False
        return COMPARISONS[constraint.symbol](left, right) == constraint.outcome

    def atoms_of(self, *exprs: Expr) -> list[Atom]:
        """The free axes whose counts an expression depends on, through places too."""
        found: dict[Atom, None] = {}
        for expr in exprs:
            found.update(dict.fromkeys(expr_atoms(expr)))
            for place in places(expr):
                if place in self.definitions:
                    found.update(dict.fromkeys(self.atoms_of(self.definitions[place])))
        return list(found)

    def changed_places(self, counts: Counts) -> dict[Place, int]:
        """The places that must be rewritten for a cut, with their new values."""
        changed = {}
        for place in self.definitions:
            value = self.held(place, counts)
            if value != self._now(place):
                changed[place] = value
        return changed

    # definitions -------------------------------------------------------------------------------------------

    def _define(self, equations: list[Constraint]) -> None:
        for equation in equations:
            for side, other in ((equation.left, equation.right), (equation.right, equation.left)):
                if isinstance(side, Attr) and not places(other) and self._now(side.place) == self.value(other, {}):
                    self.definitions.setdefault(side.place, other)
        pending = [e for e in equations if self._unknown(e)]
        while pending:
            rest = []
            for equation in pending:
                unknown = self._unknown(equation)
                if len(unknown) == 1 and not self._solve(equation, unknown[0]):
                    continue
                if len(unknown) > 1:
                    rest.append(equation)
            if len(rest) == len(pending):
                break
            pending = [e for e in rest if self._unknown(e)]

    def _unknown(self, equation: Constraint) -> list[Place]:
        both = (*places(equation.left), *places(equation.right))
        return [place for place in dict.fromkeys(both) if place not in self.definitions]

    def _solve(self, equation: Constraint, place: Place) -> bool:
        """Define the only unknown place of an equation, by undoing the arithmetic around it."""
        here, there = equation.left, equation.right
        count = [sum(isinstance(p, Attr) and p.place == place for p in parts(e)) for e in (here, there)]
        if sum(count) != 1:
            return False
        if count[1]:
            here, there = there, here
        while isinstance(here, Op):
            on_left = any(isinstance(p, Attr) and p.place == place for p in parts(here.left))
            undone = _undo(here, there, on_left)
            if undone is None:
                return False
            here, there = (here.left if on_left else here.right), undone
        if self._now(place) != self.value(there, {}):
            return False
        self.definitions[place] = there
        return True

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
        near = {n + d for n in literals for d in (-1, 0, 1)}
        tries += [{atom: n} for atom in atoms[:8] for n in near if 0 < n < atom.size]
        return all(self.holds(constraint, counts) for counts in tries)

    def _tighten(self, constraints: list[Constraint]) -> list[Constraint]:
        """Fix the axes that some constraint lets keep only all of their positions; until nothing changes."""
        while True:
            changed = False
            rest = []
            for constraint in constraints:
                atoms = self.atoms_of(constraint.left, constraint.right)
                if not atoms:
                    continue
                if len(atoms) == 1 and not any(self.holds(constraint, {atoms[0]: n}) for n in range(1, atoms[0].size)):
                    fix(atoms[0], self.reason(constraint))
                    changed = True
                else:
                    rest.append(constraint)
            constraints = rest
            if not changed:
                return constraints

    def reason(self, constraint: Constraint) -> str:
        """Why a constraint keeps an axis whole, in words."""
        literal = next((p for e in (constraint.left, constraint.right) for p in parts(e) if isinstance(p, Lit)), None)
        equal = constraint.symbol == "==" and constraint.outcome
        if equal and (isinstance(constraint.left, Lit) or isinstance(constraint.right, Lit)):
            assert literal is not None
            return f"{literal.value} is a literal at {constraint.where}; hold it in an attribute to make it cuttable"
        return f"its size must satisfy {self._words(constraint)} at {constraint.where}"

    def _words(self, constraint: Constraint) -> str:
        negation = "" if constraint.outcome else "not "
        left, right = (words(expr, self._named) for expr in (constraint.left, constraint.right))
        return f"{negation}{left} {constraint.symbol} {right}"

    def _named(self, layout: Layout) -> str:
        names = self._names()
        found = [names[atom] for atom in atoms_in(layout) if atom in names]
        return f"the {layout.size} of {found[0]}" if found else f"a size of {layout.size}"


def _undo(op: Op, result: Expr, on_left: bool) -> Expr | None:
    """The expression for the operand on one side of `left op right = result`; None where it is not determined."""
    if on_left:
        inverse = {"+": "-", "-": "+", "*": "//", "//": "*"}.get(op.symbol)
        return None if inverse is None else Op(inverse, result, op.right)
    if op.symbol in ("+", "*"):
        return Op("-" if op.symbol == "+" else "//", result, op.left)
    if op.symbol in ("-", "//"):
        return Op(op.symbol, op.left, result)
    return None
