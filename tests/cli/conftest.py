"""The command, ready to be called, and a file with small models."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import NET, Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return Command(capsys, tmp_path)
