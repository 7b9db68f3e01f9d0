"""Every Python block of the documentation runs, in order, page by page."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks or page.name not in ("README.md", "cutting.md", "masks.md")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def test_masks_to_cuts() -> None:
    found = runpy.run_path(str(_ROOT / "examples" / "masks_to_cuts.py"))["main"]()
    for before, masked, removed, left in found.values():
        assert removed == masked  # removal changes no answer
        assert masked > before - 0.03
        assert left < 0.5
