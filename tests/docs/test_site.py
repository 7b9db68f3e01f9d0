"""The site holds together: every page has its place, every link leads somewhere, every error and name has its page."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import secateur as sec
from docs.pages import DOCS, PAGES, ROOT, blocks, prose

_LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")


class _Loader(yaml.SafeLoader):
    """Passes over the tags by which mkdocs.yml names Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def _site() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    return found


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(part)


def _anchor(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


def _anchors(page: Path) -> set[str]:
    return {_anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)}


def test_every_page_has_one_place_in_the_navigation() -> None:
    pages = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert sorted(_leaves(_site()["nav"])) == pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for found in _LINK.findall(prose(page.read_text())):
        link = found[0] or found[1]
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), f"{link} is not there"
        assert DOCS not in page.parents or DOCS in there.parents, f"{link} leads out of the site"
        assert not anchor or anchor in _anchors(there), f"{link}: there is no such heading"


def _errors() -> set[type]:
    """Every error that the library has."""
    for module in pkgutil.walk_packages(sec.__path__, "secateur."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: set[type] = set()
    ahead: list[type] = [sec.SecateurError]
    while ahead:
        error = ahead.pop()
        found.add(error)
        ahead += error.__subclasses__()
    return {error for error in found if error.__module__.startswith("secateur.")}


def test_every_error_has_a_page_that_shows_it() -> None:
    pages = {page.stem: page for page in (DOCS / "errors").glob("*.md")}
    names = [error.__name__ for error in _errors()]
    assert len(set(names)) == len(names), "two errors share a name"
    assert pages.keys() == set(names) | {"index", "SecateurWarning"}
    index = pages.pop("index").read_text()
    for name, page in pages.items():
        assert f"]({name}.md)" in index
        text = page.read_text()
        assert "## What to do" in text
        assert [block for block in blocks(text) if block.language == "python"]


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    documented = re.findall(r"^::: secateur\.([\w.]+)$", text, re.MULTILINE)
    assert {path.rpartition(".")[2] for path in documented} >= set(sec.__all__)
    # A bare name that is a module too would put the module there.
    rooms = {module.name for module in pkgutil.iter_modules(sec.__path__)}
    assert set(documented) & rooms <= {"prune", "ao", "schedule", "training", "report", "sweep", "onnx", "gguf"}


def test_one_screen() -> None:
    """The README is read at a glance."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
