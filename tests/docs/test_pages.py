"""Every Python block of the documentation runs, in order, page by page, and puts out what the page says.

A block titled `raises NAME` must raise that error; a text block titled `message` is its message, one titled `prints` is
part of what the block before it printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from docs.pages import PAGES, ROOT, Block, blocks, fits, needs


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


class _Reader:
    """Runs the blocks of one page."""

    def __init__(self, page: Path, output: pytest.CaptureFixture[str]) -> None:
        self.page = page
        self.output = output
        self.names: dict[str, object] = {"__name__": "page"}
        self.message = self.printed = ""

    def read(self, block: Block) -> None:
        if block.language == "python":
            self.printed = self.message = ""
            self._run(block)
            self.printed = "".join(self.output.readouterr())
        elif block.title == "message":
            assert self.message
            assert fits(block.body, self.message), f"line {block.line}: the message is {self.message!r}"
        elif block.title == "prints":
            assert self.printed
            assert fits(block.body, self.printed), f"line {block.line}: printed was {self.printed!r}"
        else:
            # Anything else that looks like Python would be passed over.
            assert block.language in ("", "sh", "text") or block.body.startswith('--8<-- "examples/')

    def _run(self, block: Block) -> None:
        # Errors name the line of the page.
        code = compile("\n" * (block.line - 1) + block.body, str(self.page), "exec")
        kind, _, expected = block.title.partition(" ")
        assert kind in ("", "raises")
        if not expected:
            exec(code, self.names)
            return
        with pytest.raises(Exception) as caught:  # noqa: PT011, the name is looked at below
            exec(code, self.names)
        assert type(caught.value).__name__ == expected
        self.message = str(caught.value)


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for package in needs(page.read_text()):
        pytest.importorskip(package, reason=f"{_id(page)} is about {package}; `make ecosystem` installs it")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    reader = _Reader(page, capsys)
    for block in blocks(page.read_text()):
        reader.read(block)


def _page(tmp_path: Path, *found: Block) -> Path:
    path = tmp_path / "page.md"
    path.write_text("\n".join(f'```{b.language} title="{b.title}"\n{b.body}```\n' for b in found))
    return path


@pytest.mark.parametrize(
    "wrong",
    [
        [Block("python", "", "assert False\n", 0)],
        [Block("python", "raises KeyError", "1 / 0\n", 0)],
        [Block("python", "raises KeyError", "pass\n", 0)],
        [Block("python", "", "print('one')\n", 0), Block("text", "prints", "two\n", 0)],
        [Block("python", "raises ValueError", "int('x')\n", 0), Block("text", "message", "no number\n", 0)],
        [Block("py", "", "pass\n", 0)],
    ],
    ids=["fails", "another error", "no error", "prints something else", "another message", "not run"],
)
def test_what_is_wrong_is_noticed(wrong: list[Block], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = _page(tmp_path, *wrong)
    reader = _Reader(page, capsys)
    *first, last = blocks(page.read_text())
    for block in first:
        reader.read(block)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        reader.read(last)
