"""A folder of results, replaced as a whole: all files of a run, or those that were there before."""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from secateur.cli.exits import WriteError, not_written
from secateur.cli.screen import size
from secateur.errors import FileError

_SIGNALS = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class Folder:
    """Where results go, and what they are called.

    >>> place = Path(tempfile.mkdtemp(), "out")
    >>> with Folder(place, ("note",)).filled() as new:
    ...     _ = (new / "note").write_text("whole")
    >>> [file.name for file in place.iterdir()]
    ['note']
    """

    path: Path
    names: tuple[str, ...]  # of every file that a run may leave here
    force: bool = False

    def check(self) -> None:
        """Refuse, before any work, a place that cannot be written to or that has results already."""
        there = self._nearest()
        if not there.is_dir():
            raise WriteError(f"{there} is a file; give --out a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise WriteError(f"{there} cannot be written to; write elsewhere with --out, or change its permissions")
        found = [name for name in self.names if os.path.lexists(self.path / name)]
        if found and not self.force:
            raise WriteError(f"{self.path} has {', '.join(found)} already; --force replaces, --out writes elsewhere")

    def check_empty(self) -> None:
        """Refuse a place that has anything: files of a checkpoint have names of their own."""
        if self.path.is_dir() and any(self.path.iterdir()):
            raise WriteError(
                f"{self.path} has files already; write a checkpoint of several files to a new folder (--out)"
            )

    def _nearest(self) -> Path:
        """The path itself, or its nearest parent that exists."""
        return next(place for place in (self.path, *self.path.absolute().parents) if os.path.lexists(place))

    @contextlib.contextmanager
    def filled(self, need: int = 0) -> Iterator[Path]:
        """A new folder, whose files come here if the block ends well; if not, all is as it was."""
        self.check()
        missing = [place for place in (self.path, *self.path.parents) if not place.exists()]
        try:
            free = shutil.disk_usage(self._nearest()).free
            if free < need:
                raise WriteError(f"{self.path}: {size(need)} are needed and {size(free)} free; use --out for elsewhere")
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".secateur-", dir=self.path) as work:
                new, old = Path(work, "new"), Path(work, "old")
                new.mkdir()
                old.mkdir()
                yield new
                with _undisturbed():
                    self._exchange(new, old)
            missing = []
        except WriteError:
            raise
        except (OSError, FileError, SafetensorError) as error:
            refused = not_written(error, self.path)
            if refused is None:
                raise
            raise refused from error
        finally:
            for place in missing:
                with contextlib.suppress(OSError):  # never made, or in use by another
                    place.rmdir()

    def _exchange(self, new: Path, old: Path) -> None:
        """Replace all results of an earlier run by those of this one."""
        away: list[str] = []
        come: list[str] = []
        try:
            for name in self.names:
                if os.path.lexists(self.path / name):
                    (self.path / name).replace(old / name)
                    away.append(name)
            for name in sorted(file.name for file in new.iterdir()):
                (new / name).replace(self.path / name)
                come.append(name)
        except BaseException:
            for name in come:
                (self.path / name).unlink()
            for name in away:
                (old / name).replace(self.path / name)
            raise


@contextlib.contextmanager
def made_inside(new: Path) -> Iterator[Path]:
    """The path of a folder that the block makes; its files come into `new`."""
    made = new / "made"
    yield made
    for file in made.iterdir():
        file.rename(new / file.name)
    made.rmdir()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the block, which is short, has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
