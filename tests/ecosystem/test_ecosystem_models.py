"""Models of other libraries, cut, and then used in ways that the example did not show."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from beyond.harness import Case, fine, judge
from ecosystem.library_models import LIBRARIES

pytestmark = pytest.mark.ecosystem

PARTS = {"vit_pytorch": ("cait", "deepvit"), "monai": ("networks.nets",), "mambapy": ("mamba",)}


def imported(library: str) -> Any:
    """A library with the parts of it that are used; a test without it is skipped."""
    found = pytest.importorskip(library)
    for part in PARTS.get(library, ()):
        import_module(f"{library}.{part}")
    return found


@pytest.mark.parametrize(
    ("library", "name"), [(library, name) for library, entries in LIBRARIES.items() for name in entries]
)
def test_a_model_of_another_library_is_cut_and_right(library: str, name: str) -> None:
    build, inputs = LIBRARIES[library][name](imported(library))
    case = Case(name, build, inputs)
    result = judge(case)
    assert fine(case, result), str(result)
