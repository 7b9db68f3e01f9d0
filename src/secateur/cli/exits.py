"""How the command ends: a code for scripts, and one line for people."""

import enum
import errno
import os
import re
from collections.abc import Iterator
from typing import Self

from secateur.errors import ApplyError, MissingPackageError, PlanError, SecateurError
from secateur.onnx import OnnxError


class Exit(enum.IntEnum):
    """What a script can tell from the exit code, and one line of the help.

    >>> int(Exit.TARGET), Exit.TARGET.meaning
    (4, 'the target cannot be reached')
    """

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        made = int.__new__(cls, value)
        made._value_, made.meaning = value, meaning
        return made

    DONE = 0, "done (diff: no difference)"
    DIFFERENT = 1, "diff: they differ"
    USAGE = 2, "the command line is wrong, or a package is missing"
    INPUT = 3, "the model, its weights or a file cannot be used"
    TARGET = 4, "the target cannot be reached"
    WRITE = 5, "the results cannot be written"
    VERIFY = 6, "the cut, or the exported model, did not pass its check; nothing was written"
    BUG = 70, "an error inside Secateur"
    INTERRUPTED = 130, "interrupted; nothing is half-written"
    PIPE = 141, "whoever read the output stopped reading"


class UsageError(SecateurError, ValueError):
    """The command line asks for something that is not there."""


class InputError(SecateurError, ValueError):
    """What the command line names is there, but is not what it should be."""


class WriteError(SecateurError, OSError):
    """Results cannot be written."""


# the first that fits counts: WriteError is a SecateurError too, BrokenPipeError an OSError
_CODES: dict[Exit, tuple[type[BaseException], ...]] = {
    Exit.USAGE: (UsageError, MissingPackageError),
    Exit.TARGET: (PlanError,),
    Exit.VERIFY: (ApplyError, OnnxError),
    Exit.PIPE: (BrokenPipeError,),
    Exit.WRITE: (WriteError, OSError),
    Exit.INPUT: (SecateurError,),
    Exit.INTERRUPTED: (KeyboardInterrupt,),
}


def code(error: BaseException) -> Exit:
    """The exit code of an error.

    >>> code(PlanError("Macs(0.01) cannot be reached"))
    <Exit.TARGET: 4>
    """
    return next((exit_ for exit_, kinds in _CODES.items() if isinstance(error, kinds)), Exit.BUG)


def one_line(error: BaseException) -> str:
    """What an error says, on a single line.

    >>> one_line(ValueError("first\\n   second"))
    'first second'
    """
    if isinstance(error, OSError) and not isinstance(error, SecateurError) and error.errno is not None:
        return f"{error.filename or 'writing'}: {os.strerror(error.errno)}"
    return " ".join(str(error).split()) or type(error).__name__


_ELSEWHERE = "write elsewhere with --out"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"free some, or {_ELSEWHERE}"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"{_ELSEWHERE}, or change its permissions"),
    errno.EFBIG: f"raise the limit (ulimit -f), or {_ELSEWHERE}",
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
    remedy = _REMEDIES.get(number, _ELSEWHERE)
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
