"""The pages about other libraries, with these libraries. Run by `make ecosystem`, where nothing may be skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from docs.pages import DOCS, blocks, needs
from docs.test_pages import _Reader

pytestmark = pytest.mark.ecosystem
ABOUT = [page for page in sorted((DOCS / "libraries").glob("*.md")) if needs(page.read_text())]


@pytest.mark.parametrize("page", ABOUT, ids=lambda page: page.stem)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    torch.manual_seed(0)
    reader = _Reader(page, capsys)
    for block in blocks(page.read_text()):
        reader.read(block)


def test_every_library_has_a_page() -> None:
    assert {package for page in ABOUT for package in needs(page.read_text())} >= {
        "accelerate",
        "diffusers",
        "peft",
        "pytorch_lightning",
        "sentence_transformers",
        "ultralytics",
    }
