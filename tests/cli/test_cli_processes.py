"""The command as people and scripts run it: installed, with pipes, terminals, signals, limits."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_line import NET, SCRIPT, Forked, become, env, process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def test_a_pipe_gets_json_and_nothing_else(folder: Path) -> None:
    """timm imports torchvision, whose operators need not load beside a CPU torch: the command works all the same."""
    ended = process("inspect", "timm:test_vit", "--json", folder=folder)
    assert ended.code == 0, ended.err
    assert len(json.loads(ended.out)["axes"]) == 19
    assert ended.err == ""


def test_a_users_file_that_imports_torchvision(folder: Path) -> None:
    (folder / "vision.py").write_text(
        "def build():\n    from torchvision.models import squeezenet1_1\n    return squeezenet1_1()\n"
    )
    ended = process("inspect", "vision.py:build", "--example", "1x3x64x64", folder=folder)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("build (SqueezeNet): ")


def slow_to_save(folder: Path) -> list[str]:
    """A model whose report takes for ever: by then, the model and the plan are written."""
    (folder / "slow.py").write_text(
        NET + "\nimport pathlib, time\nimport secateur.cli.report\n\n"
        "def write(story, new, name='report'):\n"
        "    (new / 'report.html').write_text('half of')\n"
        "    pathlib.Path('begun').touch()\n"
        "    time.sleep(200)\n\n"
        "secateur.cli.report.write = write\n"
    )
    return ["prune", "slow.py:pair", "--ratio", "0.5", "--out", "out", "--report"]


def test_interrupted_in_the_middle_of_writing(folder: Path) -> None:
    """By Ctrl-C, and by whoever stops a job."""
    running = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        place = folder / number.name
        place.mkdir()
        running[number, place] = Forked(*slow_to_save(place), folder=place)
    for (number, place), command in running.items():
        deadline = time.monotonic() + 100
        while not (place / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(list((place / "out").rglob("*.safetensors"))) == 1
        os.kill(command.pid, number)
        ended = command.ended()
        assert ended.error == "interrupted; nothing is half-written"
        assert ended.code == 130
        assert not (place / "out").exists()


def test_a_disk_that_takes_only_so_much(folder: Path) -> None:
    """A real limit of the system on the size of a file, met in the middle of the weights."""
    (folder / "wide.py").write_text(
        "import torch\nfrom torch import nn\n"
        "wide = lambda: (nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64)), torch.ones(1, 64))\n"
    )
    argv = "prune", "wide.py:wide", "--ratio", "0.5", "--out", "out"
    limit = 100_000, 100_000
    ended = Forked(*argv, folder=folder, prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)).ended()
    assert ended.code == 5
    assert ended.error.startswith("out: File too large; ")
    assert not (folder / "out").exists()


def test_a_reader_that_stops_reading(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [SCRIPT, "inspect", "net.py:pair"], cwd=folder, env=env(), stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert done.returncode == 141
    assert done.stderr == "printed by the user's file\n"


def test_an_output_that_is_full(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [SCRIPT, "inspect", "net.py:pair"], cwd=folder, env=env(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1] == "secateur: writing: No space left on device"


def terminal(folder: Path, *argv: str) -> tuple[int, str]:
    """Run in a terminal; the exit code and everything that appeared in it."""
    child, master = pty.fork()
    if child == 0:
        become(argv, folder, TERM="xterm-256color", COLUMNS="100")
    seen = b""
    try:
        while chunk := os.read(master, 4096):
            seen += chunk
    except OSError:  # how a terminal says that the other side is gone
        pass
    _, status = os.waitpid(child, 0)
    os.close(master)
    return os.waitstatus_to_exitcode(status), seen.decode()


def test_a_terminal_gets_a_progress_bar(folder: Path) -> None:
    code, seen = terminal(folder, "prune", "net.py:pair", "--ratio", "0.5")
    assert code == 0, seen
    assert "cutting and verifying" in seen
    assert "━" in seen
    code, seen = terminal(folder, "prune", "net.py:pair", "--ratio", "0.5", "--quiet", "--force")
    assert (code, seen.strip()) == (0, "printed by the user's file")
