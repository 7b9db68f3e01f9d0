"""Cases of a test of which a few stand for all in `make test`; `make zoo` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def represented(cases: Iterable[Any], by: Iterable[Any]) -> list[Any]:
    """All cases, those that are not in `by` marked as slow."""
    quick = list(by)
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
