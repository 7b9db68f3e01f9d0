"""Running the command: inside of this process, or as people do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from secateur.cli import main

SCRIPT = Path(sys.executable).with_name("secateur")

NET = """
import torch
from torch import nn

print("printed by the user's file")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))


def pair():
    return build(), torch.ones(1, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = build()

    def forward(self, x):
        return self.inner(x)


made = build()
number = 3


def nothing():
    return None


def fails():
    raise ValueError("first line\\nsecond line")


def imports():
    import no_such_package


def examples():
    return [torch.ones(1, 4), torch.full((2, 4), 2.0)]


def generated():
    yield from examples()


def pairs():
    return [(torch.ones(2, 4), torch.tensor([0, 1]))]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def total(model):
    return float(sum(p.abs().sum() for p in model.parameters()))


def text(model):
    return "good"


def nan(model):
    return float("nan")
"""


@dataclass(frozen=True)
class Ended:
    """How a run of the command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what went wrong."""
        lines = [line for line in self.err.splitlines() if line != "printed by the user's file"]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("secateur: ")
        assert not self.out
        return lines[0].removeprefix("secateur: ")


class Command:
    """The command in this process, in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.folder = folder

    def __call__(self, *argv: object) -> Ended:
        self._capsys.readouterr()
        code = main([str(word) for word in argv])
        return Ended(code, *self._capsys.readouterr())

    def files(self) -> dict[str, bytes]:
        """Everything in the folder but the user's files, hidden ones too."""
        found = (path for path in self.folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in found if path.suffix != ".py"}


def process(*argv: object, folder: Path, **environment: str) -> Ended:
    """The installed command, as a process of its own."""
    done = subprocess.run([SCRIPT, *map(str, argv)], cwd=folder, env=env(**environment), capture_output=True, text=True)
    return Ended(done.returncode, done.stdout, done.stderr)


class Forked:
    """The command in a fork of this process, which has imported everything already: the rest is as in a new one."""

    def __init__(self, *argv: str, folder: Path, prepare: Callable[[], object] = lambda: None) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(self._out.fileno(), 1)
            os.dup2(self._err.fileno(), 2)
            become(argv, folder, prepare)

    def ended(self) -> Ended:
        """How it ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said = []
        for file in (self._out, self._err):
            file.seek(0)
            said.append(file.read().decode())
            file.close()
        return Ended(code, *said)


def become(argv: tuple[str, ...], folder: Path, prepare: Callable[[], object] = lambda: None, **more: str) -> None:
    """Be the command from here on, in a fork whose descriptors 1 and 2 lead where its output goes."""
    code = 1
    try:
        os.chdir(folder)
        os.environ.update(env(**more))
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        prepare()
        code = main(argv)
        sys.stdout.flush()  # as Python does at the end
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def env(**more: str) -> dict[str, str]:
    """One thread, and nothing from the network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}
