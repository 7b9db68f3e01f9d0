"""A second process, started once, in which tests run code and which they may kill."""

import functools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

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


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Started at the first use; ends when this process does and closes its input."""
    return subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def child(code: str, folder: Path, status: int = 0) -> str:
    """Run code in another process, in a folder; it must end with the given status; returns what it printed."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([textwrap.dedent(code), str(folder)]) + "\n")
    server.stdin.flush()
    ended, printed = json.loads(server.stdout.readline())
    assert ended == status, printed
    return str(printed)
