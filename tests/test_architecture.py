"""What holds for the code as a whole."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
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

# Which rooms each room may use, as the page for people says it; what is not named there does not exist.
ROWS = re.findall(
    r"^\| `(\w+)(?:/|\.py)` \|.*\|([^|]*)\|$", (ROOT.parents[1] / "ARCHITECTURE.md").read_text(), re.MULTILINE
)
EVERYWHERE = {"errors", "arguments", "compat", "progress"}
MAY_USE = {room: EVERYWHERE | set(re.findall(r"\w+", named)) for room, named in ROWS}
MAY_USE |= {"errors": set(), "arguments": {"errors"}, "compat": {"errors"}, "progress": {"errors"}}


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


def test_rooms_use_those_above_them() -> None:
    order = [room for room, _ in ROWS]
    for at, (room, named) in enumerate(ROWS):
        assert set(re.findall(r"\w+", named)) <= set(order[:at]), f"{room} may use a room below it"


def test_every_part_has_its_place() -> None:
    known = {*MAY_USE, "__init__", "__main__"}
    assert {part_of(file) for file in FILES} - known == set()


def test_no_name_hides_a_module() -> None:
    """`import secateur.planning` gives the room, never a function of the same name."""
    names = [info.name for info in pkgutil.walk_packages(secateur.__path__, "secateur.") if "__main__" not in info.name]
    modules = {name: importlib.import_module(name) for name in names}
    homes = {name: importlib.import_module(name.rpartition(".")[0]) for name in names}
    assert [name for name in names if getattr(homes[name], name.rpartition(".")[2]) is not modules[name]] == []


def test_the_algebra_knows_no_torch() -> None:
    assert [f.name for f in FILES if part_of(f) == "axes" and any(n.startswith("torch") for n in imported(f))] == []


def test_ops_are_named_in_one_room() -> None:
    """What is known of an op is in its record; others ask for a part of it."""
    naming = {f for f in FILES if "secateur.compat.aten" in imported(f) or "torch.ops.aten" in f.read_text()}
    assert {str(f.relative_to(ROOT)) for f in naming if part_of(f) not in ("ops", "compat")} == set()


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


# Jobs that hand each other's options on.
JOBS = (secateur.plan, secateur.apply, secateur.compress, secateur.sweep, secateur.iterate)
JOBS += (secateur.LeastSquares, secateur.Constants, secateur.Statistics)


def test_an_option_has_one_default() -> None:
    found: dict[str, dict[str, str]] = {}
    for job in JOBS:
        for option in inspect.signature(job).parameters.values():
            if option.default is not option.empty:
                found.setdefault(option.name, {})[job.__name__] = repr(option.default)
    assert len(found["bias"]) == 3
    assert {name: by_job for name, by_job in found.items() if len(set(by_job.values())) > 1} == {}


def test_importing_the_package_does_not_import_the_compiler() -> None:
    code = "import secateur, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
