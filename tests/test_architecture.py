"""What holds for the code as a whole."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import secateur
from secateur import prune

ROOT = Path(secateur.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Which parts of the package each part may use. Imports point one way, from the algebra up.
MAY_USE = {
    "errors": set(),
    "axes": {"errors"},
    "nn": {"errors"},
    "trace": {"errors", "axes", "nn"},
    "progress": {"errors"},
    "calibrate": {"errors", "nn", "trace"},
    "importance": {"errors", "progress", "axes", "nn", "trace", "calibrate"},
    "plan": {"errors", "axes", "nn", "trace", "importance"},
    "surgery": {"errors", "axes", "nn", "trace", "importance", "plan"},
    "verify": {"errors", "axes", "nn", "trace", "importance", "plan", "surgery"},
    "compensate": {"errors", "progress", "trace", "calibrate", "importance", "plan", "surgery"},
    "latency": {"errors", "progress", "axes", "trace", "importance", "plan", "surgery"},
    "prune": {"errors"},  # masks stand beside the engine
}
ENGINE = {*MAY_USE, "apply", "compress", "io", "schedule", "sweep", "difference", "onnx", "report"} - {"prune"}


def part_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(file: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, inside of functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def used(file: Path) -> set[str]:
    """The other parts of the package that a file uses."""
    names = {name.split(".")[1] for name in imported(file) if name.startswith("secateur.")}
    return names - {part_of(file)}


@pytest.mark.parametrize("part", MAY_USE)
def test_imports_point_one_way(part: str) -> None:
    files = [file for file in FILES if part_of(file) == part]
    assert files
    assert {str(f.relative_to(ROOT)): used(f) - MAY_USE[part] for f in files if used(f) - MAY_USE[part]} == {}


def test_masks_sparsifiers_and_the_command_are_used_by_nothing_in_the_engine() -> None:
    beside = {"prune", "ao", "cli", "demo"}
    assert [str(f.relative_to(ROOT)) for f in FILES if part_of(f) in ENGINE and used(f) & beside] == []


def test_every_part_has_its_place() -> None:
    known = {*ENGINE, "prune", "ao", "cli", "demo", "__init__", "__main__"}
    assert {part_of(file) for file in FILES} - known == set()


def test_the_algebra_knows_no_torch() -> None:
    assert [f.name for f in FILES if part_of(f) == "axes" and any(n.startswith("torch") for n in imported(f))] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_are_small(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 400
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    too_long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno >= 60}
    assert too_long == {}


def public(module: ModuleType) -> list[tuple[str, str]]:
    return [(module.__name__, name) for name in module.__all__]


@pytest.mark.parametrize(("home", "name"), public(secateur) + public(prune))
def test_public_names_have_an_example(home: str, name: str) -> None:
    """An error needs none: its docstring says when it is raised."""
    thing = getattr({"secateur": secateur, "secateur.prune": prune}[home], name)
    doc = inspect.getdoc(thing)
    assert doc, f"{home}.{name} has no docstring"
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return
    assert ">>>" in doc, f"the docstring of {home}.{name} has no example"


def test_importing_the_package_does_not_import_the_compiler() -> None:
    code = "import secateur, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
