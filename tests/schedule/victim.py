"""A process that runs the loop in forks of itself, each killed (SIGKILL) by itself at a planted moment or from outside.

Reads requests, one JSON object per line: the folder of the checkpoint, the floor, at most one of `event`, the number
of the planted moment to die at, `call`, the number of the call of any Python function to die at, and `seconds`, after
which it is killed. Answers with the exit status and what the fork printed: the result of the run.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from schedule_models import accuracy, digest, digits, mlp, train

import secateur as sec
from secateur.schedule import iterate, linear, loop

torch.set_num_threads(1)
X, Y = digits(64)
os.fsync = lambda _: None  # the process is killed, the machine goes on
_count = 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plant(owner, name, event) -> None:
    """Count the calls of a function as events; the process dies before the given one."""
    original = getattr(owner, name)

    def counted(*args, **kwargs):
        global _count
        _count += 1
        if _count == event:
            if name == "write_text":  # in the middle of the bytes
                path, text = args
                original(path, text[: len(text) // 2])
            die()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


class Calls:
    """Counts the calls of Python functions, whoever's they are; the process dies at the given one."""

    def __init__(self, last: int) -> None:
        self.count, self.last = 0, last
        sys.setprofile(self)

    def __call__(self, frame, kind, _):
        if kind == "call":
            self.count += 1
            if self.count == self.last:
                die()


class User:
    """The user's own functions, which draw from all three global generators."""

    @staticmethod
    def fit(model):
        train(model, X, Y)
        with torch.no_grad():
            model[5].bias += random.random() + torch.from_numpy(np.random.rand(10)).float()

    @staticmethod
    def evaluate(model):
        return accuracy(model, X, Y)


def loop_in(folder, floor=None):
    model = mlp()
    random.seed(1)
    np.random.seed(2)
    return model, iterate(
        model,
        X[:1],
        sec.Macs(0.4),
        fit=lambda m: User.fit(m),
        evaluate=lambda m: User.evaluate(m) - (5 if sum(p.numel() for p in m.parameters()) < 800 else 0),
        schedule=linear(2),
        floor=floor,
        checkpoint=folder,
    )


def attempt(folder, floor, event, call) -> None:
    moments = [(User, "fit"), (User, "evaluate"), (loop, "apply"), (safetensors.torch, "save_file")]
    for owner, name in (*moments, (Path, "replace"), (Path, "write_text"), (Path, "unlink"), (Path, "mkdir")):
        plant(owner, name, event)
    calls = None if call is None else Calls(call)
    model, found = loop_in(folder, floor)
    sys.setprofile(None)
    rounds = [(r.number, r.part, r.macs, r.params, r.before, r.after) for r in found.rounds]
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    counted = {"events": _count, "calls": calls and calls.count}
    print(json.dumps({"result": [digest(model), found.best.number, rounds, drawn], **counted}))


def answer(folder, floor=None, event=None, call=None, seconds=None) -> tuple[int, str]:
    reader, writer = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.dup2(writer, 1)
        try:
            attempt(folder, floor, event, call)
        finally:
            sys.stdout.flush()
            os._exit(1 if sys.exc_info()[0] else 0)
    os.close(writer)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(fork, signal.SIGKILL)  # if it has ended, it is a zombie still, and this does nothing
    with os.fdopen(reader) as pipe:
        printed = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), printed


if __name__ == "__main__":
    loop_in(None)  # what torch does only once is done before the forks
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
