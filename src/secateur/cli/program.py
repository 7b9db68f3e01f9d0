"""The command line as a whole: its commands, and how each ends."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from secateur.cli import demo, diff, inspect, prune, show, sparsify, sweep
from secateur.cli.exits import Exit, UsageError, code, one_line
from secateur.cli.packages import did_you_mean
from secateur.cli.screen import Screen
from secateur.io.file import library_version
from secateur.progress import silent

_COMMANDS: dict[str, Any] = {
    "inspect": inspect,
    "prune": prune,
    "sparsify": sparsify,
    "sweep": sweep,
    "show": show,
    "diff": diff,
    "demo": demo,
}
_EXITS = "exit codes:\n" + "\n".join(f"  {exit_.value:>3}  {exit_.meaning}" for exit_ in Exit)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and what might have been meant."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{'' if message.endswith('?') else '.'} See {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is None:  # a command's own: an option that it lacks is told before one that is missing
            for option in (word.partition("=")[0] for word in args or () if word.startswith("--")):
                if option not in self._option_string_actions:
                    self.error(f"there is no option {option}{did_you_mean(option, self._option_string_actions)}")
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{rest[0]} is one argument too many")
        return found, rest


def parser() -> argparse.ArgumentParser:
    """The whole command line.

    >>> parser().parse_args(["inspect", "timm:resnet18", "--json"]).model
    'timm:resnet18'
    """
    made = _Parser(
        prog="secateur",
        description="Make PyTorch models smaller and faster: cut them, prove the cut right, see what happened.",
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"secateur {library_version()}")
    commands = made.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, module in _COMMANDS.items():
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        sub.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors and what --json asks for")
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    >>> main(["inspect"]) == Exit.USAGE
    True
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with _ended_like_interrupted():
            return _run(sys.argv[1:] if argv is None else argv)
    except SystemExit as ended:  # --help, --version
        return int(ended.code or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return Exit.PIPE
    except BaseException as error:
        return _failed(error)


def _run(argv: Sequence[str]) -> int:
    made = parser()
    if not argv:
        made.print_help()
        return Exit.USAGE
    if not argv[0].startswith("-") and argv[0] not in _COMMANDS:
        raise UsageError(f"there is no command {argv[0]!r}{did_you_mean(argv[0], _COMMANDS)} See secateur --help")
    args = made.parse_args(argv)
    screen = Screen(quiet=args.quiet, json=args.json)
    bars = silent() if screen.quiet else contextlib.nullcontext()
    # what users' files print is no result, what other packages warn of is advice to programmers
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(action="ignore"), bars:
        return int(args.run(args, screen))


def _failed(error: BaseException) -> Exit:
    """Say what went wrong in one line."""
    exit_ = code(error)
    line = exit_.meaning if exit_ is Exit.INTERRUPTED else one_line(error)
    if exit_ is Exit.BUG:
        line = f"{exit_.meaning}: {type(error).__name__}: {line} (SECATEUR_DEBUG=1 shows where)"
    if os.environ.get("SECATEUR_DEBUG"):
        traceback.print_exception(error)
    with contextlib.suppress(OSError):
        print(f"secateur: {line}", file=sys.stderr)
    return exit_


@contextlib.contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that temporary files are removed."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
