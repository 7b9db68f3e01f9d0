"""The files around the code: they can be read, and what they name is there."""

from __future__ import annotations

import ast
import builtins
import re
import runpy
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import yaml

import secateur as sec
from docs.pages import ROOT, blocks, prose
from secateur.report import scores_of

GUIDES = ("CONTRIBUTING.md", "README.md", "SECURITY.md")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
_PATH = re.compile(r"[\w.*/-]*/[\w.*/-]*|[\w*-]+\.(?:md|toml|txt|cff|ya?ml)")


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def spans(text: str) -> list[str]:
    """What stands between backticks in the prose of a page."""
    return re.findall(r"`([^`]+)`", prose(text))


def targets(text: str) -> set[str]:
    """The targets of every `make` in a page or in a script."""
    lines = [*spans(text), *(line for block in blocks(text) for line in block.body.splitlines())]
    called = [line.partition("#")[0].split()[1:] for line in lines if line.startswith("make ")]
    return {word for words in called for word in words if "=" not in word}


def paths(text: str) -> set[str]:
    """The files and folders that a page names or links; a file in a room is named by its full path."""
    return {span for span in spans(text) if _PATH.fullmatch(span)} | set(_LINK.findall(prose(text)))


@pytest.mark.parametrize("page", GUIDES)
def test_every_target_is_in_the_makefile(page: str) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets((ROOT / page).read_text()) - known == set()


@pytest.mark.parametrize("page", GUIDES)
def test_every_path_is_there(page: str) -> None:
    named = paths((ROOT / page).read_text())
    assert named
    assert [path for path in named if not list(ROOT.glob(path))] == []


def test_what_is_not_there_would_be_seen() -> None:
    text = "`make nothing` and `src/no/such.py`, `NO.md`, [x](none.md)\n\n```sh\nmake this that  # so\n```\n"
    assert targets(text) == {"nothing", "this", "that"}
    assert paths(text) == {"src/no/such.py", "NO.md", "none.md"}


def test_the_criterion_of_the_guide_scores() -> None:
    names: dict = {"__name__": "guide"}
    for block in blocks((ROOT / "CONTRIBUTING.md").read_text()):
        if block.language == "python":
            exec(compile(block.body, "CONTRIBUTING.md", "exec"), names)
    net = torch.nn.Sequential(torch.nn.Linear(1, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        net[0].weight[:, 0], net[2].weight[0] = torch.tensor([1.0, -3.0, 2.0]), torch.tensor([5.0, 1.0, 0.0])
    assert scores_of(sec.trace(net, torch.zeros(1, 1)), names["Largest"]()) == {"0 features": (6.0, 4.0, 2.0)}


def test_every_job_runs_a_command_on_a_checkout() -> None:
    job = read(".github/workflows/ci.yml")["jobs"]["test"]
    commands = [entry["command"] for entry in job["strategy"]["matrix"]["include"]]
    assert commands == [".ci/run", "make test-oldest"]
    assert (ROOT / commands[0]).stat().st_mode & 0o111
    assert job["steps"][-1]["run"] == "${{ matrix.command }}"
    assert PYPROJECT["project"]["requires-python"] == f">={job['container'].removeprefix('python:')}"


def test_hooks_run_what_lint_runs() -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in repository["hooks"]:
        program = hook["entry"].split(" --")[0]
        assert program.replace(".venv/bin", "$(BIN)") in lint, program
    assert len(repository["hooks"]) == lint.count("$(BIN)")


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    for key in ("version", "license", "keywords"):
        assert citation[key] == PYPROJECT["project"][key]


def test_the_package_has_what_it_reads() -> None:
    """Every file beside the code is covered by the package data that is declared."""
    package = Path(sec.__file__).parent
    declared = {
        path for glob in PYPROJECT["tool"]["setuptools"]["package-data"]["secateur"] for path in package.glob(glob)
    }
    beside = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    assert beside == declared


def test_the_wheel_is_tried_with_the_first_example() -> None:
    example = runpy.run_path(str(ROOT / "tools" / "check_dist.py"))["example"](ROOT / "README.md")
    assert example == next(b.body for b in blocks((ROOT / "README.md").read_text()) if b.language == "python")
    assert "sec.compress(" in example


def defined(folder: Path) -> dict[str, list[str]]:
    """The public classes and type aliases of a package, with the files that define them."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.name)
            elif isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
                names = [ast.unparse(target) for target in node.targets]
                for name in (name for name in names if name[0].isupper() and not name.isupper()):
                    found[name].append(path.name)
    return found


def test_one_name_is_one_thing() -> None:
    """No two public classes or type aliases share a name."""
    assert {name: files for name, files in defined(Path(sec.__file__).parent).items() if len(files) > 1} == {}


def test_a_name_used_twice_would_be_seen(tmp_path: Path) -> None:
    both = "class ERK: ...\nclass _Own: ...\nModel = TypeVar('Model')\nLIMIT = 3\n"
    (tmp_path / "a.py").write_text(f"class Part: ...\n{both}")
    (tmp_path / "b.py").write_text(f"Part = tuple[int, int]\n{both}")
    assert defined(tmp_path) == {"Part": ["a.py", "b.py"], "ERK": ["a.py", "b.py"]}


def test_what_is_broken_on_purpose_is_there() -> None:
    """`make mutations`: each names a function and tests, and what runs instead: a NameError proves nothing."""
    tools = runpy.run_path(str(ROOT / "tools" / "mutations.py"))
    for mutation in tools["MUTATIONS"]:
        file, _, name = mutation.function.partition(":")
        found = dict(tools["functions"](ast.parse((ROOT / "src" / "secateur" / file).read_text())))
        assert name in found, mutation.function
        given = {argument.arg for argument in ast.walk(found[name].args) if isinstance(argument, ast.arg)}
        used = {node.id for node in ast.walk(ast.parse(mutation.instead)) if isinstance(node, ast.Name)}
        assert used - given - set(dir(builtins)) == set(), mutation.function
        assert all((ROOT / test).exists() for test in mutation.tests.split()), mutation.tests
