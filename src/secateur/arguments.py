"""What users pass, checked in one way everywhere: `where: name is what it has to be, not what it was`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

from secateur.errors import SecateurError

_SHOWN = 80  # characters of a value in a message
_LISTED = 2**16  # names at most: some iterables have no end


@dataclass(frozen=True)
class Rule:
    """What an argument has to be, in words and as a function."""

    says: str
    holds: Callable[[Any], bool]


def an_int(least: int = 1, most: int | None = None) -> Rule:
    """A whole number.

    >>> an_int(1).holds(3), an_int(1).holds(True), an_int(1).holds(3.0), an_int(1, 2).holds(3)
    (True, False, False, False)
    """
    says = f"a whole number from {least} on" if most is None else f"a whole number from {least} to {most}"
    return Rule(says, lambda v: _is_whole(v) and least <= v and (most is None or v <= most))


def a_number(
    *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf, most: float = math.inf
) -> Rule:
    """A finite number.

    >>> a_number(least=0, below=1).says, a_number(above=0).says
    ('a number from 0 to below 1', 'a number above 0')
    >>> a_number().holds(float("nan")), a_number().holds(10**400), a_number(above=0).holds(0.5)
    (False, False, True)
    """
    bounds = ((f" above {above:g}", above), (f" from {least:g}", least), (f" to below {below:g}", below))
    words = "".join(word for word, bound in (*bounds, (f" to {most:g}", most)) if math.isfinite(bound))
    words += " on" * (math.isfinite(least) and below == most == math.inf)

    def holds(value: Any) -> bool:
        return is_finite(value) and above < value < below and least <= value <= most

    return Rule(f"a number{words}", holds)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether something is a finite number that a float can hold.

    >>> is_finite(1), is_finite(True), is_finite("1"), is_finite(float("inf"))
    (True, False, False, False)
    """
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def an_instance(kind: type | tuple[type, ...], says: str) -> Rule:
    """An object of a class, in words of the user's."""
    return Rule(says, lambda value: isinstance(value, kind))


def a_function(says: str) -> Rule:
    """Something to call."""
    return Rule(says, callable)


def optional(rule: Rule) -> Rule:
    """Also None.

    >>> optional(an_int(1)).says
    'a whole number from 1 on, or None'
    """
    return Rule(f"{rule.says}, or None", lambda value: value is None or rule.holds(value))


SEED = Rule("a whole number", lambda value: _is_whole(value) and abs(value) < 2**62)
FLAG = Rule("True or False", lambda value: isinstance(value, bool) or (_is_whole(value) and value in (0, 1)))
PATH = an_instance((str, os.PathLike), "a path")
NAMES = Rule(
    "a name or glob, or a list of them",
    lambda value: not isinstance(value, Iterator) and all(isinstance(name, str) for name in listed(value)),
)


def listed(names: Any) -> tuple[Any, ...]:
    """One name or several, as several; what is neither stays as it is.

    >>> listed("a"), listed(["a", "b"]), listed(3)
    (('a',), ('a', 'b'), (3,))
    """
    if not isinstance(names, Iterable) or isinstance(names, str):
        return (names,)
    try:
        several = tuple(islice(names, _LISTED + 1))
    except TypeError:  # a tensor without dimensions
        return (names,)
    return several if len(several) <= _LISTED else (names,)


def check(where: str, error: type[SecateurError], given: Mapping[str, Any], /, **rules: Rule) -> None:
    """Refuse the first argument that is not what it has to be.

    >>> from secateur.errors import PlanError
    >>> check("NM", PlanError, {"n": 0}, n=an_int(1))
    Traceback (most recent call last):
    secateur.errors.PlanError: NM: n is a whole number from 1 on, not 0
    """
    for name, rule in rules.items():
        if not rule.holds(given[name]):
            raise error(f"{where}: {name} is {rule.says}, not {shown(given[name])}")


def check_fields(value: Any, error: type[SecateurError], /, **rules: Rule) -> None:
    """As `check`, for what a value holds; its class says where."""
    check(type(value).__name__, error, {name: getattr(value, name) for name in rules}, **rules)


def shown(value: object) -> str:
    """A value of somebody else's making, safe to put in a message: short, in one line, whatever it is.

    >>> shown("a" * 100)[-3:], shown(10 ** 5000)
    ('aaa', 'a value of type int')
    """
    try:
        return " ".join(ascii(value).split())[:_SHOWN]
    except Exception:  # any code of the user's may run here
        return f"a value of type {type(value).__name__}"
