"""A second process, started once, in which tests run code and which they may kill."""

import contextlib
import json
import subprocess
import sys
import textwrap

import pytest

# Reads one request per line, runs it in a fork of itself, answers with the fork's exit status and what it printed.
_SERVER = """
import json, os, signal, sys, traceback
import torch
from torch import nn
import safetensors.torch
import secateur as sec
from secateur.io import load, save

torch.set_num_threads(1)

def net(value, width=64):
    layer = nn.Linear(width, width, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer

for line in sys.stdin:
    code, folder = json.loads(line)
    reader, writer = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.chdir(folder)
        os.dup2(writer, 1)
        try:
            exec(code, globals())
        except BaseException:
            print(traceback.format_exc())
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        printed = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    print(json.dumps([status, printed]), flush=True)
"""


@pytest.fixture(scope="session")
def _server():
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        with contextlib.suppress(BrokenPipeError):
            server.stdin.close()


@pytest.fixture
def child(_server, tmp_path):
    """Run code in another process, in `tmp_path`; it must end with the given status; returns what it printed."""

    def run(code: str, status: int = 0) -> str:
        _server.stdin.write(json.dumps([textwrap.dedent(code), str(tmp_path)]) + "\n")
        _server.stdin.flush()
        ended, printed = json.loads(_server.stdout.readline())
        assert ended == status, printed
        return printed

    return run
