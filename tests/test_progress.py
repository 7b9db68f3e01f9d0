"""A bar on a terminal, one at a time; nothing elsewhere."""

from __future__ import annotations

import os
import pty
import re
import sys
from collections.abc import Iterator

import pytest

from secateur.progress import __file__ as _FILE
from secateur.progress import progress, silent


def on_a_terminal(code: str) -> str:
    """What Python code writes to a terminal. The module is loaded by itself: the package takes its time."""
    start = (
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location('alone', {_FILE!r})\n"
        "alone = module_from_spec(spec)\nspec.loader.exec_module(alone)\n"
        "progress, silent = alone.progress, alone.silent\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-I", "-c", start + code])
    written = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        written += part
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, written.decode()
    return written.decode()


def test_a_bar_on_a_terminal_is_gone_at_the_end() -> None:
    written = on_a_terminal("print('sum', sum(progress([1, 2, 3], 'adding')))")
    assert "adding" in written
    assert "100%" in written
    assert re.search(r"\d:\d\d:\d\d|-:--:--", written)  # the time left
    assert "sum 6" in written
    assert written.index("\x1b[2K", written.rindex("adding")) < written.index("sum 6")  # the line is cleared


def test_a_bar_inside_of_another_is_not_shown_and_the_next_one_is() -> None:
    written = on_a_terminal(
        "for _ in progress(range(2), 'outer'): list(progress(range(2), 'inner'))\n"
        "stopped = progress(range(9), 'stopped'); next(stopped); stopped.close()\n"
        "try:\n    for _ in progress(range(9), 'failed'): raise ValueError\nexcept ValueError: pass\n"
        "with silent(): list(progress(range(2), 'hidden'))\n"
        "list(progress(iter(range(2)), 'unknown length'))"
    )
    for shown in ("outer", "stopped", "failed", "unknown length"):
        assert shown in written
    assert "inner" not in written
    assert "hidden" not in written


def test_what_has_no_length_may_say_its_share() -> None:
    """As the iterators of `Data` with a limit do."""
    written = on_a_terminal(
        "import time\n"
        "class Endless:\n"
        "    n = 0\n"
        "    share = property(lambda self: self.n / 20)\n"
        "    def __iter__(self): return self\n"
        "    def __next__(self):\n"
        "        if self.n == 20: raise StopIteration\n"
        "        self.n += 1; time.sleep(0.05); return self.n\n"
        "print('sum', sum(progress(Endless(), 'reading')))"
    )
    parts = {int(part) for part in re.findall(r"(\d+)%", written)}
    assert 100 in parts
    assert any(0 < part < 100 for part in parts)
    assert re.search(r"\d:\d\d:\d\d", written)
    assert "sum 210" in written


def test_nothing_is_written_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    with silent():
        assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_no_stderr(stderr: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = None
    if stderr == "closed":
        with open(os.devnull, "w") as stream:
            pass
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress(range(3), "counting")) == [0, 1, 2]


def test_items_are_taken_one_by_one() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for n in range(3):
            taken.append(n)
            yield n

    for n in progress(items(), "counting"):
        assert taken == list(range(n + 1))
