"""What is written in the documentation: its pages, and the fenced blocks of each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r"^```(?P<language>\S*)(?P<rest>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r"<!-- needs: ([\w ]+) -->\n")
_TITLE = re.compile(r'^ title="([^"]*)"$|^ \{\.py title="([^"]*)"\}$')  # the second is not touched by formatters


@dataclass(frozen=True)
class Block:
    """A fenced block; `title` is what the site shows above it."""

    language: str
    title: str
    body: str
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(text):
        title = _TITLE.match(match["rest"])
        assert title or not match["rest"], f'```{match["language"]}{match["rest"]}: only title="…" may follow'
        line = text.count("\n", 0, match.start()) + 2
        shown = title is not None and title[2] is not None
        name = "" if title is None else title[2] or title[1] or ""
        found.append(Block("py" if shown else match["language"], name, match["body"], line))
    return found


def needs(text: str) -> list[str]:
    """The packages that a page is about, as a comment at its top says: `<!-- needs: peft -->`."""
    found = _NEEDS.match(text)
    return found[1].split() if found else []


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", text)


def fits(written: str, real: str) -> bool:
    """Whether a text says what is real, however its lines are broken; … stands for anything."""
    parts = (re.escape(" ".join(part.split())) for part in written.split("…"))
    return re.search(r"\s*.*?\s*".join(parts), " ".join(real.split())) is not None
