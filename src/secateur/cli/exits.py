"""How the command ends: a code for scripts, and one line for people."""

from __future__ import annotations

import enum
import errno
import os
import re
from collections.abc import Iterator

from secateur.errors import ApplyError, FileError, PlanError, SecateurError, TraceError
from secateur.onnx import OnnxError


class Exit(enum.IntEnum):
    """What a script can tell from the exit code.

    >>> int(Exit.TARGET)
    4
    """

    DONE = 0
    DIFFERENT = 1
    USAGE = 2
    INPUT = 3
    TARGET = 4
    WRITE = 5
    VERIFY = 6
    BUG = 70
    INTERRUPTED = 130
    PIPE = 141

    @property
    def meaning(self) -> str:
        """One line of the help."""
        return _MEANINGS[self]


_MEANINGS = {
    Exit.DONE: "done (diff: no difference)",
    Exit.DIFFERENT: "diff: they differ",
    Exit.USAGE: "the command line is wrong, or a package is missing",
    Exit.INPUT: "the model, its weights or a file cannot be used",
    Exit.TARGET: "the target cannot be reached",
    Exit.WRITE: "the results cannot be written",
    Exit.VERIFY: "the cut, or the exported model, did not pass its check; nothing was written",
    Exit.BUG: "an error inside Secateur",
    Exit.INTERRUPTED: "interrupted; nothing is half-written",
    Exit.PIPE: "whoever read the output stopped reading",
}


class UsageError(SecateurError, ValueError):
    """The command line asks for something that is not there."""


class InputError(SecateurError, ValueError):
    """What the command line names is there, but is not what it should be."""


class WriteError(SecateurError, OSError):
    """Results cannot be written."""


class MissingPackageError(UsageError, ImportError):
    """An optional package is not installed; the message is the line that installs it."""

    def __init__(self, package: str, why: str) -> None:
        install = _INSTALLED_AS.get(package, package)
        super().__init__(f"{why} needs {package}, which is not installed: pip install {install}")


_INSTALLED_AS = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "cv2": "opencv-python",
    "yaml": "pyyaml",
    "bs4": "beautifulsoup4",
}


_CODES: tuple[tuple[type[BaseException], Exit], ...] = (
    (UsageError, Exit.USAGE),
    (WriteError, Exit.WRITE),
    (InputError, Exit.INPUT),
    (PlanError, Exit.TARGET),
    (ApplyError, Exit.VERIFY),
    (OnnxError, Exit.VERIFY),
    (TraceError, Exit.INPUT),
    (FileError, Exit.INPUT),
    (SecateurError, Exit.INPUT),
    (KeyboardInterrupt, Exit.INTERRUPTED),
    (BrokenPipeError, Exit.PIPE),
    (OSError, Exit.WRITE),
)


def code(error: BaseException) -> Exit:
    """The exit code of an error.

    >>> code(PlanError("Macs(0.01) cannot be reached"))
    <Exit.TARGET: 4>
    """
    return next((exit_ for kind, exit_ in _CODES if isinstance(error, kind)), Exit.BUG)


def one_line(error: BaseException) -> str:
    """What an error says, on a single line.

    >>> one_line(ValueError("first\\n   second"))
    'first second'
    """
    if isinstance(error, OSError) and not isinstance(error, SecateurError) and error.errno is not None:
        return f"{error.filename or 'writing'}: {os.strerror(error.errno)}"
    return " ".join(str(error).split()) or type(error).__name__


_REMEDIES = {
    errno.ENOSPC: "free some, or write elsewhere with --out",
    errno.EDQUOT: "free some, or write elsewhere with --out",
    errno.EFBIG: "raise the limit (ulimit -f), or write elsewhere with --out",
    errno.EACCES: "write elsewhere with --out, or change its permissions",
    errno.EPERM: "write elsewhere with --out, or change its permissions",
    errno.EROFS: "write elsewhere with --out",
    errno.ENOTDIR: "give --out a folder",
}


def not_written(error: BaseException, where: object) -> WriteError | None:
    """The error as one of writing to `where`, if the system is what refused; None otherwise.

    >>> print(not_written(OSError(errno.ENOSPC, "full"), "out"))
    out: No space left on device; free some, or write elsewhere with --out. Nothing was written
    """
    number = _errno(error)
    if number is None:
        return None
    remedy = _REMEDIES.get(number, "write elsewhere with --out")
    return WriteError(f"{where}: {os.strerror(number)}; {remedy}. Nothing was written")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came from, what that came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _errno(error: BaseException) -> int | None:
    """The system's error number somewhere in what led to an error; safetensors has it in its text only."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno
        found = re.search(r"\(os error (\d+)\)", str(cause))
        if found:
            return int(found[1])
    return None
