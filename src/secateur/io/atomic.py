"""Writing a file so that a crash leaves the old one or the new one, never a part."""

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from secateur.errors import FileError
from secateur.io.file import about


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new, empty file beside `path`, which takes its place if the block ends well and vanishes if not.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "note")
    >>> with replacing(path, overwrite=False) as new:
    ...     _ = new.write_text("whole")
    >>> path.read_text()
    'whole'
    """
    path = Path(os.path.realpath(path))  # a link stays one, and what it leads to is replaced
    old = _mode(path, overwrite)
    new = path.with_name(f".secateur-{secrets.token_hex(8)}.tmp")
    try:
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
        mode = stat.S_IMODE(new.stat().st_mode) if old is None else old
        yield new
        new.chmod(mode)  # whoever wrote it may have put a file of their own in its place
        sync(new, os.O_RDWR)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every system can sync a folder
        sync(path.parent, os.O_RDONLY)


def _mode(path: Path, overwrite: bool) -> int | None:
    """The permissions of the file that will be replaced; None where there is none."""
    if not path.parent.is_dir():
        raise FileError(f"there is no folder {path.parent}; make it first")
    try:
        found = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        raise FileError("there is something that is no file; give the path of a file")
    if not overwrite:
        raise FileError("there is a file already; pass overwrite=True to replace it, or another path")
    return stat.S_IMODE(found)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, which gets its name if the block ends well and vanishes if not.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "notes")
    >>> with new_folder(path) as new:
    ...     _ = (new / "one").write_text("whole")
    >>> [each.name for each in path.iterdir()]
    ['one']
    """
    target = path.absolute()
    new = target.with_name(f".secateur-{secrets.token_hex(8)}.tmp")
    try:
        with about(path):
            check_new(path)
            new.mkdir()
        yield new
        with about(path):
            for file in (*new.iterdir(), new):
                sync(file, os.O_RDONLY)
            os.replace(new, target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    with about(path):
        sync(target.parent, os.O_RDONLY)


def check_new(path: Path) -> None:
    """Refuse a place where a new folder cannot be, or must not."""
    if not path.absolute().parent.is_dir():
        raise FileError(f"there is no folder {path.absolute().parent}; make it first")
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise FileError("there is something already; give the path of a new folder")


def sync(path: Path, flags: int) -> None:
    """Have the system write a file or a folder to the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
