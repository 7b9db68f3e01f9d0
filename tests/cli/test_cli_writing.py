"""Whatever goes wrong while results are written: one line, a code, and everything as it was."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from command_line import Command

from secateur.cli import folder as folders
from secateur.cli.exits import Exit, WriteError
from secateur.cli.folder import Folder

PRUNE = ("prune", "net.py:pair", "--ratio", "0.5", "--out", "out")


def test_nothing_is_overwritten_without_force(command: Command) -> None:
    assert command(*PRUNE, "-q").code == Exit.DONE
    before = command.files()
    ended = command(*PRUNE, "--importance", "random")
    assert ended.code == Exit.WRITE
    assert ended.error == ("out has model.safetensors, plan.json already; --force replaces, --out writes elsewhere")
    assert command.files() == before
    assert command(*PRUNE, "--importance", "random", "--force").code == Exit.DONE
    after = command.files()
    assert after.keys() == before.keys()
    assert after != before


def test_a_forced_run_leaves_nothing_of_an_earlier_one(command: Command) -> None:
    """An ONNX file that belongs to another model must not stay beside the new one."""
    assert command(*PRUNE, "--onnx", "-q").code == Exit.DONE
    Path("out/mine.txt").write_text("kept")
    assert command(*PRUNE, "--force", "-q").code == Exit.DONE
    assert sorted(command.files()) == ["out/mine.txt", "out/model.safetensors", "out/plan.json"]


def test_other_files_in_the_folder_are_left_alone(command: Command) -> None:
    Path("out").mkdir()
    Path("out/mine.txt").write_text("mine")
    assert command(*PRUNE, "-q").code == Exit.DONE
    assert Path("out/mine.txt").read_text() == "mine"


def test_a_file_where_the_folder_should_be(command: Command) -> None:
    Path("out").write_text("mine")
    for out in ("out", "out/deeper/down"):
        ended = command("prune", "net.py:pair", "--ratio", "0.5", "--out", out)
        assert ended.code == Exit.WRITE
        assert "is a file; give --out a folder" in ended.error
    assert Path("out").read_text() == "mine"


def test_a_folder_that_may_not_be_written_to(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.os, "access", lambda *_: False)
    ended = command(*PRUNE)
    assert ended.code == Exit.WRITE
    assert "cannot be written to; write elsewhere with --out" in ended.error


def test_a_system_that_says_no_only_when_writing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "mkdir", refuse)
    ended = command(*PRUNE)
    assert ended.code == Exit.WRITE
    assert ended.error == (
        "out: Permission denied; write elsewhere with --out, or change its permissions. Nothing was written"
    )


def test_too_little_space_is_seen_before_writing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10))
    ended = command(*PRUNE)
    assert ended.code == Exit.WRITE
    assert "are needed and 10 B free" in ended.error
    assert not command.files()
    assert not Path("out").exists()


@pytest.mark.parametrize("old", [True, False], ids=["over old results", "fresh"])
@pytest.mark.parametrize("name", ["model.safetensors", "plan.json", "model.onnx", "report.html", "report.png"])
def test_no_space_at_any_file(command: Command, monkeypatch: pytest.MonkeyPatch, name: str, old: bool) -> None:
    """Each file in turn is the one that does not fit, half of it on the disk already."""
    if old:
        assert command(*PRUNE, "-q").code == Exit.DONE
    before = command.files()

    def full(path: Path) -> None:
        path.write_bytes(b"half of")
        raise OSError(errno.ENOSPC, "full")

    targets = {
        "model.safetensors": ("secateur.cli.prune.save", lambda _model, path: full(path)),
        "plan.json": ("pathlib.Path.write_text", lambda path, *_, **__: full(path)),
        "model.onnx": ("secateur.onnx.export", lambda _model, _example, path, **_: full(path)),
        "report.html": ("secateur.report.write_html", lambda _story, path: full(path)),
        "report.png": ("secateur.report.write_png", lambda _story, path: full(path)),
    }
    monkeypatch.setattr(*targets[name])
    more = ["--onnx"] if name == "model.onnx" else ["--report"] if name.startswith("report") else []
    ended = command(*PRUNE, "--force", *more)
    assert ended.code == Exit.WRITE
    assert ended.error == "out: No space left on device; free some, or write elsewhere with --out. Nothing was written"
    assert command.files() == before
    assert Path("out").exists() == old


def fill(folder: Folder, error: BaseException | None = None) -> None:
    """Two new files for a folder; the error comes when both are written."""
    with folder.filled() as new:
        for name in "ab":
            (new / name).write_text(f"new {name}")
        if error is not None:
            raise error


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_while_files_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Of two old files that two new ones replace, each of the four moves fails in turn: the old ones are there."""
    place = tmp_path / "out"
    place.mkdir()
    for name in "ab":
        (place / name).write_text(f"old {name}")
    real, moves = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        moves.append(target)
        if len(moves) == failing + 1:
            raise OSError(errno.EIO, "no")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(WriteError, match="Nothing was written"):
        fill(Folder(place, ("a", "b"), True))
    assert len(moves) > failing
    assert {file.name: file.read_text() for file in place.iterdir()} == {"a": "old a", "b": "old b"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no"), SystemExit(3)], ids=["^C", "error", "exit"])
def test_whatever_is_raised_nothing_is_left(tmp_path: Path, error: BaseException) -> None:
    place = tmp_path / "deep" / "down" / "out"
    with pytest.raises(type(error)):
        fill(Folder(place, ("a", "b")), error)
    assert list(tmp_path.iterdir()) == []
