"""What people and programs see: results on stdout, everything else on stderr, bars only on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

_ENDLESS = 10_000  # columns of an output that is not a terminal: no line is broken


@dataclass(frozen=True)
class Screen:
    """Where a command's words go.

    >>> Screen(quiet=True, json=True).data({"macs": 3})
    {
      "macs": 3
    }
    """

    quiet: bool = False
    json: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: sys.stderr)

    def show(self, *things: RenderableType) -> None:
        """Results for people: nothing when they asked for quiet, or a program reads JSON."""
        if not (self.quiet or self.json):
            console = _console(self.out)
            for thing in things:
                _print(console, thing)
            self.out.flush()

    def data(self, thing: Any) -> None:
        """Results for programs, where they are asked for."""
        if self.json:
            self.out.write(json.dumps(thing, indent=2) + "\n")
            self.out.flush()

    def note(self, text: str) -> None:
        """Something that is worth knowing and does not change what happens."""
        if not self.quiet:
            _console(self.err).print(f"note: {text}", soft_wrap=True)

    @contextlib.contextmanager
    def steps(self, count: int) -> Iterator[Steps]:
        """A progress bar of `count` steps."""
        console = _console(self.err)
        hidden = self.quiet or not console.is_terminal
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        steps = Steps(*columns, console=console, transient=True, disable=hidden)
        steps.add_task("", total=count, completed=-1)  # the first to begin makes it 0
        try:
            yield steps
        finally:
            steps.stop()


class Steps(Progress):
    """A bar that says what is being done."""

    def begin(self, what: str) -> None:
        """The step before is done; this one begins."""
        self.update(self.task_ids[0], description=what, advance=1)
        self.start()
        self.refresh()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bar while something else shows its own."""
        self.stop()
        try:
            yield
        finally:
            self.start()


def _console(file: TextIO) -> Console:
    """A console for a file; names are shown as they are, whatever brackets or colons they have."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _ENDLESS
    return console


def _print(console: Console, thing: RenderableType) -> None:
    """Print; outside of a terminal, without the trailing blanks of a table's last column."""
    if console.is_terminal:
        console.print(thing)
        return
    with console.capture() as text:
        console.print(thing)
    console.file.write("".join(f"{line.rstrip()}\n" for line in text.get().splitlines()))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> Table:
    """A table; the columns called `numbers` are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column in numbers
        made.add_column(column, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def size(count: int) -> str:
    """A number of bytes with a unit.

    >>> size(512), size(46_830_000)
    ('512 B', '46.8 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def count(number: float) -> str:
    """A count with a unit prefix.

    >>> count(950), count(11_689_512), count(1_814_073_344)
    ('950', '11.69M', '1.81G')
    """
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f}{unit}"
    return f"{number:.0f}"
