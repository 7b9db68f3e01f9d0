"""A progress bar on a terminal; nothing anywhere else."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

T = TypeVar("T")

_TERMINAL = Lock()  # held by the bar that is shown: one at a time, those inside of it stay silent


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Go through the items while a bar on stderr, named `what`, shows how far it got.

    >>> sum(progress([1, 2, 3], "adding"))
    6

    The bar is gone when the items are. What has no length may have an iterator with a `share`, from 0 to 1, of what was
    gone through; else no time is said to be left. There is no bar where stderr is not a terminal, inside of another one
    and inside of `silent()`.
    """
    if not _is_terminal() or not _TERMINAL.acquire(blocking=False):
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import Progress

        source = iter(items)
        shared = getattr(source, "share", None) is not None
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=1.0 if shared else _length(items))
            for number, item in enumerate(source, 1):
                yield item
                bar.update(task, completed=source.share if shared else number)  # type: ignore[attr-defined]
    finally:
        _TERMINAL.release()


@contextmanager
def silent() -> Iterator[None]:
    """No progress bars inside.

    >>> with silent():
    ...     sum(progress([1, 2, 3], "adding"))
    6
    """
    mine = _TERMINAL.acquire(blocking=False)
    try:
        yield
    finally:
        if mine:
            _TERMINAL.release()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no stderr, or it is closed
        return False


def _length(items: Iterable[object]) -> int | None:
    """How many items there are; None where only going through them will tell."""
    try:
        return len(items)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
